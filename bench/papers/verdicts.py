"""What a record says of a paper's claims: ratios with 95 % intervals over prompts, and verdicts by fixed rules.

Only texts that do not end in a loop count for a verdict. An interval is a paired bootstrap over the prompts of all tasks
(`bench.report.interval_tables`). It says nothing of the drift between runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import log

import numpy as np

from bench.papers.preset import Claim, Preset, arms_in
from bench.record import Line, by_value, matching
from bench.report.interval_tables import FEWEST, Floats, drawn
from bench.report.table import UNKNOWN, counted
from selfspec.analysis.comparison import load_warning

TIMED = ("seconds", "learning", "preverifying", "verifying")
RUNS = 3  # that a verdict in seconds needs
_ABSENT = {"memory": "not testable here: needs a GPU"} | dict.fromkeys(
    TIMED, f"not shown: seconds need --repeats {RUNS}"
)
_LITTLE = 0.005  # a gain or loss that is surely smaller shows nothing
METRICS: Mapping[str, Callable[[Line], tuple[float, float]]] = {
    "etpl": lambda line: (line["tokens"] / line["layers"], 1),
    "seconds": lambda line: (line["tokens"] / line["seconds"], 1),
    "accepted": lambda line: (line["accepted"], line["rounds"]),
    "block": lambda line: (line["accepted"] + line["rounds"], line["rounds"]),
    "calls": lambda line: (line["rounds"], 1),
    "learning": lambda line: (line["learn_seconds"], line["seconds"]),
    "preverifying": lambda line: (line["preverify_seconds"], line["seconds"]),
    "verifying": lambda line: (line["verify_seconds"], line["rounds"]),
    "rouge2": lambda line: (line["rouge2"], 1),
    "memory": lambda line: (line["memory"], 1),
}
"""A text's amount, and what it is divided by once both are summed up. eTPL counts the prompt's pass: plain has 1/L."""
Texts = Mapping[str, Sequence[Line]]
"""An arm's texts by prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """ours: on texts that do not loop; looping: on those that do; verdict: with its reason, where there is one."""

    ours: str = UNKNOWN
    looping: str = UNKNOWN
    verdict: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A value, the ends of its interval, and how many prompts it is of."""

    value: float
    low: float
    high: float
    count: int


def finding(claim: Claim, preset: Preset, lines: Sequence[Line]) -> Finding:
    """Judge one claim by one record."""
    decided = f"{claim['verdict']}: {claim['why']}" if "verdict" in claim else None
    if "of" not in claim:
        return Finding(verdict=str(decided))
    texts = {arm: _texts_of(claim, arm, lines) for arm in arms_in(claim)}
    ours, theirs = ([arm for arm in arms_in(claim, part) if texts[arm]] for part in ("of", "over"))
    if not ours or (arms_in(claim, "over") and not theirs):
        return Finding(verdict=_ABSENT.get(claim["metric"], "not measured: no run of these arms"))
    bases: list[str | None] = [*theirs] or [None]
    pair = min(product(ours, bases), key=partial(_support, {**claim, **claim.get("best", {})}, texts))
    ratios = [_ratio(claim["metric"], texts, *pair, free=free) for free in (True, False)]
    named = f" over {pair[1]}" if len(theirs) > 1 else f", {pair[0]}" if len(ours) > 1 else ""
    shown = [UNKNOWN if one is None else f"{_text(claim, one)}{named}, n {one.count}" for one in ratios]
    runs = min(len({line["repeat"] for line in own}) for arm in pair if arm for own in texts[arm].values())
    verdict = decided or _verdict(claim, preset, lines, ratios[0], runs)
    return Finding(ours=shown[0], looping=shown[1], verdict=verdict)


def _texts_of(claim: Claim, arm: str, lines: Sequence[Line]) -> Texts:
    metric, own = claim["metric"], matching(lines, "sample", engine=arm, temperature=float(claim.get("temperature", 0)))
    own = [line for line in own if line["task"] in claim.get("tasks", [line["task"]])]
    needs = "seconds" if metric in TIMED else metric if metric in ("memory", "rouge2") else "tokens"
    return by_value([line for line in own if needs in line], "prompt")


def _support(claim: Claim, texts: Mapping[str, Texts], pair: tuple[str, str | None]) -> float:
    """Say how much a pair speaks for a claim. The least counts: the best baseline, or what is farthest from the same."""
    ratio = _ratio(claim["metric"], texts, *pair, free=True) or _ratio(claim["metric"], texts, *pair, free=False)
    distance = log(ratio.value or 1e-9) if ratio else 0.0
    return {"more": distance, "less": -distance}.get(claim["expect"], -abs(distance))


def _ratio(metric: str, texts: Mapping[str, Texts], arm: str, base: str | None, *, free: bool) -> Ratio | None:
    """Divide an arm's rate by another's, or by 1, on the prompts where neither loops, or where one does; None without any."""
    ours, theirs = texts[arm], texts[base or arm]
    both = [one for one in ours if one in theirs]
    prompts = [one for one in both if any(line["loops"] for line in (*ours[one], *theirs[one])) != free]
    if not prompts:
        return None
    own, other = (
        np.array([np.sum([*map(METRICS[metric], side[one])], 0) for one in prompts]) for side in (ours, theirs)
    )
    other = other if base else np.ones_like(own)

    def times(weights: Floats) -> Floats:
        (is_own, per_own), (is_other, per_other) = (weights @ own).T, (weights @ other).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(is_own / per_own / (is_other / per_other))

    drawn_again = times(drawn(("all",) * len(prompts)))  # many a task has one text left
    low, high = np.nanpercentile(drawn_again, (2.5, 97.5), method="nearest")  # a base of 0 gives infinity
    return Ratio(float(times(np.ones((1, len(prompts))))[0]), float(low), float(high), len(prompts))


def _verdict(claim: Claim, preset: Preset, lines: Sequence[Line], free: Ratio | None, runs: int) -> str:
    """Apply the rules: enough free texts, enough runs on an idle machine for seconds, more than one seed of a training."""
    if free is None or free.count < FEWEST:
        return f"not shown: {counted(free.count if free else 0, 'free text')}"
    if claim["metric"] in TIMED and runs < RUNS:
        return f"not shown: {counted(runs, 'run')}"
    loads = [line["load_average"] for line in (lines[0]["provenance"], *matching(lines, "load_average"))]
    if claim["metric"] in TIMED and load_warning(*loads, cores=lines[0]["provenance"]["cores"]):
        return "not shown: busy machine"
    if {*arms_in(claim)} & {*preset["trained"]}:
        return "not shown: one seed of training"
    return decide(claim, free.low, free.high)


def decide(claim: Claim, low: float, high: float) -> str:
    """Say whether an interval holds a claim, its opposite, or both."""
    within, limit = claim.get("within", 0.0), claim.get("limit", 1.0)
    if claim["expect"] in ("more", "less") and low > 1 - _LITTLE and high < 1 + _LITTLE:
        return "not shown"
    holds, opposite = {
        "more": (low > 1, high < 1),
        "less": (high < 1, low > 1),
        "same": (1 - within <= low and high <= 1 + within, high < 1 - within or low > 1 + within),
        "below": (high < limit, low > limit),
    }[claim["expect"]]
    return "reproduced" if holds else "refuted here" if opposite else "not shown"


def _text(claim: Claim, ratio: Ratio) -> str:
    if claim["expect"] == "below":
        return f"{100 * ratio.value:.1f} %"
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def loops(tokens: Sequence[int]) -> bool:
    """Tell whether a text ends in a cycle of tokens that comes three times or more, over more than 16 tokens."""
    for period in range(1, len(tokens) // 3 + 1):
        same = [one == other for one, other in zip(reversed(tokens), reversed(tokens[:-period]))]
        if [*same, False].index(False) >= max(2 * period, 16):
            return True
    return False


def rouge_2(text: str, reference: str) -> float:
    """Return the F1 of two texts' pairs of words, letters and digits alone, as the package rouge-score counts them."""
    found, wanted = (Counter(pairwise(re.findall(r"[a-z0-9]+", one.lower()))) for one in (text, reference))
    total = found.total() + wanted.total()
    return round(2 * (found & wanted).total() / total, 4) if total else 0.0
