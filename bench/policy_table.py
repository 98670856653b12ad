"""Policies side by side over kinds of prompts: real runs of each, and the whole grid of fixed settings by replay.

A fixed setting "chosen on the other half" is what a careful user gets: per kind, the prompts alternate between two halves,
each half is scored with the setting that was best on the other one. "In hindsight" is the best on the very prompts that it
is scored on: a bound for fixed settings, not something one can have. eTPL of several prompts is all their tokens over all
their loaded layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from bench.datasets import EncodedPrompt
from bench.record import Line
from policies import CostModel
from selfspec import SelfSpecGenerator
from selfspec.compare import first_difference
from selfspec.replay import replay, trace_agreement

DEFAULT_POLICIES = (
    "auto:cost=layers", "auto", "del", "del:on_stop=keep", "del:length=tpl", "del:no_speculation=on,length=tpl", "del+spide",
    "del+dv", "del+fs",
)  # fmt: skip
HALVES = 2
Counts = tuple[float, float]
"""(tokens, cost) of one setting on some prompts."""


def run_policies(
    generator: SelfSpecGenerator,
    prompts: Sequence[EncodedPrompt],
    policies: Sequence[str],
    *,
    max_new_tokens: int,
    exit_layers: Sequence[int],
    lengths: Sequence[int],
    cost: CostModel,
    write: Callable[[Line], None],
    advance: Callable[[str], None] = lambda label: None,
) -> None:
    """Trace every prompt, replay the grid, then run the policies on it in turn; greedy, EOS off, reset before every prompt.

    Writes a "grid" line per prompt ([tokens, loaded layers, measured cost] per setting) and a "policy" line per prompt and
    policy, which says where its tokens first differ from plain decoding's (null: nowhere).
    """
    for prompt in prompts:
        trace = trace_agreement(generator, prompt.ids, max_new_tokens)
        cells = {}
        for layer in exit_layers:
            for length in lengths:
                rounds = replay(trace, layer, length)
                cells[f"ls:{layer}-{length}"] = [rounds.num_tokens, rounds.loaded_layers, round(rounds.cost(cost), 6)]
        write({"kind": "grid", "prompt": prompt.id, "task": prompt.task, "cells": cells})
        advance("tracing every layer")
        for name in policies:
            generator.resolve_policy(name).reset()
            result = generator.generate(
                prompt.ids, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[], policy=name
            )
            stats = result.stats
            write(
                {
                    "kind": "policy",
                    "policy": name,
                    "prompt": prompt.id,
                    "task": prompt.task,
                    "tokens": stats.num_new_tokens - 1,
                    "loaded_layers": stats.loaded_layers,
                    "decode_seconds": stats.seconds - stats.time_to_first_token,
                    "seconds": stats.seconds,
                    "learn_seconds": stats.learn_seconds,
                    "rounds": stats.rounds,
                    "num_drafted": stats.num_drafted,
                    "num_accepted": stats.num_accepted,
                    "first_difference": first_difference(list(trace.tokens), result.new_tokens),
                }
            )
            advance(name)


def etpl_by_task(lines: Sequence[Line], policy: str) -> dict[str, float]:
    """A policy's eTPL per kind of prompt, and over all ("all")."""
    found = [line for line in lines if line["kind"] == "policy" and line["policy"] == policy]
    return _by_task(found, lambda line: (line["tokens"], line["loaded_layers"]))


def fixed_in_hindsight(lines: Sequence[Line], column: int = 1) -> dict[str, tuple[str, float]]:
    """Per kind the best fixed setting and its tokens per cost; "all": the best one setting over all kinds.

    column: 1 counts layers, 2 measured seconds.
    """
    grid = [line for line in lines if line["kind"] == "grid"]
    result = {}
    for task in [*dict.fromkeys(line["task"] for line in grid), "all"]:
        chosen = [line for line in grid if task in ("all", line["task"])]
        result[task] = _best(chosen, column)
    return result


def fixed_from_other_half(lines: Sequence[Line], column: int = 1) -> dict[str, float]:
    """Per kind the tokens per cost of settings chosen on one half and scored on the other; "all": each kind with its own."""
    grid = [line for line in lines if line["kind"] == "grid"]
    totals: dict[str, Counts] = {}
    for task in dict.fromkeys(line["task"] for line in grid):
        rows = [line for line in grid if line["task"] == task]
        halves = [rows[half::HALVES] for half in range(HALVES)]
        for half, scored in enumerate(halves):
            if not scored or not halves[1 - half]:
                continue
            name, _ = _best(halves[1 - half], column)
            counts = _total(scored, name, column)
            for key in (task, "all"):
                before = totals.get(key, (0.0, 0.0))
                totals[key] = (before[0] + counts[0], before[1] + counts[1])
    return {task: tokens / cost for task, (tokens, cost) in totals.items()}


def speed_by_task(lines: Sequence[Line], policy: str, baseline: str = "ar") -> dict[str, float]:
    """Median over prompts of the policy's decoding speed over the baseline's on the same prompt, per kind and "all"."""

    def speeds(name: str) -> dict[str, tuple[str, float]]:
        found = [line for line in lines if line["kind"] == "policy" and line["policy"] == name]
        return {line["prompt"]: (line["task"], line["tokens"] / line["decode_seconds"]) for line in found}

    ours, theirs = speeds(policy), speeds(baseline)
    ratios: dict[str, list[float]] = {}
    for prompt, (task, speed) in ours.items():
        if prompt in theirs:
            for key in (task, "all"):
                ratios.setdefault(key, []).append(speed / theirs[prompt][1])
    return {task: median(values) for task, values in ratios.items()}


def learn_share(lines: Sequence[Line], policy: str) -> float:
    """Share of all its time that a policy spent learning."""
    found = [line for line in lines if line["kind"] == "policy" and line["policy"] == policy]
    return float(sum(line["learn_seconds"] for line in found) / sum(line["seconds"] for line in found))


def _by_task(lines: Sequence[Line], counts: Callable[[Line], Counts]) -> dict[str, float]:
    totals: dict[str, Counts] = {}
    for line in lines:
        tokens, cost = counts(line)
        for key in (line["task"], "all"):
            before = totals.get(key, (0.0, 0.0))
            totals[key] = (before[0] + tokens, before[1] + cost)
    return {task: tokens / cost for task, (tokens, cost) in totals.items()}


def _total(rows: Sequence[Line], name: str, column: int) -> Counts:
    return sum(row["cells"][name][0] for row in rows), sum(row["cells"][name][column] for row in rows)


def _best(rows: Sequence[Line], column: int) -> tuple[str, float]:
    values: Mapping[str, float] = {
        name: tokens / cost for name in rows[0]["cells"] for tokens, cost in [_total(rows, name, column)]
    }
    name = max(values, key=lambda key: values[key])
    return name, values[name]


def policy_names(lines: Sequence[Line]) -> list[str]:
    """The policies that were run, in order."""
    return list(dict.fromkeys(line["policy"] for line in lines if line["kind"] == "policy"))


def check_halves(prompts: Sequence[EncodedPrompt]) -> None:
    """Raises ValueError unless every kind has at least two prompts, one for each half."""
    counts = {task: sum(prompt.task == task for prompt in prompts) for task in {p.task for p in prompts}}
    lonely = sorted(task for task, count in counts.items() if count < HALVES)
    if lonely:
        raise ValueError(f"each task needs at least two prompts, one for each half; {', '.join(lonely)} has one")
