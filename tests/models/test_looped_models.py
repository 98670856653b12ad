"""Looped models: logits at every loop's end against plain PyTorch, caches of a loop, what is refused.

Rows of several loops in one pass are in tests/engine/test_waves.py and, of every family, in tests/exact.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from fuzz_models import draw_config, random_model
from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints.named_models import DEMO_PATH
from layerskip_models.draft_weights import draft_bytes, draft_share, drafter
from layerskip_models.kv_cache import KVCache
from looped_models import LOOPED, converted, write_folder
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.cli.main import app
from selfspec.integrations.hub_folder import export_hub
from tiny_llama import VOCAB_SIZE, lean_logits, tiny_llama, tiny_tokenizer

TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(30)]
LARGE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}


def reference(kind: str, seed: int, vocab_size: int = VOCAB_SIZE, **own: Any) -> Any:
    """In float64, of numbers that float32 has, with 2 to 4 loops; the last Nanbeige without norms between them."""
    config = draw_config(Random(f"{kind} {seed}"), kind, vocab_size)
    loops = {"total_ut_steps": 2 + seed, "num_loops": 2 + seed, "skip_loop_final_norm": kind != "ouro" and seed == 2}
    for name, value in {**loops, **own}.items():
        setattr(config, name, value)
    return random_model(config, late_scale=0.5, sharpness=1.5, seed=seed).float().double()


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LOOPED)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_loop_ends_in_the_logits_of_a_plain_forward(
    kind: str, seed: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Read from the hub's layout. With fewer loops it is the model that ends there."""
    theirs = reference(kind, seed)
    write_folder(tmp_path, theirs)
    expected = theirs.boundary_logits(TEXT)
    model = load_model(tmp_path, dtype=dtype, device="cpu")
    assert (model.num_loops, model.loop_layers) == (len(expected), theirs.config.num_hidden_layers)
    cache, hidden = KVCache(model, len(TEXT)), model.embed(torch.tensor(TEXT))
    with torch.inference_mode():
        for loop, logits in enumerate(expected):
            hidden = model.run_layers(hidden, loop * model.loop_layers, (loop + 1) * model.loop_layers, cache)
            assert_near(model.logits(hidden), logits)
    for loops, logits in enumerate(expected, 1):
        assert_near(lean_logits(load_model(tmp_path, dtype=dtype, device="cpu", num_loops=loops), TEXT), logits)


def test_weights_are_there_once() -> None:
    """In memory, in copies of fewer bits, and in what sizes say; a pass reads them once a loop."""
    model, one = (
        converted(reference("ouro", 2, **LARGE, num_hidden_layers=3, total_ut_steps=loops).float()) for loops in (4, 1)
    )
    assert (model.num_layers, one.num_layers) == (12, 3) and (one.num_loops, one.loop_layers) == (1, 3)
    assert model.layer_bytes == one.layer_bytes and KVCache(model, 8).num_bytes == 4 * KVCache(one, 8).num_bytes
    models = [model]
    if model.kernels is not None:
        assert draft_bytes(model, 4) == draft_bytes(one, 4)
        assert draft_share(model, 4) == pytest.approx(draft_share(one, 4), rel=0.1)
        models.append(drafter(model, 8))
    for each in models:
        assert len({id(linear) for layer in each.layers for linear in layer.linears}) == 4 * 3


_FLAGS = ("attention_bias", "qk_layernorm", "enable_double_loop_split", "loop_share_kv", "enable_depth_attention",
          "enable_hyper_connection", "enable_mhc", "enable_h_res_identity", "ngram_insert_all_layers")  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("nanbeige", {flag: True}, f"has {flag} = True") for flag in _FLAGS),
    ("nanbeige", {"loop_middle_layers": [3]}, r"has loop_middle_layers = \[3\]"),
    ("nanbeige", {"emb_neighbor_num": 4}, "has emb_neighbor_num = 4"),
    ("nanbeige", {"insert_ngram_layer_idx": [1]}, "has insert_ngram_layer_idx"),
    ("ouro", {"early_exit_threshold": 0.5}, "has early_exit_threshold = 0.5 .*, and only 1.0"),
    ("ouro", {"early_exit_step": 0}, "has early_exit_step = 0"),
    ("ouro", {"use_sliding_window": True}, "has use_sliding_window = True"),
    ("ouro", {"layer_types": ["sliding_attention"] * 2}, "has layer_types"),
    ("ouro", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "has rope_scaling"),
    ("nanbeige", {"quantization_config": {"quant_method": "gptq"}}, "has quantization_config"),
    ("ouro", {"total_ut_steps": 0}, "runs its layers 0 times"),
    ("nanbeige", {"num_loops": "2"}, "runs its layers '2' times"),
    ("nanbeige", {"num_loops": 10**9}, "runs its layers 1000000000 times"),
    ("ouro", {"hidden_size": None, "vocab_size": None}, "has fields that are missing or wrong"),
]  # fmt: skip


def test_what_changes_the_result_is_refused_by_name(tmp_path: Path) -> None:
    models = {kind: reference(kind, 0, num_hidden_layers=2) for kind in LOOPED}
    for kind, fields, message in REFUSED:
        write_folder(tmp_path, models[kind], **fields)
        with pytest.raises(ValueError, match=f"^{tmp_path} {message}"):
            load_model(tmp_path)


def test_what_looped_models_do_not_have(tmp_path: Path) -> None:
    theirs = reference("nanbeige", 0)
    write_folder(tmp_path, theirs, loop_loss_weights=[0.5, 0.25])
    assert load_model(tmp_path).num_loops == 3  # what the weights of losses say goes first
    assert load_model(tmp_path, num_loops=2).num_loops == 2
    for wrong in (0, 4, True, "2"):
        with pytest.raises(ValueError, match=r"num_loops must be in \[1, 3\]"):
            load_model(tmp_path, num_loops=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_loops is for looped models, and .* is a 'llama' model"):
        load_model(DEMO_PATH, num_loops=1)
    with pytest.raises(ValueError, match="'nanbeige' model, which transformers does not load without remote code"):
        export_hub(tmp_path, tmp_path / "out")
    live = tiny_llama()
    live.config.model_type, live.__class__ = "nanbeige", type("Remote", (torch.nn.Module,), {"config": live.config})
    with pytest.raises(ValueError, match="only the checkpoint's own files are read: give load_model"):
        from_transformers(live)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(
        ValueError, match=r"holds model.layers.0.self_attn.q_norm.weight, which is no part of such a model"
    ):
        load_model(tmp_path)
    save_file({name: value for name, value in weights.items() if name != "model.norm.weight"}, file)
    with pytest.raises(ValueError, match=r"lacks weights, first model.norm.weight"):
        load_model(tmp_path)


def test_inspect_knows_loops_and_the_gate(tmp_path: Path) -> None:
    write_folder(tmp_path, reference("ouro", 1, num_hidden_layers=2))
    model = load_model(tmp_path, device="cpu")
    found = inspect_model(
        SelfSpecGenerator(model, tiny_tokenizer()), ["a bed, a fig. a head"], max_new_tokens=8, repeats=1
    )
    (line,) = [line for line in inspection_lines(found) if line.startswith("A looped model")]
    assert f"its 2 layers run 3 times, and the ends of loops agree by exit 2: {found.agreement[2]:.0%}, 4: " in line
    size = model.hidden_size
    assert f"Its gate ({size} weights of norm {size**0.5:.2f}, bias 1.00) is not used" in line


@pytest.mark.parametrize("kind", LOOPED)
def test_commands_run_a_folder(kind: str, tmp_path: Path) -> None:
    """Drafts at a loop's end change no text."""
    write_folder(tmp_path, reference(kind, 1, 4096, **LARGE, num_hidden_layers=2, max_position_embeddings=256).float())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_PATH / name, tmp_path / name)
    texts, run = [], CliRunner()
    asked = ["generate", "Once upon", "--raw", "--model", str(tmp_path), "--max-new-tokens", "12", "--json"]
    for policy in ("ar", "ls:2-3", "wave", "auto"):
        result = run.invoke(app, [*asked, "--policy", policy, "--explain"])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["token_ids"])
        assert "against plain: ls:" in "\n".join(json.loads(result.stdout)["explanation"])
    assert texts == texts[:1] * len(texts)
    wrong = run.invoke(app, [*asked, "--num-loops", "9"])
    assert wrong.exit_code == 2 and "num_loops must be in [1, 3]" in wrong.output
