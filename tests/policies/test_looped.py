"""What "auto" plans for looped models: the expected price of each way by hand, and what measured rounds change in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies import LayerCost, MeasuredCost, RoundContext, RoundRecord, parse_policy
from policies.looped import LoopedAuto

COST = MeasuredCost(num_layers=8, layer_seconds=(1.0, 1.3, 1.6, 1.9), head_seconds=(0.2, 0.21))


def decode(policy: LoopedAuto, right: int, texts: int = 1, wave: float = 1.0) -> list[str]:
    """400 rounds of 4 loops of 2 layers, with `right` of 10 drafts right. wave: what a wave takes by what it should."""
    ways = []
    for index in range(400):
        plan = policy.plan(RoundContext(round_index=index, num_committed=9, remaining_tokens=99, batch_size=texts))
        drafts = 1 if plan.wave else plan.max_speculations
        hits = next((hit for hit in range(drafts) if (3 * index + hit) % 10 >= right), drafts)
        seconds = policy._expected.round(2, drafts) if drafts else policy._expected.autoregressive()
        seconds = (1 if hits else 4) * policy._sweep * wave if plan.wave else seconds
        record = RoundRecord(
            index=index, num_committed_before=9, exit_layer=2 if drafts else None, max_speculations=plan.max_speculations,
            draft_tokens=(0,) * drafts, num_accepted=hits, tokens=(0,) * max(hits, 1), stop_cause="cap",
            loaded_layers=2 if hits else 8, verify_seconds=seconds,
        )  # fmt: skip
        policy.observe(record)
        ways.append("wave" if plan.wave else "rounds" if drafts else "plain")
    return ways


def test_prices_by_hand() -> None:
    """In layers, at .8: a wave needs .8 + .2 * 4 = 1.6 sweeps of 2; 3 drafts load 14 for 1 + .8 + .64 + .512 tokens."""
    prices = LoopedAuto(num_layers=8, num_loops=4, cost=LayerCost(8)).prices()
    assert prices == pytest.approx({"wave": 3.2, "rounds": 14 / 2.952, "plain": 8.0})


@pytest.mark.parametrize(
    ("right", "texts", "wave", "expected"),
    [(9, 1, 1.0, "wave"), (0, 1, 1.0, "plain"), (9, 64, 1.0, "plain"), (9, 1, 3.0, "rounds")],
)
def test_ways_by_agreement_texts_and_time(right: int, texts: int, wave: float, expected: str) -> None:
    """A wave that takes three times as long as expected gives way to rounds, and is taken again when it no longer does."""
    policy = LoopedAuto(num_layers=8, num_loops=4, cost=COST, repair=True)
    ways = decode(policy, right, texts, wave)
    assert ways[:12] == ["wave"] * 4 + ["rounds"] * 4 + ["plain"] * 4
    assert ways[-200:].count(expected) > 150
    if expected == "rounds":
        assert decode(policy, 9)[-200:].count("wave") > 100


def test_what_it_learned_is_kept(tmp_path: Path) -> None:
    """By `save` and `load`; another policy's state is refused, and changes nothing."""
    policies = [
        parse_policy("auto:cost=layers", num_layers=8, num_loops=loops, measure=lambda: COST) for loops in (4, 4, 1)
    ]
    learned, fresh, _ = (policy.exit for policy in policies)
    assert isinstance(learned, LoopedAuto) and isinstance(fresh, LoopedAuto)
    decode(learned, 0)
    assert policies[0].learns and learned.state() != fresh.state()
    policies[0].save(tmp_path / "state.json")
    for policy, other in ((policies[1], policies[2]), (policies[2], policies[1])):
        before = policy.state()
        with pytest.raises(ValueError, match="saved state"):
            policy.restore(other.state())
        assert policy.state() == before
    policies[1].load(tmp_path / "state.json")
    assert fresh.state() == learned.state()


def test_which_policy_auto_is() -> None:
    """Options of exits are for the policy of exits."""
    for name, loops in {"auto": 1, "auto:d_max=4": 4, "auto:copy=off": 4, "auto+spide": 4}.items():
        found = parse_policy(name, num_layers=8, num_loops=loops, measure=lambda: COST)
        assert not isinstance(found.exit, LoopedAuto)
    assert isinstance(parse_policy("auto", num_layers=8, num_loops=4, measure=lambda: COST).exit, LoopedAuto)
