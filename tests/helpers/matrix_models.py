"""The models of the exactness matrix: each family in each format of weights, as transformers and as the engine run it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import gguf_models
from fuzz_models import ROPES, looped_options, random_model, small_config
from layerskip_models import LayerSkipModel, draft_weights, load_model
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.kernels import library
from layerskip_models.kernels.check import native_works
from layerskip_models.linear import GROUP, keeps_eight_bits
from looped_models import LOOPED, converted
from random_adapters import adapted
from tiny_llama import VOCAB_SIZE

NONE = "none"
"""In place of a variant of the kernels: PyTorch's operators."""
VARIANTS = (*(library.runnable_variants() if native_works(torch.device("cpu"), torch.float32) else ()), NONE)
NUM_LAYERS, LOOPS = 4, 2

FLOATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GGUF = ("Q8_0", "Q4_0")  # of which the package `gguf` writes files of several families
K_QUANTS = ("Q4_K_M", "Q5_K", "Q6_K")
DRAFT_HEAD = "float32, drafts chosen by 8 bits"
WEIGHTS = (*FLOATS, DRAFT_HEAD, "int8", "int4", *GGUF, *K_QUANTS)


def exists(family: str, weights: str, variant: str) -> bool:
    """Whether files of the format hold the family, and the kernels run what is in them."""
    if weights in K_QUANTS:
        return family == "llama"
    if weights in GGUF and family not in gguf_models.KINDS:
        return False
    if weights == "float64":
        return variant == NONE
    return weights != DRAFT_HEAD or variant != NONE  # operators have one head for all


@contextmanager
def kernels_of(variant: str) -> Iterator[None]:
    """Within it models run with these kernels, or with none, and draft in fewer bits however little that gains."""
    chosen = None if variant == NONE else library.load(variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "kernels", lambda: chosen)
        patch.setattr(draft_weights, "_MOST_READ", 1.0)
        yield


def config_of(family: str, weights: str) -> Any:
    """Odd sizes where the format allows them, and what the family is known for: windows, biases, scaled positions."""
    plain_file = weights in (*GGUF, *K_QUANTS)  # whose metadata say nothing of windows and scaled positions
    hidden, heads, kv_heads, head_dim, intermediate = 64, 4, 2, 16, 128
    if weights in K_QUANTS:
        hidden, head_dim, intermediate = 256, 64, 256
    elif weights in FLOATS:
        heads, kv_heads, head_dim, intermediate = 6, 3, 4, 29
        hidden = 30 if family in ("llama", "mistral", "qwen3", *LOOPED) else heads * head_dim
    rope = {"llama": "llama3", "qwen2": "yarn", "mistral": "linear"}.get(family, "default")
    own: dict[str, Any] = {"rope_parameters": dict(ROPES["default" if plain_file else rope])}
    if family in ("llama", "mistral", "qwen3", *LOOPED):
        own["head_dim"] = head_dim
    if family in LOOPED:
        own |= looped_options(family, LOOPS) | {"rms_norm_eps": 1e-5}
    if family in ("llama", "smollm3") and not plain_file:
        own |= {"attention_bias": True, "mlp_bias": True}
    if family in ("mistral", "phi3"):
        own["sliding_window"] = 5
    if family in ("qwen2", "qwen3", "smollm3") and not plain_file:
        own |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    if family == "smollm3":
        own["no_rope_layer_interval"] = 2
    if family == "phi3":
        own["rope_parameters"]["partial_rotary_factor"] = 0.5
    own |= {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": family in ("qwen2", "olmo2") and weights in FLOATS}
    return small_config(
        family, hidden, intermediate, NUM_LAYERS // (LOOPS if family in LOOPED else 1), heads, kv_heads, **own
    )


@dataclass(frozen=True, eq=False)
class Source:
    """Weights of one family in one format. path: of their file, if they come from one.

    given: what transformers holds of them, if not. reference: the numbers that they stand for, in float64.
    """

    reference: PreTrainedModel
    given: PreTrainedModel | None = None
    path: Path | None = None


_FOLDER = tempfile.TemporaryDirectory(prefix="matrix")


@cache
def source_of(family: str, weights: str) -> Source:
    """Made once in a process."""
    model: Any = random_model(config_of(family, weights), late_scale=0.5, sharpness=1.5, seed=7)
    if weights in FLOATS:
        given = copy.deepcopy(model).to(FLOATS[weights])
        return Source(copy.deepcopy(given).double(), given)
    model = model.float()
    if weights in ("int8", "int4", DRAFT_HEAD):
        return Source(_rounded(model, weights).double(), model)
    path = Path(_FOLDER.name, f"{family} {weights}")
    path.mkdir()
    path /= "model.gguf"
    if weights in K_QUANTS:
        from bench.engines.gguf_file import write_gguf

        write_gguf(model, path, weights)
    else:
        contents = gguf_models.tensors(model, weights)
        gguf_models.write(path, family, gguf_models.metadata(model.config), contents)
    if family in LOOPED:
        gguf_models.round_to(model, weights)
        return Source(model.double(), path=path)
    return Source(load_transformers(path, dtype="float32", device="cpu").double(), path=path)


def _rounded(model: Any, weights: str) -> Any:
    """The same with the numbers that the layout keeps of each matrix."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or "embed" in name or weights == DRAFT_HEAD:
            continue
        layer = None if "layers." not in name else int(name.split("layers.")[1].split(".")[0])
        if weights == "int4" and not keeps_eight_bits(layer):
            parameter.data = round_to_four_bits(parameter.detach(), group=GROUP).values()
        else:
            steps = parameter.detach().abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter.detach() / steps).round() * steps
    return model


@cache
def model_of(family: str, weights: str, variant: str) -> LayerSkipModel:
    """As the engine runs it, with adapters at its third exit. To be made within `kernels_of` the variant."""
    source = source_of(family, weights)
    if source.path is not None:
        made = load_model(source.path, device="cpu")
    else:
        layout: Any = weights if weights in ("int8", "int4") else None
        assert source.given is not None
        with pytest.MonkeyPatch.context() as patch:
            if weights == DRAFT_HEAD:
                patch.setattr("layerskip_models.checkpoints.conversion.DRAFT_HEAD_BYTES", 0)
            made = converted(source.given, layout)
    assert made.kernels == (None if variant == NONE else variant)
    return adapted(made, [3])
