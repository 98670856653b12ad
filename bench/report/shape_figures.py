"""Key figures of a record: plain decoding and `auto` against transformers, against each other, and against memory.

Bytes moved are those of `bench.machine.bandwidth.WeightBytes`. A policy's predicted gain over plain decoding is the ratio of
bytes per token, since at batch 1 the memory bus sets the pace. Rates are those of decoding alone, without prefill, where
both engines report it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.machine.bandwidth import WeightBytes
from bench.record import Line
from bench.report.summary import Samples

PLAIN, AUTO = "selfspec:ar", "selfspec:auto"
EAGER_PEER, STATIC_PEER = "transformers:generate", "transformers:static"


def shape_figures(lines: Sequence[Line]) -> list[Line]:
    """A "figure" line, {"what": text, "measured": float}, for each figure that the record can give."""
    samples = Samples(lines)
    limits = next((line for line in lines if line["kind"] == "limits"), None)
    made: list[Line] = []

    def add(what: str, measured: float | None) -> None:
        if measured is not None:
            made.append({"kind": "figure", "what": what, "measured": measured})

    def runs(engine: str) -> list[dict[str, Any]]:
        return [line for line in samples.samples if line["engine"] == engine and line["stats"]]

    def seconds_per_token(engine: str) -> float | None:
        found = runs(engine)
        tokens = sum(line["num_new_tokens"] - 1 for line in found)
        return sum(line["decode_seconds"] for line in found) / tokens if tokens else None

    def bytes_per_token(engine: str, weights: WeightBytes) -> float | None:
        found = runs(engine)
        tokens = sum(line["num_new_tokens"] - 1 for line in found)
        return sum(weights.moved(line["stats"]) for line in found) / tokens if tokens else None

    plain, auto = seconds_per_token(PLAIN), seconds_per_token(AUTO)
    gain = plain / auto if plain and auto else None
    for peer, name in ((EAGER_PEER, "generate"), (STATIC_PEER, "static, compiled")):
        if {PLAIN, peer} <= set(samples.engines):
            add(f"plain over transformers' {name}", samples.speedup(PLAIN, peer).value)
    add("auto over plain", gain)
    if limits is not None:
        weights = WeightBytes.from_line(limits)
        plain_bytes, auto_bytes = bytes_per_token(PLAIN, weights), bytes_per_token(AUTO, weights)
        if plain and plain_bytes:
            add("plain, share of bandwidth", plain_bytes / plain / limits["bytes_per_second"])
        if gain and plain_bytes and auto_bytes:
            add("auto's gain over what bytes moved predict", gain * auto_bytes / plain_bytes)
    found = runs(AUTO)
    if found:
        stats = [line["stats"] for line in found]
        rounds = [each for each in stats if each["etpl"] is not None]
        add(
            "auto, learning's share of the time",
            sum(each["learn_seconds"] for each in stats) / sum(each["seconds"] for each in stats),
        )
        if rounds:
            add("auto, eTPL", sum(each["etpl"] for each in rounds) / len(rounds))
        add("captures made while timed", float(sum(each["num_captures"] for each in stats)))
    return made
