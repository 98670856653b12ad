"""How close each part of a round comes to the memory bus: its seconds, and the bytes that it must read.

Single calls come from the engine's own calibration (`selfspec.engine.calibrate`), which measured costs are made of;
phases come from whole runs, whose traces say what each round had to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.datasets import EncodedPrompt
from bench.engines.own import run_afresh
from bench.machine.bandwidth import WeightBytes
from bench.record import Line
from bench.report.table import counted
from policies import CostModel, MeasuredCost, RoundRecord, cost_of_round
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import fixed_settings, trace_agreement

ROWS = (1, 2, 4, 8)
"""Rows of a verification that the table shows."""
PHASES = ("draft", "verify", "accept", "learn", "other")
"""What the time after prefill is spent in, learning from the prompt included; `other` is what no phase counts."""


class Call(NamedTuple):
    """One of the engine's calls. num_bytes: what it must read, whatever else it does."""

    name: str
    seconds: float
    num_bytes: float


def calls(
    cost: MeasuredCost,
    weights: WeightBytes,
    *,
    context: int,
    exit_layers: Sequence[int],
    learning: Mapping[int, float],
) -> list[Call]:
    """List the calls that rounds consist of, at the context that the cost was timed at.

    learning: seconds of one learning step by rows.
    """
    layers = cost.num_layers
    layer, head = weights.layer + weights.kv * context, weights.head
    found = [
        Call("plain step", cost.autoregressive(), layers * layer + head),
        Call("one layer, 1 row", cost.layer_seconds[0], layer),
        Call("norm and head, 1 row", cost.head_seconds[0], head),
    ]
    for exit_layer in exit_layers:
        seconds = exit_layer * cost.layer_seconds[0] + cost.head_cost(exit_layer)
        found.append(Call(f"draft step, E = {exit_layer}", seconds, exit_layer * layer + weights.draft_head))
    for rows in ROWS:
        if rows <= len(cost.layer_seconds):
            seconds = layers * cost.layer_seconds[rows - 1] + cost.head_seconds[rows - 1]
            found.append(Call(f"all layers and head, {counted(rows, 'row')}", seconds, layers * layer + head))
    for rows, seconds in learning.items():
        found.append(Call(f"learning, {counted(rows, 'row')}", seconds, weights.draft_head))
    return found


def phase_bytes(
    trace: Iterable[RoundRecord], weights: WeightBytes, num_layers: int, cost: CostModel
) -> tuple[dict[str, float], float]:
    """Bytes that the rounds of a run had to read in drafting, verifying and learning; and what the cost says they cost.

    A layer's weights count once per pass, whatever the rows; keys and values as long as the text was when the round began.
    """
    read = {"draft": 0.0, "verify": 0.0, "learn": 0.0}
    seconds = 0.0
    for record in trace:
        layer = weights.layer + weights.kv * record.num_committed_before
        read["verify"] += num_layers * layer + weights.head
        seconds += cost_of_round(record, cost)
        if record.exit_layer is not None:
            # Where drafting stopped before a draw, the last row was looked at, too, and verification finds it there.
            complete = record.stop_cause == "before_draw"
            read["draft"] += (record.num_drafted + complete) * (record.exit_layer * layer + weights.draft_head)
            read["verify"] -= complete * record.exit_layer * layer
        if record.shadow is not None:
            read["learn"] += weights.draft_head
    return read, seconds


def measure_phases(
    generator: SelfSpecGenerator,
    policy: str,
    prompt: EncodedPrompt,
    repeat: int,
    max_new_tokens: int,
    weights: WeightBytes,
    cost: CostModel,
) -> Line:
    """Measure the phases of one run after the first token."""
    result = run_afresh(generator, policy, prompt.ids, max_new_tokens, trace=True)
    assert result.trace is not None
    stats = result.stats
    read, predicted = phase_bytes(result.trace, weights, generator.model.num_layers, cost)
    seconds = {
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
        "accept": stats.accept_seconds,
        "learn": stats.learn_seconds,
    }
    decoding = stats.seconds - stats.prefill_seconds
    return {
        "kind": "phases",
        "policy": policy,
        "prompt": prompt.id,
        "repeat": repeat,
        "tokens": stats.num_new_tokens - 1,
        "decode_seconds": decoding,
        "seconds": {**seconds, "other": max(0.0, decoding - sum(seconds.values()))},
        "bytes": read,
        "predicted_seconds": predicted,
    }


def best_fixed(generator: SelfSpecGenerator, prompt: EncodedPrompt, max_new_tokens: int, cost: CostModel) -> str:
    """Find the fixed setting that measured costs call best on this prompt, by replay of one traced run."""
    return fixed_settings(trace_agreement(generator, prompt.ids, max_new_tokens), cost)[0].policy
