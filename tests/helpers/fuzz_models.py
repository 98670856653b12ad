"""Random tiny models for the fuzz command: every family and shape that the engine supports, asked in milliseconds each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from layerskip_models import from_transformers
from layerskip_models.draft_weights import DRAFT_BITS, why_no_drafter
from layerskip_models.exits.adapter import FORMS
from layerskip_models.families import FAMILIES, family_of
from layerskip_models.linear import Layout
from random_adapters import adapted
from selfspec import SelfSpecGenerator

CONTEXT = 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
_ALPHABET = "abcdefghijkl .,\n"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FuzzModel:
    """A model as transformers runs it and as the engine does.

    dtype: that of the engine's weights. reference: transformers' model of the same weights, in float64 or float32.
    bitwise: whether any way of drafting must give the same bits as plain decoding (our own kernels).
    draft_bits: in which its weights can draft beside themselves.
    """

    about: str
    dtype: torch.dtype
    reference: PreTrainedModel
    engine: SelfSpecGenerator
    tokenizer: PreTrainedTokenizerFast
    bitwise: bool
    draft_bits: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.engine.model.num_layers

    @property
    def vocab_size(self) -> int:
        return self.engine.model.vocab_size


def draw_config(random: Random, kind: str, vocab_size: int) -> PreTrainedConfig:
    """A configuration of one family, by model_type, with heads, biases, windows and rotary embeddings as it has them."""
    heads, kv_heads = random.choice([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (6, 3), (6, 2), (8, 2), (5, 5)])
    head_dim = random.choice([2, 4, 6, 8, 16])
    biases = {"attention_bias": random.random() < 0.3, "mlp_bias": random.random() < 0.3}
    window = random.choice([2, 5, 9, 20])  # of a window of 1 transformers' own cache keeps more than that
    rope = dict(random.choice(list(ROPES.values())))
    own: dict[str, Any] = {"rope_parameters": rope}
    if kind in ("llama", "smollm3"):
        own |= biases
    if kind in ("qwen3", "olmo2"):
        own["attention_bias"] = biases["attention_bias"]
    if kind in ("llama", "mistral", "qwen3"):  # whose heads together need not be as wide as the hidden state
        own["head_dim"], hidden_size = head_dim, heads * random.choice([1, 2, 4, 6, 8, 11, 16])
    else:
        hidden_size = heads * head_dim
    if kind == "mistral":
        own["sliding_window"] = random.choice([None, window])
    if kind in ("qwen2", "qwen3"):
        own |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window, "max_window_layers": 1}
    if kind == "smollm3":
        own |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window, "no_rope_layer_interval": 2}
    if kind == "phi3":
        own |= {"sliding_window": random.choice([None, window]), "rope_parameters": _phi3_rope(random, head_dim)}
    return FAMILIES[kind].config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=random.choice([5, 12, 20, 32, 67]),
        num_hidden_layers=random.choice([2, 2, 3, 4, 4, 5, 6, 8]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=random.random() < 0.5,
        rms_norm_eps=random.choice([1e-6, 1e-5, 1e-3]),
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **own,
    )


def _phi3_rope(random: Random, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    rope["partial_rotary_factor"] = random.choice([1.0, 0.5]) if head_dim % 4 == 0 else 1.0
    if random.random() < 0.3:
        pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": CONTEXT, "factor": 4.0}
        rope |= {"short_factor": [1.0 + 0.5 * i for i in range(pairs)], "long_factor": [9.0] * pairs}
    return rope


def make_model(random: Random) -> FuzzModel:
    """Draw a model. The same state of `random` gives the same weights; layouts depend on what the machine has."""
    vocab_size = random.choice([2, 3, 7, 16, 24, 24, 31, 50, 64, 97, 128, 257])
    dtype = random.choice([torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    kind = random.choice(["llama", "llama", *FAMILIES])
    config = draw_config(random, kind, vocab_size)
    late_scale = random.choice([0.1, 0.2, 0.5, 0.9, 1.5])
    sharpness = random.choice([0.5, 1.5, 3.0])
    reference = random_model(config, late_scale=late_scale, sharpness=sharpness, seed=random.randrange(1 << 30))
    own = reference.to(dtype)  # in place
    source = own if dtype in (torch.float64, torch.float32) else copy.deepcopy(own)
    reference = own if source is own else own.float()
    layout: Layout | None = None
    if dtype not in (torch.bfloat16, torch.float16):
        if dtype == torch.float32 and random.random() < 0.3:  # as a checkpoint in bfloat16 that is run in float32
            for parameter in reference.parameters():
                parameter.data = parameter.data.bfloat16().to(dtype)
        layout = random.choice(["plain", None])
    model = from_transformers(source, layout=layout)
    exits = [layer for layer in range(1, model.num_layers) if random.random() < 0.25]
    form = random.choice(FORMS)
    model = adapted(model, exits, seed=random.randrange(1 << 30), form=form)
    engine = SelfSpecGenerator(model, tokenizer := word_tokenizer(_words(vocab_size)))
    native = engine.model.kernels is not None
    return FuzzModel(
        about=f"{config.model_type}, {engine.model.num_layers} layers, {config.num_attention_heads}/"
        f"{config.num_key_value_heads} heads of {engine.model.head_dim}, hidden {config.hidden_size}, vocabulary "
        f"{vocab_size}, {config.rope_parameters['rope_type']} rope, {str(dtype).removeprefix('torch.')}, "
        f"{layout or 'its own layout'}, {form} adapters at {exits or 'no exit'}",
        dtype=dtype,
        reference=reference,
        engine=engine,
        tokenizer=tokenizer,
        bitwise=native,
        draft_bits=tuple(bits for bits in DRAFT_BITS if why_no_drafter(engine.model, bits) is None),
    )


def random_model(config: PreTrainedConfig, *, late_scale: float, sharpness: float, seed: int) -> PreTrainedModel:
    """Random weights in float64, so that every dtype can be given the same, in evaluation mode.

    late_scale: of what the first layer adds to the residual stream every later one adds so much: the smaller, the more often
        an early exit says what the last layer says. (The first layer's part is large: the text would be one token else.)
    sharpness: standard deviation of a matrix's weights times the root of its columns.
    """
    family = family_of(config)
    model = family.model(config).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1:  # a bias
                parameter.normal_(0.0, 0.2, generator=generator)
            else:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, sharpness * scale, generator=generator)
        for index, layer in enumerate(model.model.layers):
            scale = 3.0 if index == 0 else late_scale
            for last, norm in ((layer.self_attn.o_proj, family.output_norm), (layer.mlp.down_proj, family.down_norm)):
                (last if norm is None else getattr(layer, norm)).weight.mul_(scale)
    return model


def _words(vocab_size: int) -> list[str]:
    """Short ones first, so that stop strings span tokens and end inside them."""
    words: list[str] = []
    for size in (1, 2, 3):
        words += ["".join(letters) for letters in product(_ALPHABET, repeat=size)][: vocab_size - len(words)]
    return words


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word, pieces joined without anything between them; no special tokens."""
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
