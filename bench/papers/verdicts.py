"""What a record says of a paper's claims: ratios with 95 % intervals over prompts, and verdicts by fixed rules.

Only texts that do not end in a loop count for a verdict. An interval is a paired bootstrap over prompts
(`bench.report.interval_tables`): it says nothing of the drift between runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from bench.papers.calibration import LENGTHS, fixed_etpl, unpacked
from bench.papers.preset import Claim, Preset, arms_in
from bench.record import Line, by_value, matching
from bench.report.interval_tables import FEWEST, drawn
from selfspec.analysis.comparison import load_warning
from selfspec.analysis.replay import AgreementTrace

RUNS = 3
"""Timed runs that a verdict in seconds needs."""
_SECONDS = ("seconds", "learning", "preverifying", "rows")
Amount = tuple[float, float]
"""What is added up over texts, and what it is divided by."""
METRICS: Mapping[str, Callable[[Line, int], Amount]] = {
    "etpl": lambda line, layers: (line["tokens"] / (line["layers"] + layers), 1.0),
    "seconds": lambda line, _: (line["tokens"] / line["seconds"], 1.0),
    "accepted": lambda line, _: (line["accepted"], line["rounds"]),
    "block": lambda line, _: (line["accepted"] + line["rounds"], line["rounds"]),
    "calls": lambda line, _: (line["rounds"], 1.0),
    "learning": lambda line, _: (line["learning"], line["seconds"]),
    "preverifying": lambda line, _: (line["preverifying"], line["seconds"]),
    "rouge2": lambda line, _: (line["rouge2"], 1.0),
    "memory": lambda line, _: (line["memory"], 1.0),
}
"""By name: a text's amount. eTPL counts the prompt's pass as a round, so that plain decoding has 1/L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """ours: on texts that do not loop; looping: on those that do; verdict: with its reason, where there is one."""

    ours: str = "–"
    looping: str = "–"
    verdict: str


def finding(claim: Claim, preset: Preset, lines: Sequence[Line]) -> Finding:
    """Judge one claim by one record."""
    if "verdict" in claim:
        return Finding(verdict=f"{claim['verdict']}: {claim['why']}")
    if claim["metric"] not in METRICS:
        return _REPLAYED[claim["metric"]](claim, lines)
    layers = lines[0]["configuration"]["num_layers"]
    amounts = {arm: _amounts(claim, arm, lines, layers) for part in ("of", "over") for arm in arms_in(claim, part)}
    ours = [arm for arm in arms_in(claim, "of") if amounts[arm]]
    theirs = [arm for arm in arms_in(claim, "over") if amounts[arm]]
    if not ours or ("over" in claim and not theirs):
        reason = "needs a GPU" if claim["metric"] == "memory" else "no run of these arms here"
        return Finding(verdict=f"{'not testable here' if claim['metric'] == 'memory' else 'not measured'}: {reason}")
    pairs = [(arm, base) for arm in ours for base in (theirs or [""])]
    judged = {pair: {free: _ratio(amounts, *pair, free) for free in (True, False)} for pair in pairs}
    sign = {"more": 1, "less": -1}.get(claim["expect"], 0)

    def against(pair: tuple[str, str]) -> float:
        """Order pairs by how little they say for the claim: the best baseline, or of equal ones the farthest from 1."""
        value = (judged[pair][True] or judged[pair][False] or (1.0,))[0]
        return sign * value if sign else -abs(np.log(max(value, 1e-9)))

    pair = min(pairs, key=against)
    free, looping = judged[pair][True], judged[pair][False]
    named = f" over {pair[1]}" if len(theirs) > 1 else f" {pair[0]}" if len(ours) > 1 else ""
    shown = [("–" if one is None else f"{_text(claim, one)}{named}, n {one[3]}") for one in (free, looping)]
    return Finding(ours=shown[0], looping=shown[1], verdict=_verdict(claim, free, lines, pair, preset))


Ratio = tuple[float, float, float, int]
"""A value, the ends of its interval, and how many prompts it is of."""


def _amounts(claim: Claim, arm: str, lines: Sequence[Line], layers: int) -> dict[str, tuple[Amount, bool, str, int]]:
    """Add up an arm's texts by prompt: the amount, whether one loops, the task, and how often it was run."""
    own = matching(lines, "sample", engine=arm, temperature=float(claim.get("temperature", 0)))
    own = [line for line in own if line["task"] in claim.get("tasks", [line["task"]])]
    found = {}
    for prompt, texts in by_value(own, "prompt").items():
        if claim["metric"] == "memory" and "memory" not in texts[0]:
            continue
        each = [METRICS[claim["metric"]](text, layers) for text in texts]
        total = (sum(amount for amount, _ in each), sum(per for _, per in each))
        runs = len({text["repeat"] for text in texts})
        found[prompt] = (total, any(text["loops"] for text in texts), texts[0]["task"], runs)
    return found


def _ratio(
    amounts: Mapping[str, Mapping[str, tuple[Amount, bool, str, int]]], arm: str, base: str, free: bool
) -> Ratio | None:
    """Divide one arm by another, or by nothing, on the prompts where neither loops, or where one does."""
    ours, theirs = amounts[arm], amounts[base] if base else amounts[arm]
    prompts = [one for one in ours if one in theirs and (ours[one][1] or theirs[one][1]) != free]
    if not prompts:
        return None
    own, other = (np.array([side[one][0] for one in prompts]) for side in (ours, theirs))
    tasks = tuple(ours[one][2] for one in prompts)
    return rate_ratio(own, other if base else np.ones_like(own), tasks)


def rate_ratio(ours: np.ndarray, theirs: np.ndarray, tasks: tuple[str, ...]) -> Ratio:
    """Divide two rates, [prompts, 2] each: amounts, and what they are divided by. Prompts are drawn again within tasks."""

    def times(weights: np.ndarray) -> np.ndarray:
        (own, own_per), (other, other_per) = (weights @ ours).T, (weights @ theirs).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(own / own_per / (other / other_per))

    low, high = np.nanpercentile(times(drawn(tasks)), (2.5, 97.5))
    return float(times(np.ones((1, len(tasks))))[0]), float(low), float(high), len(tasks)


def _verdict(claim: Claim, free: Ratio | None, lines: Sequence[Line], pair: Sequence[str], preset: Preset) -> str:
    count = 0 if free is None else free[3]
    if free is None or count < FEWEST:
        return f"not shown: {count} free texts"
    if claim["metric"] in _SECONDS:
        runs = [len({line["repeat"] for line in matching(lines, "sample", engine=arm)}) for arm in pair if arm]
        if min(runs) < RUNS:
            return f"not shown: {'one run' if min(runs) == 1 else f'{min(runs)} runs'}"
        if (why := _busy(lines)) is not None:
            return why
    if set(pair) & set(preset.trained):
        return "not shown: one seed of training"
    return decide(claim, free[1], free[2])


def _busy(lines: Sequence[Line]) -> str | None:
    where = lines[0]["provenance"]
    loads = [line["load_average"] for line in (where, *matching(lines, "load_average"))]
    return None if load_warning(*loads, cores=where["cores"]) is None else "not shown: the machine was busy"


def decide(claim: Claim, low: float, high: float) -> str:
    """Say whether an interval holds a claim. expect: "more" or "less" than 1, "same" within a margin, "below" a limit."""
    expect, within = claim["expect"], claim.get("within", 0.0)
    if expect == "same":
        holds, opposite = 1 - within <= low and high <= 1 + within, high < 1 - within or low > 1 + within
    elif expect == "more":
        holds, opposite = low > 1, high < 1
    else:
        limit = claim.get("limit", 1.0)
        holds, opposite = high < limit, low > limit
    return "reproduced" if holds else "refuted here" if opposite else "not shown"


def _text(claim: Claim, ratio: Ratio) -> str:
    value, low, high, _ = ratio
    if claim["metric"] in ("learning", "preverifying"):
        return f"{100 * value:.1f} %"
    return f"{value:.2f} ({low:.2f}–{high:.2f})"


def _rows(claim: Claim, lines: Sequence[Line]) -> Finding:
    """Divide the seconds of a layer's pass over 13 rows by those over one, as measured before the run."""
    costs = matching(lines, "costs")
    if not costs:
        return Finding(verdict="not measured: no timed passes here")
    value = costs[0]["layer_seconds"][12] / costs[0]["layer_seconds"][0]
    return Finding(ours=f"{value:.1f} ×", verdict=_busy(lines) or decide(claim, value, value))


def _other_setting(claim: Claim, lines: Sequence[Line]) -> Finding:
    """Replay each task's best fixed setting on the others. Settings are chosen on every second text, judged on the rest."""
    layers = lines[0]["configuration"]["num_layers"]
    looping = {line["prompt"] for line in matching(lines, "sample", engine="ar", temperature=0.0) if line["loops"]}
    halves: dict[str, list[list[AgreementTrace]]] = {}
    for task, own in by_value(
        [one for one in matching(lines, "trace") if one["prompt"] not in looping], "task"
    ).items():
        traces = [_trace_of(line, layers) for line in own]
        if len(traces) > 1:
            halves[task] = [traces[0::2], traces[1::2]]
    grid = [(layer, length) for layer in range(1, layers // 2 + 1) for length in LENGTHS]
    best = {
        task: max(grid, key=lambda one: fmean(fixed_etpl(trace, *one) for trace in chosen))
        for task, (chosen, _) in halves.items()
    }
    rows = [
        (
            fmean(fixed_etpl(trace, *best[other]) for other in best if other != task),
            fixed_etpl(trace, *best[task]),
            task,
        )
        for task, (_, judged) in halves.items()
        for trace in judged
        if len(best) > 1
    ]
    if len(rows) < FEWEST:
        return Finding(verdict=f"not shown: {len(rows)} free texts")
    others, own = (np.array([(row[place], 1.0) for row in rows]) for place in (0, 1))
    ratio = rate_ratio(others, own, tuple(row[2] for row in rows))
    return Finding(ours=f"{_text(claim, ratio)}, n {ratio[3]}", verdict=decide(claim, ratio[1], ratio[2]))


def _trace_of(line: Line, num_layers: int) -> AgreementTrace:
    agrees = {int(layer): unpacked(row) for layer, row in line["agrees"].items()}
    return AgreementTrace(tokens=(0,) * (len(agrees[1]) + 1), agrees=agrees, num_layers=num_layers)


def _overlapped(claim: Claim, lines: Sequence[Line]) -> Finding:
    return Finding(verdict="not measured: no simulation of the overlapped half here")


_REPLAYED: Mapping[str, Callable[[Claim, Sequence[Line]], Finding]] = {
    "rows": _rows, "other_setting": _other_setting, "overlapped": _overlapped, "overlapped_calls": _overlapped,
}  # fmt: skip


def loops(tokens: Sequence[int]) -> bool:
    """Tell whether a text ends in a cycle of tokens, repeated three times or more and over 16 tokens or more."""
    for period in range(1, len(tokens) // 3 + 1):
        place = len(tokens) - 1
        while place >= period and tokens[place] == tokens[place - period]:
            place -= 1
        if len(tokens) - 1 - place >= max(2 * period, 16):
            return True
    return False


def rouge_2(text: str, reference: str) -> float:
    """Return the F1 of two texts' pairs of words, letters and digits alone, as the package rouge-score counts them."""
    words = [re.findall(r"[a-z0-9]+", one.lower()) for one in (text, reference)]
    found, wanted = (Counter(zip(one, one[1:])) for one in words)
    common, total = (found & wanted).total(), found.total() + wanted.total()
    return round(2 * common / total, 4) if total else 0.0
