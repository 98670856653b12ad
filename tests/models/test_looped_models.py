"""Looped models: logits at every loop's end against plain PyTorch, loops in one pass, caches of a loop, what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import gguf_models
from fuzz_models import draw_config, random_model
from layerskip_models import LayerSkipModel, from_transformers, load_model
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
every_model = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in LOOPED for seed in range(3)])
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def reference(kind: str, seed: int, vocab_size: int = VOCAB_SIZE, **own: Any) -> Any:
    """In float64, of numbers that float32 has, with 2 to 4 loops; the last Nanbeige without norms between them."""
    config = draw_config(Random(f"{kind} {seed}"), kind, vocab_size)
    loops = (
        {"total_ut_steps": 2 + seed} if kind == "ouro" else {"num_loops": 2 + seed, "skip_loop_final_norm": seed == 2}
    )
    for name, value in {**loops, **own}.items():
        setattr(config, name, value)
    return random_model(config, late_scale=0.5, sharpness=1.5, seed=seed).float().double()


def engine(kind: str, seed: int, dtype: torch.dtype, **own: Any) -> LayerSkipModel:
    return converted(reference(kind, seed, **own).to(dtype))


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach().float(), rtol=1e-4, atol=1e-4)


@every_model
@every_dtype
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


def ordinary_run(model: LayerSkipModel, tokens: list[int]) -> tuple[Tensor, KVCache]:
    """The states before each loop and after the last, [loops + 1, rows, hidden], of passes of one row each."""
    cache, size, states = KVCache(model, len(TEXT)), model.loop_layers, []
    for token in tokens:
        rows = [model.embed(torch.tensor([token]))]
        for loop in range(model.num_loops):
            rows.append(model.run_layers(rows[-1], loop * size, (loop + 1) * size, cache))
        states.append(torch.stack(rows))
    return torch.cat(states, 1), cache


def looped_run(model: LayerSkipModel, texts: list[list[int]]) -> list[tuple[Tensor, KVCache]]:
    """The same of passes over one loop's layers, in each of which every text has one row in every loop."""
    caches, found = [KVCache(model, len(TEXT)) for _ in texts], []
    for text in texts:
        found.append(torch.zeros(model.num_loops + 1, len(text), model.hidden_size, dtype=model.dtype))
        found[-1][0] = model.embed(torch.tensor(text))
    for sweep in range(max(map(len, texts)) + model.num_loops - 1):
        part = [(i, loop) for i in range(len(texts)) for loop in reversed(range(model.num_loops))]
        part = [(i, loop) for i, loop in part if 0 <= sweep - loop < len(texts[i])]
        hidden = torch.stack([found[i][loop, sweep - loop] for i, loop in part])
        out = model.run_layers(hidden, 0, model.loop_layers, [(caches[i].loop(loop), 1) for i, loop in part])
        for (i, loop), row in zip(part, out):
            found[i][loop + 1, sweep - loop] = row
    return [*zip(found, caches)]


def check_shared_passes(model: LayerSkipModel) -> None:
    texts = [TEXT, TEXT[3:20], TEXT[:1]]
    with torch.inference_mode():
        for text, (states, cache) in zip(texts, looped_run(model, texts)):
            expected, whole = ordinary_run(model, text)
            assert cache.length == whole.length == len(text)
            for one, other in ((states, expected), (cache.values[:, :, : len(text)], whole.values[:, :, : len(text)])):
                assert torch.equal(one, other) if model.kernels else torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@every_model
@every_dtype
def test_rows_in_different_loops_share_a_pass(kind: str, seed: int, dtype: torch.dtype) -> None:
    """Bit for bit on our kernels."""
    check_shared_passes(engine(kind, seed, dtype))


def _another_loops_cache(part: KVCache, whole: KVCache) -> None:
    part.values, part.keys = whole.loop(0).values, whole.loop(0).keys
    part._parts = [(part.values, part.keys)]


FAULTS: dict[str, Callable[[KVCache, KVCache], None]] = {
    "another loop's cache": _another_loops_cache,
    "a norm forgotten": lambda part, whole: setattr(part, "loop_index", 0),
    "a norm too many": lambda part, whole: setattr(whole.loop(0), "loop_index", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@every_dtype
def test_a_fault_is_noticed(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.loop

    def wrong(cache: KVCache, index: int) -> KVCache:
        part = right(cache, index)
        if index == 1:
            FAULTS[fault](part, cache)
        return part

    monkeypatch.setattr(KVCache, "loop", wrong)
    with pytest.raises(AssertionError):
        check_shared_passes(engine("ouro", 1, dtype))


@every_dtype
@pytest.mark.parametrize("kind", LOOPED)
def test_a_norm_applied_twice_or_never_is_noticed(kind: str, dtype: torch.dtype) -> None:
    expected, model = reference(kind, 0).boundary_logits(TEXT)[-1], engine(kind, 0, dtype)
    first, *others = model.loop
    twice = copy.copy(first.entry_norm)
    assert twice is not None and twice._weight is not None
    twice._weight = twice._weight * twice.weight  # all but the root
    for norm in (None, twice):
        changed = model.with_layers([replace(first, entry_norm=norm), *others], model.head)
        with pytest.raises(AssertionError):
            assert_near(lean_logits(changed, TEXT), expected)
    assert_near(lean_logits(model, TEXT), expected)


def test_a_loops_cache_is_a_part_of_the_texts() -> None:
    model = engine("ouro", 1, torch.float32, num_hidden_layers=2)
    cache = KVCache(model, 8)
    after = model.run_layers(model.embed(torch.tensor(TEXT[:4])), 0, 2, cache.loop(0))
    model.run_layers(after[:3], 0, 2, cache.loop(1))
    assert [cache.loop(loop).length for loop in range(3)] == [4, 3, 0] and cache.length == 0
    assert cache.position(0, 2) == 4 and cache.position(2, 4) == 3 and cache.loop(1) is cache.loop(1)
    cache.loop(0).roll_back(2)
    assert [cache.loop(loop).length for loop in range(3)] == [2, 3, 0]
    second = cache.loop(1)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("hold different numbers of rows", lambda: cache.position(0, 4)),
        (r"layers \[0, 3\) of 2", lambda: second.position(0, 3)),
        (r"length must be in \[0, 3\]", lambda: second.roll_back(4)),
        ("6 rows from position 3", lambda: second.room(0, 2, 6)),
        (r"loop must be in \[0, 2\]", lambda: cache.loop(3)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    cache.declare(1)
    assert [cache.loop(loop).length for loop in range(3)] == [1, 1, 1]


def test_weights_are_there_once() -> None:
    """In memory, in copies of fewer bits, and in what sizes say; a pass reads them once a loop."""
    model, one = (
        engine("ouro", 2, torch.float32, **LARGE, num_hidden_layers=3, total_ut_steps=loops) for loops in (4, 1)
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
def test_commands_run_a_folder_and_a_file(kind: str, tmp_path: Path) -> None:
    """Drafts at a loop's end change no text."""
    theirs = reference(kind, 1, 4096, **LARGE, num_hidden_layers=2, max_position_embeddings=256).float()
    write_folder(tmp_path, theirs)
    file = tmp_path / "file"
    file.mkdir()
    gguf_models.write(file / "a.gguf", kind, gguf_models.metadata(theirs.config), gguf_models.tensors(theirs, "F32"))
    for folder in (tmp_path, file):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_PATH / name, folder / name)
    texts, run = [], CliRunner()
    for place in (tmp_path, file):
        asked = ["generate", "Once upon", "--raw", "--model", str(place), "--max-new-tokens", "12", "--json"]
        for policy in ("ar", "ls:2-3", "wave", "auto"):
            result = run.invoke(app, [*asked, "--policy", policy, "--explain"])
            assert result.exit_code == 0, result.output
            texts.append(json.loads(result.stdout)["token_ids"])
            assert "against plain: ls:" in "\n".join(json.loads(result.stdout)["explanation"])
        wrong = run.invoke(app, [*asked, "--num-loops", "9"])
        assert wrong.exit_code == 2 and "num_loops must be in [1, 3]" in wrong.output
    assert texts == texts[:1] * len(texts)
