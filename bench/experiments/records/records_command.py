"""`python -m bench.experiments records`: every record of the repository again, at one commit on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.experiments.records.making import Code, Maker, Outcome, duration, keep, make_all
from bench.experiments.records.record_table import RECORDS
from bench.report.table import Table, print_tables
from bench.sources import ROOT
from selfspec.cli.arguments import checked_output_folder
from selfspec.cli.notes import one_line_errors


def records(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run each command with few prompts and tokens, to see that all of them work. Documents refuse such records.",
        ),
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Record to make; repeatable. Default: all of them.")] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with the prompts, texts and checkpoints that do not come with the package. Without it the records "
            "that need them are skipped, and each says what it needs.",
        ),
    ] = None,
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, and for what their commands say; those of --quick are in a folder quick in it.",
            callback=checked_output_folder,
        ),
    ] = Path("records"),
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Begin although files differ from the commit that records will name."),
    ] = False,
    keep_records: Annotated[
        bool,
        typer.Option("--keep", help="At the end, pack the complete records into their places in the repository."),
    ] = False,
) -> None:
    """Make every record again, one at a time, with --quick some at a time. The same command goes on where it stopped.

    A record that is complete at this commit stays as it is. The table of records is in
    bench/experiments/records/record_table.py. Ends with status 1 if a command failed, after the others.
    """
    with one_line_errors():
        if quick and keep_records:
            raise ValueError("--keep takes full records: leave out --quick, whose records show only that commands run")
        known = {source.name: source for source in RECORDS}
        unknown = [name for name in only or [] if name not in known]
        if unknown:
            raise ValueError(f"no record is called {', '.join(unknown)}: there are {', '.join(known)}")
        chosen = [source for source in RECORDS if not only or source.name in only]
        code = Code.here()
        if (code.commit is None or code.commit.endswith("+changes")) and not allow_changes:
            why = "there is no git repository here" if code.commit is None else "there are uncommitted changes"
            raise ValueError(
                f"{why}, so that records could not name the code that they measured: commit first, or give --allow-changes"
            )
        folder = (output_dir / "quick" if quick else output_dir).resolve()  # so that neither kind replaces the other
        maker = Maker(
            output_dir=folder,
            quick=quick,
            files=None if files is None else files.resolve(),
            code=code,
        )
        outcomes: dict[str, Outcome] = {}
        try:
            make_all(maker, chosen, outcomes, lambda line: typer.echo(line, err=True))
        except KeyboardInterrupt:
            typer.echo("interrupted: the same command goes on", err=True)
            raise typer.Exit(130) from None
        finally:
            if outcomes:
                print_tables([summary(outcomes)])
        for source in chosen if keep_records else ():
            if maker.is_complete(source):
                typer.echo(f"kept as {keep(maker, source).relative_to(ROOT)}")
    if any(outcome.failed for outcome in outcomes.values()):
        typer.echo(f"what the commands said is in {folder / 'logs'}", err=True)
        raise typer.Exit(1)


def summary(outcomes: dict[str, Outcome]) -> Table:
    """What became of each record."""
    rows = tuple(
        (name, duration(outcome.seconds / 60) if outcome.seconds else "–", outcome.what)
        for name, outcome in outcomes.items()
    )
    return Table(name="records", title="Records", columns=("record", "time", "outcome"), rows=rows, prose=True)
