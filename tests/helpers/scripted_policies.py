"""Policies that only tests need: plans in a fixed order, and stopping rules of both kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from layerskip_models import LayerSkipModel
from policies import (
    DraftRow,
    MeasuredCost,
    NeverStop,
    ObservationSpec,
    Plan,
    Policy,
    RoundContext,
    RoundRecord,
    ShadowTokens,
    StatelessPolicy,
    parse_policy,
)
from preverifiers import random_preverification


class ScriptedExit(StatelessPolicy):
    """Goes round a list of (exit layer, cap); None as the exit layer is a round without speculation. Keeps what it saw."""

    def __init__(self, plans: Sequence[tuple[int | None, int]], observes: ObservationSpec | None = None) -> None:
        self._plans = [Plan(exit_layer=layer, max_speculations=cap) for layer, cap in plans]
        self.observes = observes or ObservationSpec()
        self.records: list[RoundRecord] = []
        self.prompts: list[ShadowTokens] = []

    def plan(self, context: RoundContext) -> Plan:
        return self._plans[context.round_index % len(self._plans)]

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        self.prompts.append(shadow)

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)

    def reset(self) -> None:
        self.records.clear()
        self.prompts.clear()


class Together(ScriptedExit):
    """An exit policy whose texts learn in one state, with a stopping rule for each of them."""

    learns_together = True

    def __init__(self) -> None:
        super().__init__([(2, 3), (1, 2)])
        self.rounds = 0

    def observe(self, record: RoundRecord) -> None:
        self.rounds += 1


class StopBelow(NeverStop):
    """Stops before a draw when the row's confidence is below a threshold (exact: the token does not exist yet)."""

    def __init__(self, threshold: float) -> None:
        self.observes = ObservationSpec(confidence=True)
        self._threshold = threshold

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.confidence is not None
        return row.confidence < self._threshold


class OneText(StopBelow):
    """Fails when another text's rows come between the start of a round and its end, as a policy with a state might."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.next_row = 0
        self.rounds = 0

    def start_round(self, plan: Plan) -> None:
        self.next_row = 0
        self.rounds += 1

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.num_drafted == self.next_row, "another text's round"
        self.next_row += 1
        return super().stop_before_draw(row)


class StopAtTokens(NeverStop):
    """Stops after a draw, keeping the token, when it is one of some tokens."""

    def __init__(self, tokens: Collection[int]) -> None:
        self._tokens = frozenset(tokens)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return token in self._tokens


def fixed(exit_layer: int | None, cap: int, stopping: StopBelow | StopAtTokens | None = None) -> Policy:
    """The same plan in every round, with a stopping rule."""
    return Policy(ScriptedExit([(exit_layer, cap)]), stopping, name="scripted")


def made_up_cost(num_layers: int) -> MeasuredCost:
    """Seconds by hand, so that a policy with measured cost does the same on every machine."""
    return MeasuredCost(
        fixed=True,
        num_layers=num_layers,
        layer_seconds=(1.0, 1.05, 1.1),
        head_seconds=(0.5, 0.6, 0.7),
        draft_seconds=0.1,
    )


EVERY_POLICY = (
    "ls:{E}-4", "fs:{E}-3", "dv:{E}", "dv:{E},start=0.5", "svip:{E}", "svip:{E},threshold=1.2", "adaedl:{E}", "spide:{E}",
    "spide:{E},tau=0.5", "del", "del:as=printed", "del:length=tpl", "del:cost=measured",
    "del+spide", "del+dv", "del+fs", "del+adaedl", "ls:{E}-9+del", "auto", "auto:cost=layers",
    "auto:cost=layers,d_max=4", "auto+spide",
    "pacer:random,exit_layer={E},b=2,t=0.3", "pacer:random,exit_layer={E},b=3,t=0.1",
    "ls:{E}-9+pacer:random,b=1,t=0.3",
    "pacer:random,exit_layer={E},b=2,t=0.2",
    "auto:cost=layers+pacer:random,b=2,t=0.2", "del+pacer:random,b=2,t=0.3",
    "copy:4", "copy:2,min=3",
    f"ls:{{E}}-6+{__file__}:StopBelow:threshold=0.2",
)  # fmt: skip
"""Every policy by name, {E} standing for an exit layer: what the equality and distribution tests go through."""

WAVES = ("wave:loop=1", "wave")
"""The same of looped models."""


def parts_of(name: str) -> tuple[str, ...]:
    """The names in a combination, without their options."""
    return tuple(part.split(":")[0] for part in name.split("+"))


def first_of_each(names: Iterable[str], kind_of: Callable[[str], Hashable] = parts_of) -> list[str]:
    """The first policy of each kind; without a `kind_of`, two that differ in options alone are of one kind."""
    found: dict[Hashable, str] = {}
    for name in names:
        found.setdefault(kind_of(name), name)
    return [*found.values()]


def others_slow(names: Iterable[str], kind_of: Callable[[str], Hashable] = parts_of) -> list[Any]:
    """Parameters, of which all but the first policy of each kind are slow (`first_of_each`).

    `tests/exact` runs every one of EVERY_POLICY.
    """
    names = [*names]
    first = first_of_each(names, kind_of)
    return [pytest.param(name, marks=[] if name in first else [pytest.mark.slow]) for name in names]


def named_policy(name: str, exit_layer: int, model: LayerSkipModel) -> Policy:
    """One of EVERY_POLICY for a model; pacer with a random pre-verifier."""
    return parse_policy(
        name.format(E=exit_layer),
        num_layers=model.num_layers,
        num_loops=model.num_loops,
        measure=partial(made_up_cost, model.num_layers),
        preverifier=lambda path: random_preverification(model),
    )
