"""Exit adapters at work: the numbers of the trained network, found beside a checkpoint, refused for another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from batched_runs import LAYOUTS, shared_model
from layerskip_models import LayerSkipModel, from_transformers, load_model
from layerskip_models.exits import FOLDER, FORMS, STEERED
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters, steering_layers
from layerskip_models.exits.folder import load_adapters, save_adapters
from layerskip_models.exits.lean import lean_adapters, with_exits
from layerskip_models.kernels.native_linear import operators_only
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from policies import LayerCost, MeasuredCost
from random_adapters import adapted, random_adapters
from selfspec import SelfSpecGenerator
from selfspec.engine.expected_cost import expected_cost
from tiny_llama import tiny_llama, tiny_tokenizer


def rows_of(model: LayerSkipModel, rows: int) -> torch.Tensor:
    own = torch.Generator().manual_seed(rows)
    return torch.randn(rows, model.hidden_size, generator=own, dtype=model.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trained_network_in_another_layout(layout: Layout, form: str) -> None:
    model = shared_model(layout)
    trained = random_adapters(model, [1, 3], seed=5, form=form)
    hidden = rows_of(model, 150)  # more than the kernels take at once
    states = torch.stack([rows_of(model, 150 + depth)[:150] for depth in trained.config.steering_layers or (1,)], dim=1)
    for layer, lean in lean_adapters(trained, model).items():
        with torch.no_grad():
            wanted = None if trained.steering is None else trained.double().steering(states.double())
            expected = trained.double().at(layer)(hidden.double(), wanted)
        steering = None if lean.steering is None else lean.steering(states)
        # Norms are computed in float32 in every dtype.
        torch.testing.assert_close(lean(hidden, steering).double(), expected, rtol=1e-4, atol=1e-5)
        with operators_only():
            torch.testing.assert_close(lean(hidden, steering).double(), expected, rtol=1e-4, atol=1e-5)
        one = lean(hidden[:1], None if steering is None else steering[0])
        torch.testing.assert_close(one.double(), expected[:1], rtol=1e-4, atol=1e-5)
        assert lean.num_bytes > 0


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_row_depends_on_nothing_beside_it(layout: Layout) -> None:
    """One by one, together, and within a step of the kernels: the same bits."""
    model = shared_model(layout)
    hidden = rows_of(model, 40)
    for lean in lean_adapters(random_adapters(model, [2], seed=1), model).values():
        together = lean(hidden)
        assert torch.equal(together, torch.cat([lean(row) for row in hidden.split(1)]))
    steps = model.steps()
    assert steps is not None
    tokens = [3, 5, 8, 1, 9, 2, 7]
    for exit_layer in (1, 2, 3):  # the second one is bare
        last = torch.empty(len(tokens), model.hidden_size)
        looks = steps.tokens(tokens, ((KVCache(model, 16), len(tokens)),), exit_layer, last, head="draft", detail="all")
        choices = model.draft_choices(model.at_exit(last, exit_layer), "all")
        assert [look.token for look in looks] == choices.tokens.tolist()
        assert [list(look[1:]) for look in looks] == choices.numbers.T.tolist()


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint with adapters beside it."""
    copied = tmp_path / "model"
    copied.mkdir()
    for file in checkpoint.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    (copied / FOLDER).mkdir()
    save_adapters(random_adapters(load_model(copied), [1, 2]), copied / FOLDER)
    return copied


def test_adapters_beside_a_checkpoint_are_found(folder: Path) -> None:
    model = load_model(folder)
    assert sorted(model.adapters) == [1, 2]
    assert load_model(folder, exits=None).adapters == {}
    assert SelfSpecGenerator(model, exits=None)._models.current.model.adapters == {}
    assert sorted(SelfSpecGenerator(model)._models.current.model.adapters) == [1, 2]
    llama = LlamaForCausalLM.from_pretrained(folder)
    assert sorted(SelfSpecGenerator(llama)._models.current.model.adapters) == [1, 2]
    assert SelfSpecGenerator(llama, exits=None)._models.current.model.adapters == {}


def test_adapters_of_another_model_are_refused(folder: Path) -> None:
    other = from_transformers(tiny_llama(seed=99))
    with pytest.raises(ValueError, match="train-exit"):
        with_exits(other, folder / FOLDER)
    llama = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.mul_(-5)
    with pytest.warns(RuntimeWarning, match="exits are bare"):
        generator = SelfSpecGenerator(llama, tiny_tokenizer())
    assert generator._models.current.model.adapters == {}
    with pytest.raises(ValueError, match="not those of"):
        SelfSpecGenerator(llama, exits=folder / FOLDER)


@pytest.mark.parametrize("damage", ["missing", "config", "type", "weights", "nan", "scale"])
def test_damaged_folders(folder: Path, damage: str) -> None:
    place = folder / FOLDER
    error: type[Exception] = ValueError
    if damage == "missing":
        place, error = folder / "nowhere", FileNotFoundError
    elif damage == "config":
        (place / "exits.json").write_text('{"rank": 3}')
    elif damage == "type":
        config = json.loads((place / "exits.json").read_text())
        (place / "exits.json").write_text(json.dumps({**config, "eps": "1e-6"}))
    elif damage == "weights":
        (place / "exits.safetensors").write_bytes(b"nothing")
    else:
        adapters = load_adapters(place)
        value = adapters.at(1).scale if damage == "scale" else adapters.at(1).down.weight.data[0, 0]
        value.fill_(float("nan"))
        save_adapters(adapters, place)
    with pytest.raises(error, match="train"):
        load_model(folder, exits=place)


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "wide"},
        {"exit_layers": (2, 1)},
        {"rank": 0},
        {"hidden_size": "16"},
        {"eps": float("nan")},
        {"exit_layers": (1, None)},
        {"form": "steered"},
        {"form": "steered", "steering_layers": (2,)},
        {"form": "steered", "steering_layers": (), "steering_size": 4},
        {"form": "steered", "steering_layers": (0, 2), "steering_size": 4},
        {"steering_size": 4},
    ],
)
def test_configurations_that_cannot_be(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {"hidden_size": 16, "exit_layers": (1, 2), "rank": 4}
    with pytest.raises(ValueError):
        AdapterConfig(**{**good, **wrong})  # type: ignore[arg-type]


def test_a_form_that_does_not_draft_is_refused(folder: Path) -> None:
    """A folder of an earlier version, whose configuration named the fields of all forms."""
    place = folder / FOLDER / "exits.json"
    earlier = {**json.loads(place.read_text()), "steering_layers": [], "steering_size": 64, "num_heads": 0}
    place.write_text(json.dumps(earlier))
    assert load_adapters(folder / FOLDER).exit_layers == (1, 2)
    place.write_text(json.dumps({**earlier, "form": "layer"}))
    with pytest.raises(ValueError, match="low_rank or steered, got 'layer'"):
        load_adapters(folder / FOLDER)


def test_steered_adapters_are_stored_and_draft(folder: Path) -> None:
    """Read as written; steered by layers that the model has; and the numbers of the trained network, in every layout."""
    place = folder / FOLDER
    model = load_model(folder, exits=None)
    trained = random_adapters(model, [1, 2], form=STEERED)
    save_adapters(trained, place)
    again = load_adapters(place)
    assert again.config == trained.config and again.config.steering_layers == steering_layers(model.num_layers)
    assert all(torch.equal(a, b) for a, b in zip(trained.state_dict().values(), again.state_dict().values()))
    assert load_model(folder).steering is not None and load_model(folder, exits=None).steering is None
    config = json.loads((place / "exits.json").read_text())
    (place / "exits.json").write_text(json.dumps({**config, "steering_layers": [1, 99]}))
    with pytest.raises(ValueError, match="another shape"):
        load_model(folder)


def test_steering_as_wide_as_the_states_begins_as_their_sum() -> None:
    config = AdapterConfig(
        form=STEERED, hidden_size=16, exit_layers=(1,), rank=4, steering_layers=(2, 3, 5), steering_size=16
    )
    states = torch.randn(6, 3, 16)
    adapters = ExitAdapters(config)
    assert adapters.steering is not None
    states[:, 2] *= 30  # a layer that is wider in scale is not held back
    summed = states.sum(1) - states.sum(1).mean(-1, keepdim=True)
    normed = summed / summed.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(adapters.steering(states), normed, rtol=1e-4, atol=1e-4)
    assert torch.equal(adapters.at(1)(states[:, 0], adapters.steering(states)), states[:, 0])  # S is zero
    assert steering_layers(32) == (3, 16, 30) and steering_layers(2) == (1, 2)
    assert not adapters.steering(torch.zeros(3, 16)).any()


def test_an_adapter_is_part_of_a_draft_steps_price() -> None:
    bare = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.5), head_seconds=(2.0, 2.5))
    priced = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.5), head_seconds=(2.0, 2.5), adapter_seconds=((2, 0.25),))
    assert priced.round(2, 3) == bare.round(2, 3) + 3 * 0.25
    assert priced.round(1, 3) == bare.round(1, 3)
    assert priced.for_batch_size(2).head_cost(2) == bare.for_batch_size(2).head_cost(2) + 0.25 / 2
    assert MeasuredCost.from_dict(priced.as_dict()) == priced
    assert LayerCost(4).head_cost(2) == 0


def test_costs_know_adapters() -> None:
    model = shared_model("plain")
    cost = expected_cost(model.with_adapters(model.adapters))
    assert [layer for layer, _ in cost.adapter_seconds] == [1, 3]
    assert all(seconds >= 0 for _, seconds in cost.adapter_seconds)
    assert expected_cost(model.with_adapters({})).adapter_seconds == ()
    steered = adapted(model, [1, 3], form=STEERED)
    assert [layer for layer, _ in expected_cost(steered).adapter_seconds] == [1, 3]
