"""`selfspec-bench soak`: many calls of all kinds at once; do they stay exact, and does memory stay flat?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.trials.soak import MOST_RSS, Soak


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
