"""Changed files and modules.

python -m tests.fuzz.mutated_files --minutes 10   # changed files of checkpoints
python -m tests.fuzz.mutated_modules --minutes 10 # changed modules; --live: between two calls
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does
