"""What fixed drafts would make of an exit's agreement, counted by hand."""

from __future__ import annotations

import pytest
import torch

from bench.experiments.exit_adapters.forms import Agreement, best_length, replayed_gain


def agreement(*places: list[int]) -> Agreement:
    return Agreement(exit_layer=1, hits=(torch.tensor(places, dtype=torch.bool),))


def test_rounds_are_replayed_and_adapters_are_charged() -> None:
    one = agreement([1, 0, 1, 1])
    assert replayed_gain(one, 1, 4, 0.0) == pytest.approx(4 / 10 * 4)  # two rounds of one draft, both accepted
    assert replayed_gain(one, 1, 4, 0.5) == pytest.approx(4 / 11 * 4)
    assert replayed_gain(agreement([0, 0, 0]), 2, 4, 0.0) == pytest.approx(3 / (6 + 5 + 4) * 4)


def test_each_draft_of_a_round_is_judged_at_its_place() -> None:
    """Steered exits say something else for the second draft of a round than for the first."""
    steered = agreement([1, 1, 1], [0, 0, 0])
    assert replayed_gain(steered, 2, 4, 0.0) == pytest.approx(3 / (6 + 4) * 4)
    assert best_length(steered, 4, 0.0) == (1, pytest.approx(3 / (5 + 4) * 4))
