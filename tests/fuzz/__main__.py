"""All adversaries, one after the other, each for its share of the time: random calls, errors inside steps, changed files and
modules, hostile clients.

    python -m tests.fuzz --minutes 60 --seed 0

Ends with status 1 if one of them found something; the others run all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

TRIALS: dict[str, tuple[tuple[str, ...], float]] = {
    "random calls beside transformers": (("tests.fuzz.fuzz", "--cases", "1000000"), 1),
    "errors in the middle of steps": (("tests.fuzz.broken_rounds",), 2),
    "changed files": (("tests.fuzz.mutated_files",), 2),
    "changed modules": (("tests.fuzz.mutated_modules",), 1),
    "modules changed between two calls": (("tests.fuzz.mutated_modules", "--live"), 1),
    "hostile clients": (("tests.soak", "hostile"), 1),
}
"""What each does: its module with its arguments, and its part of the time."""


def run_all(minutes: float, seed: int) -> list[str]:
    """What the trials that found something do. minutes: for all of them together. Their output goes to the terminal."""
    parts = sum(part for _, part in TRIALS.values())
    failed = []
    for does, ((module, *arguments), part) in TRIALS.items():
        share = minutes * part / parts
        command = [sys.executable, "-m", module, *arguments]
        command += ["--minutes", f"{share:.3f}", "--seed", str(seed)]
        print(f"== {does}, {share:.1f} minutes: {' '.join(command[1:])}", flush=True)
        started = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        print(f"== {does}: status {status} after {(time.monotonic() - started) / 60:.1f} minutes\n", flush=True)
        if status:
            failed.append(does)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the status to exit with."""
    parser = argparse.ArgumentParser(description="All adversaries, one after the other.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long in all (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    options = parser.parse_args(arguments)
    failed = run_all(options.minutes, options.seed)
    print(f"FAILED: {', '.join(failed)}" if failed else f"nothing found by {len(TRIALS)} trials")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
