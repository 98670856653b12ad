"""Adversaries that generate cases.

python -m tests.fuzz --minutes 60                 # all of them in turn, and hostile clients of a server
python -m tests.fuzz.fuzz --cases 10000           # random calls, beside transformers
python -m tests.fuzz.broken_rounds --minutes 15   # errors in the middle of steps
python -m tests.fuzz.mutated_files --minutes 10   # changed files of checkpoints
python -m tests.fuzz.mutated_modules --minutes 10 # changed modules; --live: between two calls
"""
