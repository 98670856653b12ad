"""`python -m tests.soak`: many calls of all kinds at once, or a server under clients that hang up. Do texts stay exact, and
does memory stay flat?
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from selfspec.cli.arguments import one_line_errors
from tests.soak import serving_soak as serving
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
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.most_common())
    print(f"{sum(report.counts.values()):,} calls in {minutes:g} minutes from {threads} threads: {counts}")
    assert report.warm is not None and report.end is not None
    for name in ("rss", "tensors", "tensor_bytes", "threads"):
        print(f"{name}: {getattr(report.warm, name)} after warm-up, {getattr(report.end, name)} at the end")
    print(f"resident memory may grow by {MOST_RSS >> 20} MB, the number of threads not at all")
    for failure in report.failures:
        errors.print(failure, markup=False, highlight=False)
    if report.failures:
        raise typer.Exit(1)


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
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.most_common())
    print(f"{sum(report.counts.values()):,} requests in {minutes:g} minutes from {clients} clients: {counts}")
    print(
        f"the server's resident memory: {report.warm_rss >> 20} MB after warm-up, {report.end_rss >> 20} MB at the end; "
        f"it may grow by {serving.MOST_RSS >> 20} MB"
    )
    for failure in report.failures:
        errors.print(failure, markup=False, highlight=False)
    if report.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
