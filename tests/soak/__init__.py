"""Long runs: `python -m tests.soak calls|server|hostile --minutes 30`, many calls at once or a server under its clients."""
