"""Adversaries: generated calls, errors inside steps, changed files, hostile clients.

python -m tests.adverse.fuzz --cases 10000   # random calls, beside transformers
python -m tests.adverse.soak --minutes 30    # a server under hostile clients; memory at the end
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does
