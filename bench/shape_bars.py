"""What decoding real shapes on a GPU shall reach, beside what a record says it did.

Bytes moved are those of `bench.bandwidth.WeightBytes`; a policy's predicted gain over plain decoding is the ratio of bytes
per token, since at batch 1 the memory bus sets the pace. Rates are of decoding, prefill left out, where both engines tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.bandwidth import WeightBytes
from bench.record import Line
from bench.summary import Samples

PLAIN, AUTO = "selfspec:ar", "selfspec:auto"
EAGER_PEER, STATIC_PEER = "transformers:generate", "transformers:static"


def shape_bars(lines: Sequence[Line]) -> list[Line]:
    """A "limit" line for each figure that the record can give: what, measured, bound (None where nothing is asked)."""
    samples = Samples(lines)
    limits = next((line for line in lines if line["kind"] == "limits"), None)
    made: list[Line] = []

    def add(what: str, measured: float | None, at_least: float | None = None, at_most: float | None = None) -> None:
        if measured is not None:
            met = None
            if at_least is not None:
                met = measured >= at_least
            elif at_most is not None:
                met = measured <= at_most
            made.append(
                {
                    "kind": "limit",
                    "what": what,
                    "measured": measured,
                    "at_least": at_least,
                    "at_most": at_most,
                    "met": met,
                }
            )

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
    for peer, name, least in ((EAGER_PEER, "generate", 5.0), (STATIC_PEER, "static, compiled", 1.0)):
        if {PLAIN, peer} <= set(samples.engines):
            add(f"plain over transformers' {name}", samples.speedup(PLAIN, peer).value, at_least=least)
    add("auto over plain", gain, at_least=2.3)
    if limits is not None:
        weights = WeightBytes.from_line(limits)
        plain_bytes, auto_bytes = bytes_per_token(PLAIN, weights), bytes_per_token(AUTO, weights)
        if plain and plain_bytes:
            add("plain, share of bandwidth", plain_bytes / plain / limits["bytes_per_second"], at_least=0.8)
        if gain and plain_bytes and auto_bytes:
            add("auto's gain over what bytes moved predict", gain * auto_bytes / plain_bytes, at_least=0.9)
    found = runs(AUTO)
    if found:
        stats = [line["stats"] for line in found]
        rounds = [each for each in stats if each["etpl"] is not None]
        add(
            "auto, learning's share of the time",
            sum(each["learn_seconds"] for each in stats) / sum(each["seconds"] for each in stats),
            at_most=0.03,
        )
        if rounds:
            add("auto, eTPL", sum(each["etpl"] for each in rounds) / len(rounds))
        add("captures made while timed", float(sum(each["num_captures"] for each in stats)), at_most=0)
    return made
