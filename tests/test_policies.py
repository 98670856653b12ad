"""Policies by name, the fixed exit layer, and how needs combine."""

from __future__ import annotations

import pytest
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow

from policies import (
    POLICIES,
    FixedExit,
    Needs,
    Plan,
    Policy,
    RoundContext,
    autoregressive,
    check_exit_layer,
    parse_policy,
)
from policies.base import check_layers

FIRST_ROUND = RoundContext(round_index=0, num_committed=4, remaining_tokens=10)


def test_names() -> None:
    plan = parse_policy("ls:3-6", num_layers=8).exit.plan(FIRST_ROUND)
    assert plan == Plan(exit_layer=3, max_speculations=6)
    assert parse_policy(" ls:7-1 ", num_layers=8).name == "ls:7-1"
    assert parse_policy("ar", num_layers=8).exit.plan(FIRST_ROUND) == Plan(exit_layer=None, max_speculations=0)
    assert parse_policy("ls:3-0", num_layers=8).exit.plan(FIRST_ROUND).exit_layer is None
    assert autoregressive(8).name == "ar"


@pytest.mark.parametrize("text", ["", "nonsense", "LS:3-6", "ls3-6", "del:3"])
def test_an_unknown_name_lists_what_is_possible(text: str) -> None:
    with pytest.raises(ValueError, match="unknown policy") as error:
        parse_policy(text, num_layers=8)
    assert repr(text) in str(error.value)
    assert all(f'"{name}' in str(error.value) for name in POLICIES)


@pytest.mark.parametrize("text", ["ls", "ls:", "ls:3", "ls:3-", "ls:-6", "ls:3-6-1", "ls:a-b", "ls:3--6", "ls:3.5-2"])
def test_bad_arguments_show_a_good_one(text: str) -> None:
    with pytest.raises(ValueError, match='"ls:3-6"'):
        parse_policy(text, num_layers=8)


def test_plain_decoding_takes_no_arguments() -> None:
    with pytest.raises(ValueError, match="takes no arguments"):
        parse_policy("ar:3", num_layers=8)


@pytest.mark.parametrize("exit_layer", [0, 8, 9])
def test_exit_layers_outside_the_model(exit_layer: int) -> None:
    with pytest.raises(ValueError, match=rf"exit_layer must be in \[1, 7\] for this 8-layer model, got {exit_layer}"):
        parse_policy(f"ls:{exit_layer}-2", num_layers=8)


@pytest.mark.parametrize("exit_layer", [0, 8, True, 2.0, "3"])
def test_check_exit_layer(exit_layer: int) -> None:
    with pytest.raises(ValueError, match=r"\[1, 7\]"):
        check_exit_layer(exit_layer, 8)


def test_check_layers() -> None:
    assert check_layers([5, 1, 5], 8) == (1, 5)
    with pytest.raises(ValueError, match="got 8"):
        check_layers([1, 8], 8)


def test_fixed_exit() -> None:
    policy = FixedExit(2, 3, num_layers=4)
    plans = {policy.plan(RoundContext(round_index=i, num_committed=i, remaining_tokens=9 - i)) for i in range(5)}
    assert plans == {Plan(exit_layer=2, max_speculations=3)}
    assert policy.needs == Needs()


@pytest.mark.parametrize(
    ("exit_layer", "num_speculations", "message"),
    [(2, -1, ">= 0"), (2, True, ">= 0"), (2, 1.0, ">= 0"), (None, 3, "exit_layer is missing"), (4, 1, r"\[1, 3\]")],
)
def test_fixed_exit_refuses(exit_layer: int | None, num_speculations: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedExit(exit_layer, num_speculations, num_layers=4)


def test_needs_are_joined() -> None:
    left = Needs(confidence=True, shadow_layers=(3, 1), prompt_rows=8, learn_every=4)
    right = Needs(entropy=True, shadow_layers=(2, 3), prompt_rows=32, learn_every=2)
    assert left | right == Needs(confidence=True, entropy=True, shadow_layers=(1, 2, 3), prompt_rows=32, learn_every=2)
    # A part that learns nothing does not ask for every round.
    assert (left | Needs(exit_hidden=True)).learn_every == 4
    assert (left | Needs(exit_hidden=True)).exit_hidden


def test_a_policy_asks_for_what_its_parts_ask_for() -> None:
    exit_policy = ScriptedExit([(1, 1)], Needs(entropy=True))
    assert Policy(exit_policy).needs == Needs(entropy=True)
    assert Policy(exit_policy, StopBelow(0.5)).needs == Needs(entropy=True, confidence=True)
    assert Policy(exit_policy, StopAtTokens([1])).needs == Needs(entropy=True)
