"""Long runs that check that texts stay exact and that memory stays flat.

    python -m tests.soak calls --minutes 30      # calls of all kinds from several threads
    python -m tests.soak server --minutes 15     # clients of a server, a third of whom hang up
    python -m tests.soak hostile --minutes 30    # clients of a server, a third of whom attack it

`python -m tests.soak.killed_replica` kills one of two replicas; it needs `selfspec[ray]`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.engines.servers import selfspec_server
from layerskip_models import DEMO_PATH
from selfspec.cli.notes import one_line_errors
from tests.soak import serving_soak as serving
from tests.soak.hostile_clients import OPTIONS, HostileTrial
from tests.soak.soak import MOST_RSS, Soak

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.command(name="calls")
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to run; the first quarter is warm-up.")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="Number of threads that make calls at the same time.")] = 4,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Run calls of all kinds from several threads: policies, sampling, streams, errors, weight updates, nested calls.

    Uses a small random model. Checks every text against one computed beforehand, and memory, live tensors and threads at the
    end against those after the warm-up. Ends with status 1 if anything was wrong.
    """
    seconds = 60 * minutes
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("computing what is expected", total=seconds)
        running = Soak(threads=threads, seed=seed)

        def advance(label: str) -> None:
            bar.update(task, completed=bar.tasks[0].elapsed or 0, description=label)

        report = running.run(seconds, advance)
    print(f"{report.counts.total():,} calls in {minutes:g} minutes from {threads} threads: {_kinds(report.counts)}")
    assert report.warm is not None and report.end is not None
    for name in ("rss", "tensors", "tensor_bytes", "threads"):
        print(f"{name}: {getattr(report.warm, name)} after warm-up, {getattr(report.end, name)} at the end")
    print(f"resident memory may grow by {MOST_RSS >> 20} MB, the number of threads not at all")
    _exit_with(report.failures)


@app.command(name="server")
def serving_soak(
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes to run; the first quarter is warm-up.")] = 15,
    clients: Annotated[int, typer.Option(min=1, help="Clients at the same time.")] = 32,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Many clients of a server with the demo model: a third hang up, some send nonsense.

    Compares every finished answer with the same request run alone, offline. At the end the server must be idle, and its
    memory where it was after the warm-up. Ends with status 1 if anything was wrong.
    """
    errors = Console(stderr=True)
    with one_line_errors(), errors.status("computing what is expected") as status:
        soak = serving.ServingSoak(clients=clients, seed=seed)
        report = soak.run(60 * minutes, lambda label: status.update(label))
    print(f"{report.counts.total():,} requests in {minutes:g} minutes from {clients} clients: {_kinds(report.counts)}")
    print(
        f"the server's resident memory: {report.warm_rss >> 20} MB after warm-up, {report.end_rss >> 20} MB at the end; "
        f"it may grow by {serving.MOST_RSS >> 20} MB"
    )
    _exit_with(report.failures)


@app.command()
def hostile(
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to run.")] = 30,
    clients: Annotated[int, typer.Option(min=2, help="Clients at the same time; a third of them are hostile.")] = 12,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    most_seconds: Annotated[float, typer.Option(help="Longest wait for a first token that is allowed.")] = 2.0,
    most_growth: Annotated[
        float, typer.Option(help="Allowed growth of memory after the second fifth of the time, in percent.")
    ] = 5.0,
) -> None:
    """Attack a server with the demo model while other clients ask for texts.

    Their texts must be exact and begin in time, and the server's memory must stay flat. Ends with status 1 otherwise.
    """
    trial = HostileTrial(clients=clients, seed=seed, asked=serving.expected_answers())
    shown = time.monotonic()

    def advance(text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(text, flush=True)

    with selfspec_server(DEMO_PATH, OPTIONS) as server:
        report = trial.run(server, 60 * minutes, most_wait=most_seconds, most_growth=most_growth / 100, advance=advance)
    print("\n".join(report.lines()))
    if report.failures:
        raise typer.Exit(1)


def _kinds(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())


def _exit_with(failures: Sequence[str]) -> None:
    """Print the failures on stderr; status 1 if there are any."""
    for failure in failures:
        typer.echo(failure, err=True)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
