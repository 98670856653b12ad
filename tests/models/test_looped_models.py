"""Looped models: logits at every loop's end against plain PyTorch, loops in one pass, caches of a loop, what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gguf_models
from layerskip_models import LayerSkipModel, from_transformers, load_model
from layerskip_models.checkpoints.named_models import DEMO_PATH
from layerskip_models.draft_weights import draft_bytes, draft_share, drafter
from layerskip_models.kv_cache import KVCache
from looped_models import LOOPED, LoopedReference, boundary_logits, looped_fields, looped_weights, write_folder
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.cli.main import app
from selfspec.integrations.hub_folder import export_hub
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer

TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(30)]
every_model = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in LOOPED for seed in range(4)])


def loaded(folder: Path, kind: str, seed: int, dtype: str = "float64", **own: Any) -> LayerSkipModel:
    said = looped_fields(kind, seed, VOCAB_SIZE, **own)
    write_folder(folder, said, looped_weights(said, seed))
    return load_model(folder, dtype=dtype, device="cpu")


def logits_of(model: LayerSkipModel) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model.run_layers(model.embed(torch.tensor(TEXT)), 0, model.num_layers, KVCache(model, len(TEXT)))
        return model.logits(hidden)


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=bound, atol=bound)


@every_model
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-5), ("float32", 1e-4)])
def test_every_loop_ends_in_the_logits_of_a_plain_forward(
    kind: str, seed: int, dtype: str, bound: float, tmp_path: Path
) -> None:
    model = loaded(tmp_path, kind, seed, dtype)
    said = looped_fields(kind, seed, VOCAB_SIZE)
    expected = boundary_logits(said, looped_weights(said, seed), TEXT)
    assert model.num_loops == len(expected) and model.num_layers == model.num_loops * said["num_hidden_layers"]
    for rows in (1, 7, len(TEXT)):
        cache, found = KVCache(model, len(TEXT)), []
        for first in range(0, len(TEXT), rows):
            hidden, ends = model.embed(torch.tensor(TEXT[first : first + rows])), []
            for loop in range(model.num_loops):
                hidden = model.run_layers(hidden, loop * model.loop_layers, (loop + 1) * model.loop_layers, cache)
                ends.append(model.logits(hidden))
            found.append(torch.stack(ends))
        assert_near(torch.cat(found, 1), torch.stack(expected), bound)
    assert_near(logits_of(model), expected[-1], bound)
    for fewer in range(1, model.num_loops + 1):
        if fewer * model.loop_layers > 1:
            assert_near(
                logits_of(load_model(tmp_path, dtype=dtype, device="cpu", num_loops=fewer)), expected[fewer - 1], bound
            )


def ordinary_run(model: LayerSkipModel, tokens: list[int]) -> tuple[list[torch.Tensor], KVCache]:
    """The states before each loop and after the last, [rows, hidden], and the cache, of passes of one row each."""
    cache, size = KVCache(model, len(TEXT)), model.loop_layers
    states = []
    for token in tokens:
        rows = [model.embed(torch.tensor([token]))]
        for loop in range(model.num_loops):
            rows.append(model.run_layers(rows[-1], loop * size, (loop + 1) * size, cache))
        states.append(torch.stack(rows))
    return [*torch.cat(states, 1)], cache


def looped_run(model: LayerSkipModel, texts: list[list[int]]) -> list[tuple[list[torch.Tensor], KVCache]]:
    """The same of passes over one loop's layers, in each of which every text has one row in every loop."""
    caches, ahead = [KVCache(model, len(TEXT)) for _ in texts], model.num_loops - 1
    states = [torch.zeros(model.num_loops + 1, len(text), model.hidden_size, dtype=model.dtype) for text in texts]
    for text, kept in zip(texts, states):
        kept[0] = model.embed(torch.tensor(text))
    for sweep in range(max(map(len, texts)) + ahead):
        part = [
            (text, loop, sweep - loop)
            for text, tokens in enumerate(texts)
            for loop in range(ahead, -1, -1)
            if 0 <= sweep - loop < len(tokens)
        ]
        hidden = torch.stack([states[text][loop, row] for text, loop, row in part])
        out = model.run_layers(hidden, 0, model.loop_layers, [(caches[text].loop(loop), 1) for text, loop, _ in part])
        for (text, loop, row), one in zip(part, out):
            states[text][loop + 1, row] = one
    return [([*kept], cache) for kept, cache in zip(states, caches)]


def check_shared_passes(model: LayerSkipModel) -> None:
    texts = [TEXT, TEXT[3:20], TEXT[:1]]
    with torch.inference_mode():
        for text, (states, cache) in zip(texts, looped_run(model, texts)):
            expected, whole = ordinary_run(model, text)
            assert cache.length == whole.length == len(text)
            for one, other in zip(
                [*states, cache.values[:, :, : len(text)]], [*expected, whole.values[:, :, : len(text)]]
            ):
                assert torch.equal(one, other) if model.kernels else torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@every_model
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_in_different_loops_share_a_pass(kind: str, seed: int, dtype: str, tmp_path: Path) -> None:
    """Bit for bit on our kernels."""
    check_shared_passes(loaded(tmp_path, kind, seed, dtype))


def _another_loops_cache(part: KVCache, whole: KVCache) -> None:
    part.values, part.keys = whole.loop(0).values, whole.loop(0).keys
    part._parts = [(part.values, part.keys)]


FAULTS: dict[str, Callable[[KVCache, KVCache], None]] = {
    "another loop's cache": _another_loops_cache,
    "a norm forgotten": lambda part, whole: setattr(part, "loop_index", 0),
    "a norm too many": lambda part, whole: setattr(whole.loop(0), "loop_index", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fault_is_noticed(fault: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.loop

    def wrong(cache: KVCache, index: int) -> KVCache:
        part = right(cache, index)
        if index == 1:
            FAULTS[fault](part, cache)
        return part

    monkeypatch.setattr(KVCache, "loop", wrong)
    with pytest.raises(AssertionError):
        check_shared_passes(loaded(tmp_path, "ouro", 1, dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", LOOPED)
def test_a_norm_applied_twice_or_never_changes_the_logits(kind: str, dtype: str, tmp_path: Path) -> None:
    """By more than the bound of the comparison with the plain forward."""
    model = loaded(tmp_path, kind, 0, dtype)
    first, *others = model.loop
    twice = copy.copy(first.entry_norm)
    assert twice is not None and twice._weight is not None
    twice._weight = twice._weight * twice.weight
    for norm in (None, twice):
        changed = model.with_layers([replace(first, entry_norm=norm), *others], model.head)
        assert (logits_of(changed) - logits_of(model)).abs().max() > 0.01


def test_a_loops_cache_is_a_part_of_the_texts(tmp_path: Path) -> None:
    model = loaded(tmp_path, "ouro", 1, num_hidden_layers=2, total_ut_steps=3)
    cache = KVCache(model, 8)
    rows = model.embed(torch.tensor(TEXT[:4]))
    after = model.run_layers(rows, 0, 2, cache.loop(0))
    model.run_layers(after[:3], 0, 2, cache.loop(1))
    assert [cache.loop(loop).length for loop in range(3)] == [4, 3, 0] and cache.length == 0
    assert cache.position(0, 2) == 4 and cache.position(2, 4) == 3 and cache.loop(1) is cache.loop(1)
    cache.loop(0).roll_back(2)
    assert [cache.loop(loop).length for loop in range(3)] == [2, 3, 0]
    with pytest.raises(ValueError, match="hold different numbers of rows"):
        cache.position(0, 4)
    with pytest.raises(ValueError, match=r"layers \[0, 3\) of 2"):
        cache.loop(1).position(0, 3)
    with pytest.raises(ValueError, match=r"length must be in \[0, 3\]"):
        cache.loop(1).roll_back(4)
    with pytest.raises(ValueError, match="5 rows from position 4"):
        cache.loop(1).declare(4)
        cache.loop(1).room(0, 2, 5)
    cache.declare(1)
    assert [cache.loop(loop).length for loop in range(3)] == [1, 1, 1]
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=r"loop must be in \[0, 2\]"):
            cache.loop(wrong)


def test_weights_are_there_once(tmp_path: Path) -> None:
    """In memory, in copies of fewer bits, and in what sizes say; a pass reads them once a loop."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model = loaded(tmp_path, "ouro", 1, "float32", **sizes, head_dim=16, total_ut_steps=4, tie_word_embeddings=False)
    one = load_model(tmp_path, dtype="float32", device="cpu", num_loops=1)
    assert model.num_layers == 12 and one.num_layers == 3 and (one.num_loops, one.loop_layers) == (1, 3)
    assert model.layer_bytes == one.layer_bytes and KVCache(model, 8).num_bytes == 4 * KVCache(one, 8).num_bytes
    models = [model]
    if model.kernels is not None:
        assert draft_bytes(model, 4) == draft_bytes(one, 4)
        assert draft_share(model, 4) == pytest.approx(draft_share(one, 4), rel=0.1)
        models.append(drafter(model, 8))
    for each in models:
        assert len({id(linear) for layer in each.layers for linear in layer.linears}) == 4 * 3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: ("nanbeige", {name: True}, f"has {name} = True") for name in (
        "attention_bias", "qk_layernorm", "enable_double_loop_split", "loop_share_kv", "enable_depth_attention",
        "enable_hyper_connection", "enable_mhc", "enable_h_res_identity", "ngram_insert_all_layers",
    )},
    "layers in the middle": ("nanbeige", {"loop_middle_layers": [3]}, r"has loop_middle_layers = \[3\]"),
    "neighbours": ("nanbeige", {"emb_neighbor_num": 4}, "has emb_neighbor_num = 4"),
    "n-gram layers": ("nanbeige", {"insert_ngram_layer_idx": [1]}, "has insert_ngram_layer_idx"),
    "a threshold": ("ouro", {"early_exit_threshold": 0.5}, "has early_exit_threshold = 0.5 .*, and only 1.0"),
    "a step": ("ouro", {"early_exit_step": 0}, "has early_exit_step = 0"),
    "a window": ("ouro", {"use_sliding_window": True}, "has use_sliding_window = True"),
    "windows in layers": ("ouro", {"layer_types": ["sliding_attention"] * 2}, "has layer_types"),
    "scaled positions": ("ouro", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "has rope_scaling"),
    "quantised": ("nanbeige", {"quantization_config": {"quant_method": "gptq"}}, "has quantization_config"),
    "no loops": ("ouro", {"total_ut_steps": 0}, "runs its layers 0 times"),
    "loops of text": ("nanbeige", {"num_loops": "2"}, "runs its layers '2' times"),
    "very many loops": ("nanbeige", {"num_loops": 10**9}, "runs its layers 1000000000 times"),
    "a size that is none": ("ouro", {"hidden_size": None, "vocab_size": None}, "has fields that are missing or wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, fields, message = REFUSED[name]
    said = looped_fields(kind, 0, VOCAB_SIZE, num_hidden_layers=2)
    write_folder(tmp_path, said | fields, looped_weights(said, 0))
    with pytest.raises(ValueError, match=f"^{tmp_path} {message}"):
        load_model(tmp_path)


def test_what_looped_models_do_not_have(tmp_path: Path) -> None:
    said = looped_fields("nanbeige", 0, VOCAB_SIZE, num_loops=1, loop_loss_weights=[0.5, 0.25], num_hidden_layers=2)
    weights = looped_weights(said, 0)
    write_folder(tmp_path, said, weights)
    assert load_model(tmp_path).num_loops == 3  # what the weights of losses say goes first
    assert load_model(tmp_path, num_loops=2).num_loops == 2
    for wrong in (0, 4, True, "2"):
        with pytest.raises(ValueError, match=r"num_loops must be in \[1, 3\]"):
            load_model(tmp_path, num_loops=wrong)
    with pytest.raises(ValueError, match=r"num_loops is for looped models, and .* is a 'llama' model"):
        load_model(DEMO_PATH, num_loops=1)
    with pytest.raises(ValueError, match="goes without device and num_loops"):
        SelfSpecGenerator.from_pretrained(DEMO_PATH, num_loops=1, device_map="auto")
    with pytest.raises(ValueError, match="'nanbeige' model, which transformers does not load without remote code"):
        export_hub(tmp_path, tmp_path / "out")
    live = tiny_llama()
    live.config.model_type = "nanbeige"
    live.__class__ = type("NanbeigeForCausalLM", (torch.nn.Module,), {"config": live.config})
    with pytest.raises(ValueError, match="only the checkpoint's own files are read: give load_model"):
        from_transformers(live)
    write_folder(tmp_path, said, weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(
        ValueError, match=r"holds model.layers.0.self_attn.q_norm.weight, which is no part of such a model"
    ):
        load_model(tmp_path)
    weights.pop("model.norm.weight")
    write_folder(tmp_path, said, weights)
    with pytest.raises(ValueError, match=r"lacks weights, first model.norm.weight"):
        load_model(tmp_path)


def test_inspect_knows_loops_and_the_gate(tmp_path: Path) -> None:
    model = loaded(tmp_path, "ouro", 1, "float32", num_hidden_layers=2, total_ut_steps=3)
    assert model.gate is not None and model.gate.shape == (model.hidden_size + 1,)
    found = inspect_model(
        SelfSpecGenerator(model, tiny_tokenizer()), ["a bed, a fig. a head"], max_new_tokens=8, repeats=1
    )
    (line,) = [line for line in inspection_lines(found) if line.startswith("A looped model")]
    assert f"its 2 layers run 3 times, and the ends of loops agree by exit 2: {found.agreement[2]:.0%}, 4: " in line
    assert f"Its gate ({model.hidden_size} weights of norm" in line


@pytest.mark.parametrize("kind", LOOPED)
def test_commands_run_a_folder_and_a_file(kind: str, tmp_path: Path) -> None:
    """With a tokenizer whose class is known by the configuration's alone; drafts at a loop's end change no text."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
    }
    said = looped_fields(kind, 1, 4096, **sizes, num_hidden_layers=2, max_position_embeddings=256)
    weights = looped_weights(said, 1)
    write_folder(tmp_path, said, weights)
    model = load_model(tmp_path)
    reference = LoopedReference(model.config).float()
    reference.load_state_dict(weights, strict=False)
    file = tmp_path / "file"
    file.mkdir()
    keys = gguf_models.metadata(model.config) | {"skip_loop_final_norm": said.get("skip_loop_final_norm", False)}
    gguf_models.write(file / "model.gguf", kind, keys, gguf_models.tensors(reference, "F32"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for folder in (tmp_path, file):
            shutil.copy(DEMO_PATH / name, folder / name)
    texts = []
    for place in (tmp_path, file):
        for policy in ("ar", "ls:2-3", "auto"):
            asked = [
                "generate",
                "Once upon",
                "--raw",
                "--model",
                str(place),
                "--policy",
                policy,
                "--max-new-tokens",
                "12",
                "--json",
            ]
            result = CliRunner().invoke(app, asked)
            assert result.exit_code == 0, result.output
            texts.append(json.loads(result.stdout)["token_ids"])
    assert texts == texts[:1] * len(texts)
    fewer = CliRunner().invoke(app, ["generate", "Once upon", "--raw", "--model", str(file), "--num-loops", "9"])
    assert fewer.exit_code == 2 and "num_loops must be in [1, " in fewer.output
