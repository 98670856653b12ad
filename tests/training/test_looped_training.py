"""Training looped models: loss and gradients against plain PyTorch, and the folder that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from layerskip_models import load_model
from layerskip_models.families import FAMILIES
from layerskip_models.training.layerskip import EarlyExitLoss, train
from layerskip_models.training.looped import layers_with_exits
from looped_models import LoopedReference
from tiny_llama import VOCAB_SIZE, lean_logits, tiny_llama
from tiny_training import tiny, write_numbers


def reference(fields: dict[str, Any], weights: dict[str, Tensor]) -> LoopedReference:
    """A plain forward in float64 of these fields of config.json."""
    own = {name: value for name, value in fields.items() if name not in ("architectures", "model_type")}
    model = LoopedReference(FAMILIES["nanbeige"].config(**own)).double()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_the_mean_over_loops_and_so_are_its_gradients(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(num_layers=2, dtype=torch.float64, tie_word_embeddings=tied).train()
    model.config.num_loops = 3
    weights = {name: one.detach() for name, one in model.named_parameters()}
    plain = reference({**model.config.to_dict(), "skip_loop_final_norm": False}, weights)
    ids = torch.randint(VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
    config = tiny(__file__, tmp_path, loops=3, layer_dropout=0, exit_loss="uniform", loss_chunk_rows=4)
    shares = dict.fromkeys(layers_with_exits(model), 1 / 3)
    assert [*shares] == [1, 3, 5]
    logits = plain.boundary_logits(ids[0, :-1].tolist())
    llama = model(ids[:, :-1]).logits[0]  # what the first loop was before there were others
    torch.testing.assert_close(logits[0], llama, rtol=1e-5, atol=1e-5)
    loss, means = EarlyExitLoss(model, config, 0)(ids[:, :-1], ids[:, 1:], shares)
    expected = torch.stack([F.cross_entropy(one, ids[0, 1:]) for one in logits])
    torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), expected.mean(), rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.mean().backward()
    for name, parameter in model.named_parameters():  # cross-entropy is computed in float32
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_run_leaves_a_looped_model_that_the_engine_reads(tmp_path: Path) -> None:
    text = write_numbers(tmp_path / "numbers.txt")
    plain = {"num_layers": 2, "layer_dropout": 0, "exit_loss": "uniform", "long_steps": 0}
    folder = train(tiny(text, tmp_path / "out", loops=3, max_steps=6, learning_rate=1e-2, **plain))
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert records[0]["loss"].keys() == {"1", "3", "5"}
    held_out = records[-1]["held_out"]
    assert len(held_out["loss"]) == len(held_out["agreement"]) == 3
    assert held_out["loss"][-1] < records[0]["loss"]["5"]

    said, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert (said["model_type"], said["architectures"], said["num_loops"]) == ("nanbeige", ["NanbeigeForCausalLM"], 3)
    tokens = [5, 9, 200, 31, 7, 7, 100]
    expected = reference(said, weights).boundary_logits(tokens)
    for loops in (2, 3):
        found = lean_logits(load_model(folder, dtype="float64", device="cpu", num_loops=loops), tokens)
        torch.testing.assert_close(found, expected[loops - 1].float(), rtol=1e-5, atol=1e-5)

    with pytest.raises(ValueError, match="another loops"):
        train(tiny(text, tmp_path / "out", loops=2, max_steps=6, learning_rate=1e-2, **plain))
    with pytest.raises(ValueError, match=r"init must be a Llama checkpoint, .* is of type 'nanbeige'"):
        train(tiny(text, tmp_path / "plain", init=str(folder), **plain))
    unmoved = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-9, "weight_decay": 0}
    again = train(tiny(text, tmp_path / "more", init=str(folder), loops=3, **plain, **unmoved))
    for name, one in load_file(again / "model.safetensors").items():
        torch.testing.assert_close(one, weights[name], rtol=0, atol=1e-6, msg=name)
    assert json.loads((again / "config.json").read_text()) == said
    (folder / "config.json").write_text(json.dumps({**said, "skip_loop_final_norm": True}))
    with pytest.raises(ValueError, match="has no norm between its loops: it can be run, but not trained here"):
        train(tiny(text, tmp_path / "other", init=str(folder), loops=3, **plain))
