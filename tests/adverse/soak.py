"""A server under hostile clients: the others' texts stay exact and come in time, and memory ends where it was.

    python -m tests.adverse.soak --minutes 30 --seed 0

The trials are those of `hostile_clients`, on `selfspec serve` in a process of its own: a third of the clients attack; then
four ask for what costs most, beside one that asks for little.
"""

from __future__ import annotations

import argparse
import sys

from bench.engines.servers import selfspec_server
from layerskip_models import DEMO_PATH
from tests.adverse.hostile_clients import COSTLY_OPTIONS, OPTIONS, HostileTrial, costly_trial, expected_answers


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.adverse.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--clients", type=int, default=12, help="clients, a third of them hostile (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--most-wait", type=float, default=2.0, help="seconds to a first token (default 2)")
    parser.add_argument("--most-growth", type=float, default=5.0, help="of the server's memory, in percent (default 5)")
    given = parser.parse_args(arguments)
    trial = HostileTrial(clients=given.clients, seed=given.seed, asked=expected_answers())
    with selfspec_server(DEMO_PATH, OPTIONS) as server:
        report = trial.run(server, 60 * given.minutes, max_wait=given.most_wait, max_growth=given.most_growth / 100)
    print("\n".join(report.lines()), flush=True)
    with selfspec_server(DEMO_PATH, COSTLY_OPTIONS) as server:
        costly = costly_trial(server, min(30.0, 60 * given.minutes), max_wait=given.most_wait)
    print("\n".join(costly.lines()))
    return int(bool(report.failures or costly.failures))


if __name__ == "__main__":
    sys.exit(main())
