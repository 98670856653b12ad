"""What a record says of a paper's claims: ratios with 95 % intervals over prompts, and verdicts by fixed rules.

Only texts that do not end in a loop count for a verdict. An interval is a paired bootstrap over prompts
(`bench.report.interval_tables`): it says nothing of the drift between runs.
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
from bench.report.table import counted
from selfspec.analysis.comparison import load_warning

TIMED = ("seconds", "learning", "preverifying", "verifying")
_RUNS = 3  # that a verdict in seconds needs
METRICS: Mapping[str, Callable[[Line, int], tuple[float, float]]] = {
    "etpl": lambda line, layers: (line["tokens"] / (line["layers"] + layers), 1),
    "seconds": lambda line, _: (line["tokens"] / line["seconds"], 1),
    "accepted": lambda line, _: (line["accepted"], line["rounds"]),
    "block": lambda line, _: (line["accepted"] + line["rounds"], line["rounds"]),
    "calls": lambda line, _: (line["rounds"], 1),
    "learning": lambda line, _: (line["learn_seconds"], line["seconds"]),
    "preverifying": lambda line, _: (line["preverify_seconds"], line["seconds"]),
    "verifying": lambda line, _: (line["verify_seconds"], line["rounds"]),
    "rouge2": lambda line, _: (line["rouge2"], 1),
    "memory": lambda line, _: (line["memory"], 1),
}
"""A text's amount, and what it is divided by once both are summed up. eTPL counts the prompt's pass: plain has 1/L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """ours: on texts that do not loop; looping: on those that do; verdict: with its reason, where there is one."""

    ours: str = "–"
    looping: str = "–"
    verdict: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A value, the ends of its interval, and how many prompts it is of."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class _Texts:
    """An arm's texts of one prompt: the sums of a metric, whether one of them loops, the task, and how often each ran."""

    amount: tuple[float, float]
    loops: bool
    task: str
    runs: int


def finding(claim: Claim, preset: Preset, lines: Sequence[Line]) -> Finding:
    """Judge one claim by one record."""
    if "verdict" in claim:
        return Finding(verdict=f"{claim['verdict']}: {claim['why']}")
    texts = {arm: _texts_of(claim, arm, lines) for arm in arms_in(claim)}
    ours, theirs = ([arm for arm in arms_in(claim, part) if texts[arm]] for part in ("of", "over"))
    if not ours or (arms_in(claim, "over") and not theirs):
        without = (
            "not testable here: needs a GPU" if claim["metric"] == "memory" else "not measured: no run of these arms"
        )
        return Finding(verdict=without)
    pairs = [*product(ours, theirs or [""])]
    pair = min(pairs, key=partial(_support, {**claim, **claim.get("best", {})}, lines)) if len(pairs) > 1 else pairs[0]
    ratios = [_ratio(texts, *pair, free=free) for free in (True, False)]
    named = f" over {pair[1]}" if len(theirs) > 1 else f", {pair[0]}" if len(ours) > 1 else ""
    shown = ["–" if ratio is None else f"{_text(claim, ratio)}{named}, n {ratio.count}" for ratio in ratios]
    runs = min(one.runs for arm in pair if arm for one in texts[arm].values())
    return Finding(ours=shown[0], looping=shown[1], verdict=_verdict(claim, preset, lines, ratios[0], runs))


def _support(claim: Claim, lines: Sequence[Line], pair: tuple[str, str]) -> float:
    """Say how much a pair speaks for a claim. The least counts: the best baseline, or what is farthest from the same."""
    texts = {arm: _texts_of(claim, arm, lines) for arm in pair}
    ratio = _ratio(texts, *pair, free=True) or _ratio(texts, *pair, free=False)
    distance = log(ratio.value or 1e-9) if ratio else 0.0
    return {"more": distance, "less": -distance}.get(claim["expect"], -abs(distance))


def _texts_of(claim: Claim, arm: str, lines: Sequence[Line]) -> dict[str, _Texts]:
    """Add up an arm's texts by prompt."""
    metric, layers, found = claim["metric"], lines[0]["configuration"]["num_layers"], {}
    own = matching(lines, "sample", engine=arm, temperature=float(claim.get("temperature", 0)))
    own = [line for line in own if line["task"] in claim.get("tasks", [line["task"]])]
    own = [line for line in own if metric in line or metric not in ("memory", "rouge2")]  # which few lines have
    for prompt, group in by_value(own, "prompt").items():
        amounts = [METRICS[metric](line, layers) for line in group]
        found[prompt] = _Texts(
            (sum(amount for amount, _ in amounts), sum(per for _, per in amounts)),
            any(line["loops"] for line in group),
            group[0]["task"],
            len({line["repeat"] for line in group}),
        )
    return found


def _ratio(texts: Mapping[str, Mapping[str, _Texts]], arm: str, base: str, *, free: bool) -> Ratio | None:
    """Divide an arm's rate by another's, or by 1, on the prompts where neither loops, or where one does; None without any."""
    ours, theirs = texts[arm], texts[base] if base else texts[arm]
    prompts = [one for one in ours if one in theirs and (ours[one].loops or theirs[one].loops) != free]
    if not prompts:
        return None
    own = np.array([ours[one].amount for one in prompts], dtype=float)
    other = np.array([theirs[one].amount if base else (1.0, 1.0) for one in prompts], dtype=float)

    def times(weights: Floats) -> Floats:
        (is_own, per_own), (is_other, per_other) = (weights @ own).T, (weights @ other).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(is_own / per_own / (is_other / per_other))

    low, high = np.nanpercentile(times(drawn(tuple(ours[one].task for one in prompts))), (2.5, 97.5))
    return Ratio(float(times(np.ones((1, len(prompts))))[0]), float(low), float(high), len(prompts))


def _verdict(claim: Claim, preset: Preset, lines: Sequence[Line], free: Ratio | None, runs: int) -> str:
    """Apply the rules: enough free texts, enough runs on an idle machine for seconds, more than one seed of a training."""
    if free is None or free.count < FEWEST:
        return f"not shown: {counted(free.count if free else 0, 'free text')}"
    if claim["metric"] in TIMED and runs < _RUNS:
        return f"not shown: {counted(runs, 'run')}"
    if claim["metric"] in TIMED and _is_busy(lines):
        return "not shown: busy machine"
    if {*arms_in(claim)} & {*preset["trained"]}:
        return "not shown: one seed of training"
    return decide(claim, free.low, free.high)


def decide(claim: Claim, low: float, high: float) -> str:
    """Say whether an interval holds a claim, its opposite, or both."""
    within, limit = claim.get("within", 0.0), claim.get("limit", 1.0)
    holds, opposite = {
        "more": (low > 1, high < 1),
        "less": (high < 1, low > 1),
        "same": (1 - within <= low and high <= 1 + within, high < 1 - within or low > 1 + within),
        "below": (high < limit, low > limit),
    }[claim["expect"]]
    return "reproduced" if holds else "refuted here" if opposite else "not shown"


def _is_busy(lines: Sequence[Line]) -> bool:
    where = lines[0]["provenance"]
    loads = [line["load_average"] for line in (where, *matching(lines, "load_average"))]
    return load_warning(*loads, cores=where["cores"]) is not None


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
