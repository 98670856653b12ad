"""Policies that only tests need: plans in a fixed order, and stopping rules of both kinds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from policies import DraftRow, Needs, Plan, Policy, RoundContext, RoundRecord, ShadowTokens


class ScriptedExit:
    """Goes round a list of (exit layer, cap); None as the exit layer is a round without speculation. Keeps what it saw."""

    def __init__(self, plans: Sequence[tuple[int | None, int]], needs: Needs | None = None) -> None:
        self._plans = [Plan(exit_layer=layer, max_speculations=cap) for layer, cap in plans]
        self.needs = needs or Needs()
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


class StopBelow:
    """Stops before a draw when the row's confidence is below a threshold (exact: the token does not exist yet)."""

    def __init__(self, threshold: float) -> None:
        self.needs = Needs(confidence=True)
        self._threshold = threshold

    def start_round(self, plan: Plan) -> None:
        pass

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.confidence is not None
        return row.confidence < self._threshold

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return False

    def observe(self, record: RoundRecord) -> None:
        pass

    def reset(self) -> None:
        pass


class StopAtTokens:
    """Stops after a draw, keeping the token, when it is one of some tokens."""

    def __init__(self, tokens: Collection[int]) -> None:
        self.needs = Needs()
        self._tokens = frozenset(tokens)

    def start_round(self, plan: Plan) -> None:
        pass

    def stop_before_draw(self, row: DraftRow) -> bool:
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return token in self._tokens

    def observe(self, record: RoundRecord) -> None:
        pass

    def reset(self) -> None:
        pass


def fixed(exit_layer: int | None, cap: int, stopping: StopBelow | StopAtTokens | None = None) -> Policy:
    """The same plan in every round, with a stopping rule."""
    return Policy(ScriptedExit([(exit_layer, cap)]), stopping, name="scripted")
