"""What a finished round costs by a cost model: its passes, whatever became of its drafts."""

from __future__ import annotations

from policies import CostModel, RoundRecord


def draft_passes(record: RoundRecord) -> tuple[int, bool]:
    """(Passes through the exit's layers that were looked at, whether verification finds all rows there already).

    What was copied goes through them in one pass. Where drafting stopped before a draw, or nothing was drafted behind a copy,
    the last row was looked at too; else verification runs that row through the first layers.
    """
    if record.exit_layer is None:
        return 0, False
    drafted = record.num_drafted - record.num_copied
    complete = record.stop_cause == "before_draw" or (record.num_tried > 0 and drafted == 0)
    return drafted + complete, complete


def round_cost(record: RoundRecord, cost: CostModel) -> float:
    """In the unit of the cost model."""
    exit_layer = record.exit_layer or 0
    passes, complete = draft_passes(record)
    if record.num_tried == 0:
        if not exit_layer:
            return cost.autoregressive()
        return cost.round(exit_layer, record.num_drafted) + complete * cost.look(exit_layer)
    copying = cost.copying(exit_layer, record.num_tried, record.num_drafted)
    if not exit_layer:
        return copying
    drafted = record.num_drafted - record.num_copied
    looks_less = drafted - (passes - 1)  # the pass of the copy has looked at the row that the first draft comes from
    return copying + cost.drafting(exit_layer, drafted) - looks_less * cost.look(exit_layer)
