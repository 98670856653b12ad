"""`python -m bench.experiments`: the studies. README.md says what each showed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.report_command import report
from bench.experiments.answers.answers_command import answers
from bench.experiments.attention.attention_command import attention
from bench.experiments.bounded_exits.bounded_command import bounded_exits
from bench.experiments.busy.busy_command import busy
from bench.experiments.chat_prompts.chat_prompts_command import chat_prompts
from bench.experiments.copy_index.copy_index_command import copy_index
from bench.experiments.copying.copying_command import copying_accuracy, copying_texts
from bench.experiments.copying.copying_gain_command import copying_gain
from bench.experiments.cores.cores_command import cores
from bench.experiments.draws.draws_command import draws
from bench.experiments.exit_adapters.exit_adapters_command import exit_adapters
from bench.experiments.exit_adapters.judge_command import judge_exits
from bench.experiments.exit_losses.exit_losses_command import exit_losses
from bench.experiments.fewer_bits.copy_command import draft_copies
from bench.experiments.fewer_bits.fine_tune_command import fine_tune
from bench.experiments.fewer_bits.rounding_command import compare_roundings
from bench.experiments.fewer_bits.weight_only_command import weight_only
from bench.experiments.ladder.ladder_command import ladder
from bench.experiments.leaves.leaves_command import leaves
from bench.experiments.loading.loading_command import loading
from bench.experiments.online_exits.online_exits_command import online_exits
from bench.experiments.predictions.predictions_command import predictions
from bench.experiments.ranks.ranks_command import ranks
from bench.experiments.readings.reading_tables import reading_tables
from bench.experiments.readings.readings import SEGMENT, Traces, too_short
from bench.experiments.record_kinds import STUDIES
from bench.experiments.records.records_command import records
from bench.experiments.row_parts.row_parts_command import row_parts
from bench.experiments.settings.settings_command import settings
from bench.experiments.sources_command import add_sources
from bench.experiments.spide.spide_command import spide
from bench.experiments.start_up.start_up_command import start_up
from bench.experiments.steered_exits.steered_command import steered_exits
from bench.experiments.variants.variants_command import variants
from bench.record import read_record, showing
from bench.report.record_kinds import KINDS
from bench.report.table import print_tables
from selfspec.cli.notes import one_line_errors

app = typer.Typer(
    help="Studies that are not part of the product.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def with_the_studies_tables() -> None:
    """Let `report`, and the end of each command, show the studies' records."""
    KINDS.update(STUDIES)


app.command()(chat_prompts)
app.command()(copying_texts)
app.command()(copying_accuracy)
app.command()(copying_gain)
app.command()(exit_losses)
app.command()(exit_adapters)
app.command()(judge_exits)
app.command()(online_exits)
app.command()(draft_copies)
app.command()(fine_tune)
app.command(name="roundings")(compare_roundings)
app.command()(weight_only)
app.command()(ladder)
app.command()(leaves)
app.command()(loading)
app.command()(copy_index)
app.command()(answers)
app.command()(attention)
app.command()(bounded_exits)
app.command()(busy)
app.command()(cores)
app.command()(draws)
app.command()(predictions)
app.command()(ranks)
app.command()(records)
app.command()(row_parts)
app.command()(settings)
app.command()(spide)
app.command()(start_up)
app.command()(steered_exits)
app.command()(variants)
app.command()(report)
app.command()(add_sources)


@app.command(name="readings")
def show_readings(
    record: Annotated[Path, typer.Argument(help="A record of selfspec-bench run, made without --no-grid.")],
    segment: Annotated[
        int | None,
        typer.Option(
            min=2, help=f"New tokens in a segment of a text, of which each text has three or more (default {SEGMENT})."
        ),
    ] = None,
) -> None:
    """Analyse the traces in a record, without decoding: how settings transfer between tasks and along a text, the best
    length of every round, acceptance by position in the draft.
    """
    with one_line_errors():
        lines = read_record(record)
        with showing(record):
            traces = Traces.of(lines)
            reason = None if traces is None else too_short(traces, segment or SEGMENT)
            found = reading_tables(lines, segment or SEGMENT)
        if not found:
            raise ValueError(f"{record} holds no traces: measure again with selfspec-bench run, without --no-grid")
        if reason is not None and segment is not None:
            raise ValueError(f"--segment {segment}: {reason}")
    print_tables(found)
    if reason is not None:
        typer.echo(f"segments are left out: {reason}", err=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what was started, too
    app()
