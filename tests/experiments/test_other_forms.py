"""All forms of exit adapters that are compared: packed texts, steering rows, fitting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.experiments.exit_adapters.other_forms import (
    FORMS,
    EveryRow,
    LayerAdapter,
    adapted_states,
    attention_mask,
    make_adapters,
    plan_for_forms,
    training_outputs,
)
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters
from layerskip_models.exits.steering import SteeredAdapters
from selfspec.exits.fitting import fit
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import capture
from selfspec.exits.sequences import ExitSequence, join
from selfspec.exits.settings import FitSettings
from selfspec.exits.steered_rows import rows_before, steering_of
from selfspec.exits.training_texts import TrainingText
from tiny_llama import tiny_llama

DEPTHS = (1, 2, 3, 4)
CONFIG = AdapterConfig(hidden_size=16, exit_layers=(1, 2), rank=8)


def tiny_model() -> LayerSkipModel:
    return from_transformers(tiny_llama(late_scale=0.7, seed=5), layout="plain")


def made(form: str, *, random: bool = False) -> ExitAdapters:
    adapters = make_adapters(form, CONFIG, tiny_model())
    if random:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in adapters.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
    return adapters


def texts(number: int, *, scored: bool = True) -> list[TrainingText]:
    """Random ones of various lengths; the second half of each counts, or all."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(number):
        size = 20 - index % 4
        tokens = torch.randint(0, 24, (size,), generator=generator).tolist()
        found.append(TrainingText(tokens, [(1 if scored else size // 2, size)], own=index % 2 == 0))
    return found


def every_row() -> EveryRow:
    return EveryRow(depths=DEPTHS, dtype=torch.float32)


def test_all_rows_and_all_depths_are_kept() -> None:
    plan = plan_for_forms([made(form) for form in FORMS], tiny_model(), torch.float16)
    assert plan == EveryRow(depths=(1, 2, 3, 4), dtype=torch.float16)
    assert plan_for_forms([made("low_rank")], tiny_model(), torch.float16).depths == (1, 2, 4)
    text = texts(1, scored=False)[0]
    (found,) = capture(tiny_model(), [text], plan)
    assert found.positions.tolist() == list(range(len(text.tokens) - 1))
    assert found.scored.tolist() == [position >= len(text.tokens) // 2 - 1 for position in found.positions.tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_one_sequence_are_as_each_alone(form: str) -> None:
    """To 1e-5: neither attention nor steering crosses a joint."""
    parts = capture(tiny_model(), texts(4, scored=False), every_row())
    whole = join(parts)
    adapters = made(form, random=True)

    def outputs(sequence: ExitSequence, distance: int) -> Tensor:
        rows = sequence.scored_rows()
        with torch.no_grad():
            return adapted_states(adapters, sequence, DEPTHS, rows, torch.full_like(rows, distance))[1]

    for distance in (1, 8):
        separate = torch.cat([outputs(part, distance) for part in parts])
        torch.testing.assert_close(outputs(whole, distance), separate, atol=1e-5, rtol=0)


def test_rows_before_by_hand() -> None:
    """Two texts, of positions 0, 1, 2, 5 and 0, 1: position 5 has 2 three before it, and nothing one before it."""
    positions = torch.tensor([0, 1, 2, 5, 0, 1])
    sequence = ExitSequence(
        states=torch.zeros(6, 1, 2),
        labels=torch.zeros(6).long(),
        positions=positions,
        texts=torch.tensor([0, 0, 0, 0, 1, 1]),
        own=torch.zeros(6).bool(),
    )
    rows = torch.arange(6)
    assert rows_before(sequence, rows, torch.ones(6).long()).tolist() == [-1, 0, 1, -1, -1, 4]
    assert rows_before(sequence, rows, torch.full((6,), 3)).tolist() == [-1, -1, -1, 2, -1, -1]
    assert attention_mask(sequence)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_the_states_that_steer_are_those_of_the_row_that_many_positions_before() -> None:
    """Zeros where the text has none, which the projection leaves zeros."""
    (sequence,) = capture(tiny_model(), texts(1, scored=False), every_row())
    adapters = made("steered", random=True)
    assert isinstance(adapters, SteeredAdapters) and adapters.config.steering_layers == (2, 3)
    rows = torch.arange(len(sequence))
    steering = steering_of(adapters, sequence, DEPTHS, rows, torch.full_like(rows, 3))
    torch.testing.assert_close(steering[3:], adapters.steering(sequence.states[:-3, 1:3]))
    assert not steering[:3].any()


@pytest.mark.parametrize("form", FORMS)
def test_fitting_brings_the_exit_nearer_to_the_model(form: str) -> None:
    model = tiny_model()
    head, sequences = FrozenHead(model), [join(capture(model, texts(12), every_row()))]
    adapters, seen = made(form), []
    steps = fit(
        adapters, sequences, DEPTHS, head, FitSettings(steps=60, learning_rate=0.03, arm="full"),
        outputs=training_outputs(adapters, DEPTHS), after_step=lambda done, figures: seen.append(figures.mean_kl),
    )  # fmt: skip
    assert steps == 60 and seen[-1] < 0.7 * seen[0]


def test_an_untrained_adapter_changes_nothing() -> None:
    states: Any = torch.randn(2, 7, 16)
    layer = made("layer").at(2)
    assert isinstance(layer, LayerAdapter)
    for form in ("steered", "steered_wide"):
        steered = made(form)
        assert isinstance(steered, SteeredAdapters)
        assert torch.equal(steered.at(2).steered(states, steered.steering(torch.randn(2, 7, 2, 16))), states)
    assert torch.equal(layer.attended(states, torch.arange(7).expand(2, 7), None), states)
