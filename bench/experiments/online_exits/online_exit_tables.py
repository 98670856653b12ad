"""The tables of `online-exits`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.experiments.online_exits.stream import ARMS
from bench.record import Line, matching
from bench.report.table import Table, subject

_PARTS = 5  # of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """An exit on some blocks, with one kind of adapters.

    gain: tokens per loaded layer over plain decoding's, at the draft length that is best on these blocks.
    """

    agreement: float
    length: int
    gain: float


def _stretch(blocks: Sequence[Line], exit_layer: int, arm: str, num_layers: int) -> _Stretch:
    found = [one for block in blocks for one in block["exits"] if (one["exit_layer"], one["arm"]) == (exit_layer, arm)]
    rows, agreeing = (sum(one[name] for one in found) for name in ("rows", "agreeing"))
    gains = {
        int(length): num_layers
        * sum(one["new_tokens"][length] for one in found)
        / max(sum(one["loaded_layers"][length] for one in found), 1)
        for length in found[0]["new_tokens"]
    }
    length = max(gains, key=gains.__getitem__)
    return _Stretch(agreement=agreeing / max(rows, 1), length=length, gain=gains[length])


def _parts(lines: Sequence[Line]) -> list[list[Line]]:
    """The blocks in stretches of about equal length."""
    blocks = matching(lines, "block")
    ends = [round(len(blocks) * place / _PARTS) for place in range(_PARTS + 1)]
    return [blocks[first:end] for first, end in pairwise(ends) if first < end]


def online_headline(lines: Sequence[Line]) -> str:
    """The last stretch's best exit, in a sentence."""
    (run,) = matching(lines, "run")
    layers, depth = run["configuration"]["exit_layers"], run["configuration"]["num_layers"]
    last = _parts(lines)[-1]
    static, learning = (max(_stretch(last, layer, arm, depth).gain for layer in layers) for arm in ARMS)
    answers = sum(block["answers"] for block in matching(lines, "block"))
    return (
        f"{subject(lines)}, {answers:,} answers. In the last fifth, the best exit gives {learning:.2f} tokens per layer with "
        f"adapters that learn and {static:.2f} with those that it began with, {learning / static:.2f} times as many."
    )


def online_tables(lines: Sequence[Line]) -> list[Table]:
    """Both kinds of adapters along the stream, by exit; and what learning did."""
    (run,) = matching(lines, "run")
    layers, depth = run["configuration"]["exit_layers"], run["configuration"]["num_layers"]
    rows = []
    for layer in layers:
        for part in _parts(lines):
            static, learning = (_stretch(part, layer, arm, depth) for arm in ARMS)
            first, last = part[0]["first"] + 1, part[-1]["first"] + part[-1]["answers"]
            rows.append(
                {
                    "exit": str(layer),
                    "answers": f"{first:,} to {last:,}",
                    "agreement, static": f"{static.agreement:.3f}",
                    "learning": f"{learning.agreement:.3f}",
                    "tokens per layer, static": f"{static.gain:.3f}",
                    "learning ": f"{learning.gain:.3f}",
                    "ratio": f"{learning.gain / static.gain:.3f}",
                }
            )
    done = [
        {
            "after answers": f"{part[-1]['first'] + part[-1]['answers']:,}",
            "rows learned from": f"{part[-1]['learned']['rows']:,}",
            "held out": f"{part[-1]['learned']['held_out']:,}",
            "steps": f"{part[-1]['learned']['steps']:,}",
            "comparisons": f"{part[-1]['learned']['judged']:,}",
            "adapters replaced": f"{part[-1]['learned']['replaced']:,}",
            "taken back": f"{part[-1]['learned']['returned']:,}",
        }
        for part in _parts(lines)
    ]
    return [
        Table.of("online_exits", "Adapters that stay and adapters that learn", rows),
        Table.of("online_learning", "What learning did", done),
    ]
