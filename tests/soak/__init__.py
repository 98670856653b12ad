"""Long runs: many calls at once, and a server under clients of all kinds."""
