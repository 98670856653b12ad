"""How policies are ordered on a checkpoint, and how much of that order another checkpoint shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from bench.experiments.exit_adapters.confidences import rank_correlation
from bench.record import Line, by_value, matching
from bench.report.interval_tables import FEWEST, Floats, PolicyRow, drawn, interval, rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The policies of one checkpoint on some prompts.

    rows: by rule, a column for each prompt. draws: how often each prompt is drawn, [draws, prompts].
    """

    num_layers: int
    prompts: tuple[str, ...]
    rows: Mapping[str, PolicyRow]
    draws: Floats

    def rates(self) -> dict[str, float]:
        """Tokens per loaded layer over plain decoding's, by rule."""
        weights = np.ones(len(self.prompts))
        return {rule: float(self.num_layers * rate(row, weights)) for rule, row in self.rows.items()}

    def ratio(self, rule: str, other: str) -> str:
        """One rule's tokens per layer over another's, with its interval."""
        row, base = self.rows[rule], self.rows[other]
        return interval(lambda weights: rate(row, weights) / rate(base, weights), self.draws, 2)


def looping_prompts(lines: Sequence[Line], rung: str) -> set[str]:
    """Prompts whose text loops on this checkpoint, with any policy."""
    return {line["prompt"] for line in matching(lines, "score", rung=rung) if line["looping"]}


def order_of(lines: Sequence[Line], rung: str, without: Set[str] = frozenset()) -> Order | None:
    """The order on one checkpoint. without: prompts to leave out. None if fewer than `FEWEST` prompts are left."""
    scores = [line for line in matching(lines, "score", rung=rung) if line["prompt"] not in without]
    tasks = {line["prompt"]: line["task"] for line in scores}
    if len(tasks) < FEWEST:
        return None
    rows = {}
    for rule, of_rule in by_value(scores, "rule").items():
        own = {line["prompt"]: line for line in of_rule}
        rows[rule] = PolicyRow(
            tokens=np.array([float(own[prompt]["tokens"]) for prompt in tasks]),
            layers=np.array([float(own[prompt]["layers"]) for prompt in tasks]),
        )
    layers = matching(lines, "rung", rung=rung)[0]["num_layers"]
    return Order(num_layers=layers, prompts=tuple(tasks), rows=rows, draws=drawn(list(tasks.values())))


def correlation(first: Order, second: Order) -> str:
    """Spearman's rank correlation of the rules' tokens per layer on two checkpoints, with its interval.

    Both are of the same prompts, and a draw of prompts is the same for both.
    """
    assert first.prompts == second.prompts and first.rows.keys() == second.rows.keys()

    def of(weights: Floats) -> Floats:
        both = (np.stack([rate(row, weights) for row in order.rows.values()], axis=1) for order in (first, second))
        return np.array([rank_correlation(one, other) for one, other in zip(*map(torch.from_numpy, both))])

    return interval(of, first.draws, 2)


def exchanged(first: Order, second: Order) -> tuple[int, int]:
    """Pairs of rules that are in another order on the second checkpoint, and all pairs."""
    one, other = first.rates(), second.rates()
    pairs = list(combinations(one, 2))
    return sum((one[a] - one[b]) * (other[a] - other[b]) < 0 for a, b in pairs), len(pairs)
