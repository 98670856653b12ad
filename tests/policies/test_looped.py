"""What "auto" plans for looped models: the expected price of each way by hand, and what measured rounds change in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies import LayerCost, MeasuredCost, Plan, RoundContext, RoundRecord, parse_policy
from policies.looped import LoopedAuto

LOOPS, LAYERS = 4, 2
COST = MeasuredCost(
    num_layers=LOOPS * LAYERS, layer_seconds=(1.0, 1.05, 1.1, 1.15), head_seconds=(0.2, 0.21), fixed=True
)


def policy_of(cost: MeasuredCost = COST) -> LoopedAuto:
    found = parse_policy("auto", num_layers=LOOPS * LAYERS, num_loops=LOOPS, measure=lambda: cost).exit
    assert isinstance(found, LoopedAuto)
    return found


def decode(
    policy: LoopedAuto, right: int, texts: int = 1, slow: Callable[[Plan], float] = lambda plan: 1.0
) -> list[str]:
    """400 rounds in which so many of 10 drafts are right. slow: how much longer rounds take than the cost says."""
    ways = []
    for index in range(400):
        context = RoundContext(round_index=index, num_committed=9, remaining_tokens=99, batch_size=texts)
        plan = policy.plan(context)
        ways.append("wave" if plan.wave else "rounds" if plan.exit_layer else "plain")
        drafts = 1 if plan.wave else plan.max_speculations
        hits = next((hit for hit in range(drafts) if (3 * index + hit) % 10 >= right), drafts)
        seconds = COST.autoregressive() if not drafts else COST.round(LAYERS, drafts)
        if plan.wave:
            seconds = (1 if hits else LOOPS) * policy._sweep()
        record = RoundRecord(
            index=index, num_committed_before=9, exit_layer=LAYERS if drafts else None, max_speculations=drafts,
            draft_tokens=(0,) * drafts, num_accepted=hits, tokens=(0,) * max(hits, 1), stop_cause="cap",
            loaded_layers=LAYERS if hits else LOOPS * LAYERS, verify_seconds=slow(plan) * seconds,
        )  # fmt: skip
        policy.observe(record)
    return ways


def test_prices_by_hand() -> None:
    """In layers, at .8: a wave needs .8 + .2 * 4 = 1.6 sweeps of 2; 3 drafts load 14 for 1 + .8 + .64 + .512 tokens."""
    policy = LoopedAuto(num_layers=8, num_loops=4, cost=LayerCost(8))
    assert policy._sweeps * policy._sweep() == pytest.approx(3.2)
    assert policy._rounds() == (pytest.approx(14 / 2.952), 3)


@pytest.mark.parametrize(("right", "texts", "expected"), [(9, 1, "wave"), (0, 1, "plain"), (9, 64, "plain")])
def test_ways_by_agreement_and_texts(right: int, texts: int, expected: str) -> None:
    """Where drafts are never right, it hopes again now and then."""
    assert decode(policy_of(), right, texts)[-200:].count(expected) > 150


def test_rounds_that_take_longer_than_expected() -> None:
    """A wave that takes three times as long gives way to rounds, and is tried again; fixed costs stay as they are."""
    slow = lambda plan: 3.0 if plan.wave else 1.0  # noqa: E731
    fixed, repaired = policy_of(), policy_of(MeasuredCost.from_dict({**COST.as_dict(), "fixed": False}))
    assert decode(fixed, 9, slow=slow)[-1] == "wave"
    ways = decode(repaired, 9, slow=slow)
    assert ways[:12] == ["wave"] * 4 + ["rounds"] * 4 + ["plain"] * 4
    assert ways[-200:].count("rounds") > 150
    assert decode(repaired, 9)[-200:].count("wave") > 100


def test_options_of_exits_are_for_the_policy_of_exits() -> None:
    for name in ("auto:d_max=4", "auto:copy=off", "auto+spide"):
        found = parse_policy(name, num_layers=8, num_loops=4, measure=lambda: COST)
        assert not isinstance(found.exit, LoopedAuto)
