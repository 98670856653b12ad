"""Changed modules: `python -m tests.fuzz.mutated_modules --minutes 10`; with `--live` between two calls."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does
