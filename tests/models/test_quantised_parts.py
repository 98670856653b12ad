"""Weights of few bits in several processes: every number is the one of a single process, and each has only its part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_tensor_parallel import _divisible
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import LayerSkipModel, load_model
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_shard
from layerskip_models.parallel.shard_plan import ShardPlan
from quantised_files import quantise_checkpoint
from rank_processes import RankFailed, on_ranks, results_of
from selfspec import SelfSpecGenerator
from test_families import reference
from test_tensor_parallel_layers import needs_native
from tiny_llama import tiny_llama

KINDS = ("qkv", "output", "gate_up", "down")
TEXT = [(7 * index + 3) % 24 for index in range(20)]


def llama(**options: Any) -> LlamaForCausalLM:
    """With rows that 4 bits hold, whose parts do so too, though 3 units of the inner width do not divide by 2."""
    shape: dict[str, Any] = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    return tiny_llama(**{**shape, "num_layers": 3, "late_scale": 0.6, "seed": 4, "vocab_size": 27, **options})


def states_of(model: LayerSkipModel, text: list[int]) -> Tensor:
    with torch.inference_mode():
        return model.run_layers(model.embed(torch.tensor(text)), 0, model.num_layers, KVCache(model, len(text)))


def _takes_the_likeliest(model: LayerSkipModel, text: list[int], name: str) -> None:
    """Or, in float32, a token that is nearly as likely."""
    logits = model.logits(states_of(model, [*TEXT, *text])[len(TEXT) - 1 : -1])
    behind = logits.amax(dim=-1) - logits.gather(-1, torch.tensor(text).unsqueeze(-1)).squeeze(-1)
    assert float(behind.max()) <= (0.0 if logits.dtype == torch.float64 else 0.03), name


def described(model: LayerSkipModel, numbers: bool) -> dict[str, Any]:
    """Its matrices, as they are stored and what they stand for, hidden states and a text; arrays, for a pipe."""
    found: dict[str, Any] = {"bytes": (model.layer_bytes, model.head_bytes), "weights": {}}
    for index, layer in enumerate(model._layers if numbers else []):
        for kind in KINDS:
            linear: Any = getattr(layer, kind)
            found["weights"][index, kind] = type(linear).__name__, linear.weight.numpy()
    if numbers:
        head: Any = model._head
        found["weights"]["head"] = type(head).__name__, head.weight.numpy()
    found["states"] = states_of(model, TEXT).numpy()
    options: dict[str, Any] = {"max_new_tokens": 12, "policy": "ls:1-2", "eos_token_id": []}
    found["text"] = SelfSpecGenerator(model).generate(TEXT, **options).new_tokens
    return found


Asked = Sequence[tuple[Path, str, bool]]
"""Checkpoints, the dtype to load each in, and whether its matrices and bytes are compared."""


def _on_a_rank(asked: Asked) -> list[dict[str, Any]]:
    found = []
    for path, dtype, numbers in asked:
        model = load_shard(path, dtype=dtype, device="cpu")
        found.append({**described(model, numbers), "plan": model.vocabulary.plan})
    return found


def rows_of(plan: ShardPlan, kind: str) -> list[int]:
    """Which rows of the whole, fused matrix are a rank's; of an output or down projection, which columns."""
    config: Any = plan.config
    query, keys = plan.heads.times(plan.head_dim), plan.kv_heads.times(plan.head_dim)
    queries, all_keys = config.num_attention_heads * plan.head_dim, config.num_key_value_heads * plan.head_dim
    parts = {
        "qkv": (query, keys.after(queries), keys.after(queries + all_keys)),
        "gate_up": (plan.inner, plan.inner.after(config.intermediate_size)),
        "output": (query,),
        "down": (plan.inner,),
        "head": (plan.vocab,),
    }[kind]
    return [row for part in parts for row in range(part.start, part.stop)]


def check_same(asked: Asked, ranks: int = 2) -> None:
    """Each rank's numbers are some of those of one process; states and texts are the same, bytes its share."""
    divided = results_of(ranks, _on_a_rank, asked)
    for index, (path, dtype, numbers) in enumerate(asked):
        model = load_model(path, dtype=dtype, device="cpu")
        alone = described(model, numbers)
        name = f"{path.name} {dtype}"
        for rank in divided:
            found = rank[index]
            for place, (layout, weight) in found["weights"].items():
                kind = place if isinstance(place, str) else place[1]
                one, own = alone["weights"][place], rows_of(found["plan"], kind)
                assert layout == one[0], (name, place)
                expected = one[1][:, own] if kind in ("output", "down") else one[1][own]
                assert np.array_equal(weight, expected), (name, place)
            _same_states(found["states"], alone["states"], name)
            _takes_the_likeliest(model, found["text"], name)
        for kind, norms in enumerate((2 * 256, 256) if ranks == 2 and numbers else ()):
            most = max(rank[index]["bytes"][kind] for rank in divided) - norms
            # at most 128 of 192 inner inputs are on one rank, 14 of 27 tokens
            assert most <= (alone["bytes"][kind] - norms) / 2 * 1.34, name


def _same_states(found: NDArray[Any], expected: NDArray[Any], name: str) -> None:
    """But for rounding: inputs of 4-bit matrices are cut to 16 bits of the largest one that a process has."""
    apart = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert apart.max() < (1e-12 if expected.dtype == np.float64 else 1e-3), name


@needs_native
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rounding_gives_the_numbers_of_one_process(number: int, tmp_path: Path) -> None:
    """Outputs whose largest weight another rank has, outputs of unusual size, and widths that only 8 bits hold."""
    model = llama(attention_bias=True, head_dim=64, intermediate_size=320)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.mlp.up_proj):
                linear.weight[3 + index] *= 1e-9
                linear.weight[9, -1] = 5.0
    model.save_pretrained(tmp_path / "wide")
    llama(intermediate_size=96, dtype=torch.bfloat16).save_pretrained(tmp_path / "narrow")
    asked = [(tmp_path / "wide", dtype, True) for dtype in ("int8", "int4")]
    if number == 2:
        asked += [(tmp_path / "narrow", dtype, True) for dtype in ("int8", "int4")]
    check_same(asked, number)


FILES: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq", "group_size": 32, "symmetric": False},
    "gptq-reordered": {"method": "gptq", "group_size": 32, "shuffled": True, "version": "gptq_v2"},
    "pack-asymmetric": {
        "method": "pack-quantized",
        "group_size": 64,
        "symmetric": False,
        "scale_dtype": torch.bfloat16,
    },
    "pack-row": {"method": "pack-quantized", "group_size": None, "scale_dtype": torch.float32},
    "pack-float32": {"method": "pack-quantized", "group_size": 64, "scale_dtype": torch.float32},  # not kept in 4 bits
    "pack-reordered-8": {"method": "pack-quantized", "group_size": 16, "shuffled": True, "bits": 8},
    "int-8": {"method": "int-quantized", "group_size": None, "symmetric": False, "bits": 8},
}
SOME = ["gptq", "pack-float32", "int-8"]


@needs_native
@pytest.mark.parametrize("names", [SOME, pytest.param([*FILES], marks=pytest.mark.slow)])
def test_what_others_quantised(names: list[str], tmp_path: Path) -> None:
    """4 bits keep the file's numbers, all else is rounded as in one process; float64 says the same texts."""
    asked: list[tuple[Path, str, bool]] = []
    for name in names:
        quantise_checkpoint(llama(num_layers=2), tmp_path / name, **FILES[name])
        asked += [(tmp_path / name, dtype, dtype == "auto") for dtype in ("auto", "float64")]
    check_same([*asked, (tmp_path / "pack-float32", "int4", True), (tmp_path / "gptq", "int8", True)])


@needs_native
def test_a_quantised_head(tmp_path: Path) -> None:
    """Is the same matrix for one process as for several."""
    quantise_checkpoint(llama(), tmp_path, "gptq", group_size=32, head=True)
    check_same([(tmp_path, "auto", True)])


def test_zero_points_between_which_a_cut_falls(tmp_path: Path) -> None:
    """8 of them are in a word, and a rank's heads, or its part of fused projections, begin in the middle of one."""
    asked = []
    for kind, method in (("llama", "gptq"), ("llama", "pack-quantized"), ("phi3", "pack-quantized")):
        model: Any = llama(head_dim=6, kv_heads=4, intermediate_size=40)
        if kind == "phi3":
            model = next(one for one in (reference(kind, seed) for seed in range(9)) if _divisible(one.config)).float()
        path = tmp_path / f"{kind}-{method}"
        quantise_checkpoint(model, path, method, symmetric=False)
        asked.append((path, "float64", False))
    check_same(asked)


@needs_native
def test_gguf_files(tmp_path: Path) -> None:
    """Whose queries and keys are in another order; cut within blocks of 8 bits, and of 256 inputs."""
    pytest.importorskip("gguf")
    from bench.engines.gguf_file import write_gguf

    asked: list[tuple[Path, str, bool]] = []
    for kind, inner in (("Q4_0", 192), ("Q4_1", 192), ("Q8_0", 160), ("F16", 160), ("Q4_K_M", 1024), ("Q4_K_M", 768)):
        path = tmp_path / f"{kind}-{inner}.gguf"
        sizes = {"hidden_size": 256, "head_dim": 64} if kind == "Q4_K_M" else {}
        model = llama(num_layers=2, tie_word_embeddings=kind == "Q4_1", intermediate_size=inner, **sizes)
        write_gguf(model, path, kind)
        asked += [(path, "auto", kind != "F16" and inner != 768), (path, "float64", False)]
    check_same(asked)


def _refused(path: Path) -> str:
    load_shard(path, dtype="int4", device="cpu")
    return "never"


def test_what_cannot_be_cut_between_groups_is_said(tmp_path: Path) -> None:
    llama(head_dim=16).save_pretrained(tmp_path)
    for one in on_ranks(4, _refused, tmp_path):
        assert isinstance(one, RankFailed)
        assert "over 4 processes between groups of 64 inputs, as weights of 4 bits must be: take 1\n" in str(one)
