"""What a report shows for the studies' records, and of the traces in a record of `selfspec-bench run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.experiments.answers.answers_tables import answers_headline, answers_tables
from bench.experiments.attention.attention_tables import attention_headline, attention_tables
from bench.experiments.bounded_exits.bounded_tables import bounded_headline, bounded_tables
from bench.experiments.busy.busy_tables import busy_headline, busy_tables
from bench.experiments.copying.copying_tables import copying_headline, copying_tables
from bench.experiments.cores.cores_tables import cores_headline, cores_tables
from bench.experiments.draws.draws_tables import draws_headline, draws_tables
from bench.experiments.exit_adapters.exit_tables import exit_tables, exits_headline
from bench.experiments.exit_adapters.judge_tables import judged_headline, judged_tables
from bench.experiments.exit_losses.exit_loss_tables import exit_loss_headline, exit_loss_tables
from bench.experiments.fewer_bits.copy_tables import copy_headline, copy_tables
from bench.experiments.fewer_bits.fine_tune_tables import fine_tune_headline, fine_tune_tables
from bench.experiments.fewer_bits.rounding_tables import rounding_headline, rounding_tables
from bench.experiments.ladder.ladder_tables import ladder_headline, ladder_tables
from bench.experiments.loading.loading_tables import loading_headline, loading_tables
from bench.experiments.online_exits.online_exit_tables import online_headline, online_tables
from bench.experiments.predictions.predictions_tables import predictions_headline, predictions_tables
from bench.experiments.readings.reading_tables import reading_tables
from bench.experiments.row_parts.row_parts_tables import row_parts_headline, row_parts_tables
from bench.experiments.settings.settings_tables import settings_headline, settings_tables
from bench.experiments.spide.spide_tables import spide_headline, spide_tables
from bench.experiments.steered_exits.steered_tables import steered_headline, steered_tables
from bench.experiments.variants.variants_tables import variants_headline, variants_tables
from bench.record import Line
from bench.report.record_kinds import KINDS, RecordKind
from bench.report.table import Table

_RUN = KINDS["run"]


def _run_page_tables(lines: Sequence[Line]) -> list[Table]:
    return [*_RUN.page_tables(lines), *reading_tables(lines)]


def _reading_figures(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    from bench.experiments.readings.reading_figures import reading_figures  # matplotlib takes a second to load

    return reading_figures(lines)


def _busy_figures(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    from bench.experiments.busy.busy_figures import busy_curves

    return {"speed": {"Speed beside busy processes": busy_curves(lines)}}


STUDIES: dict[str, RecordKind] = {
    "run": replace(
        _RUN,
        page_tables=_run_page_tables,
        figures=_reading_figures,
        headings={
            "transfer": "Transfer of a setting between tasks",
            "segments": "Segments of a text",
            "oracle": "Oracle lengths",
            "positions": "Acceptance by position in the draft",
            "conditional": "Acceptance after accepted tokens",
        },
    ),
    "answers": RecordKind(tables=answers_tables, headline=answers_headline, headings={"session": "A session of edits"}),
    "attention": RecordKind(tables=attention_tables, headline=attention_headline, headings={"attention": "Attention"}),
    "busy": RecordKind(
        tables=busy_tables, headline=busy_headline, figures=_busy_figures, headings={"cost": "Processor time"}
    ),
    "cores": RecordKind(
        tables=cores_tables,
        headline=cores_headline,
        headings={"threads": "Threads", "pool_parts": "Parts of a phase", "pool_model": "Larger machines"},
    ),
    "settings": RecordKind(
        tables=settings_tables,
        headline=settings_headline,
        headings={"settings": "Published settings and ours", "settings_free": "On texts without loops"},
    ),
    "spide": RecordKind(
        tables=spide_tables,
        headline=spide_headline,
        headings={
            "spide_arms": "SPIDE and its parts",
            "spide_free": "On texts that do not loop",
            "spide_tau": "Cost and speed by tau",
            "spide_ahead": "Drafts ahead",
        },
    ),
    "bounded-exits": RecordKind(
        tables=bounded_tables,
        headline=bounded_headline,
        headings={"bounded": "Bounded exits", "bounded_free": "On texts that do not loop"},
    ),
    "ladder": RecordKind(
        tables=ladder_tables,
        headline=ladder_headline,
        headings={
            "ladder_rungs": "Checkpoints",
            "ladder_settings": "Settings",
            "ladder_order": "Policies on each checkpoint",
            "ladder_claims": "Claims on each checkpoint",
            "ladder_order_free": "Policies, on texts that do not loop",
            "ladder_claims_free": "Claims, on texts that do not loop",
            "ladder_ranks": "Orders of two checkpoints",
        },
    ),
    "loading": RecordKind(tables=loading_tables, headline=loading_headline, headings={"loading": "Loading"}),
    "predictions": RecordKind(
        tables=predictions_tables,
        headline=predictions_headline,
        headings={"predictions": "What fixed drafts foretell"},
    ),
    "variants": RecordKind(
        tables=variants_tables,
        headline=variants_headline,
        headings={"variant_products": "Single products", "variant_models": "Whole models"},
    ),
    "draws": RecordKind(tables=draws_tables, headline=draws_headline, headings={"draws": "Sampling"}),
    "row-parts": RecordKind(
        tables=row_parts_tables, headline=row_parts_headline, headings={"row_parts": "Rows in parts"}
    ),
    "copying-gain": RecordKind(
        tables=copying_tables,
        headline=copying_headline,
        headings={
            "gain_estimated_seconds": "At a larger shape's costs",
            "gain_seconds": "Measured",
            "copy_sources": "Where tokens come from",
        },
    ),
    "exit-adapters": RecordKind(
        tables=exit_tables,
        headline=exits_headline,
        headings={
            "exits_gain": "Tokens per layer",
            "exits_agreement": "Agreement",
            "exits_accepted": "Accepted tokens",
            "exits_foretold": "What foretells them",
            "exits_speed": "Speed",
        },
    ),
    "judge-exits": RecordKind(
        tables=judged_tables,
        headline=judged_headline,
        headings={
            "judged_exits": "Exits",
            "judged_heads": "Draft heads",
            "judged_needed": "Agreement needed",
            "judged_supposed": "At a given agreement",
            "judged_speed": "Speed",
        },
    ),
    "steered-exits": RecordKind(
        tables=steered_tables,
        headline=steered_headline,
        headings={
            "steered_greedy": "Greedy",
            "steered_sampled_1": "At temperature 1",
            "steered_places": "By place in the draft",
        },
    ),
    "online-exits": RecordKind(
        tables=online_tables,
        headline=online_headline,
        headings={"online_exits": "Along the stream", "online_learning": "Learning"},
        trains=True,
    ),
    "roundings": RecordKind(
        tables=rounding_tables, headline=rounding_headline, headings={"roundings": "Other ways to round"}
    ),
    "draft-copies": RecordKind(
        tables=copy_tables, headline=copy_headline, headings={"draft_copies": "Memory of copies in fewer bits"}
    ),
    "fine-tune": RecordKind(
        tables=fine_tune_tables,
        headline=fine_tune_headline,
        headings={"fine_tune": "Drafts after a fine-tune"},
        trains=True,
    ),
    "exit-losses": RecordKind(
        tables=exit_loss_tables,
        headline=exit_loss_headline,
        headings={
            "exit_losses": "Tokens per layer, losses, loops",
            "exit_losses_paired": "Against uniform weights",
            "exit_losses_oracle": "With oracle lengths",
            "exit_losses_free": "Without loops",
            "exit_losses_agreement": "Agreement of the exits",
            "exit_losses_loss": "Loss of the exits",
        },
        trains=True,
    ),
}
"""By the command that wrote the record. `python -m bench.experiments report` adds them to those of `selfspec-bench`."""
