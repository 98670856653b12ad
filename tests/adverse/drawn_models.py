"""The random models that generated calls are tried on, beside transformers' models of the same weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fuzz_models import draw_config, random_model, word_tokenizer
from layerskip_models import from_transformers
from layerskip_models.draft_weights import DRAFT_BITS, why_no_drafter
from layerskip_models.exits import FORMS
from layerskip_models.families import FAMILIES
from layerskip_models.linear import Layout
from random_adapters import adapted
from selfspec import SelfSpecGenerator

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


def _words(vocab_size: int) -> list[str]:
    """Short ones first, so that stop strings span tokens and end inside them."""
    words: list[str] = []
    for size in (1, 2, 3):
        words += ["".join(letters) for letters in product(_ALPHABET, repeat=size)][: vocab_size - len(words)]
    return words
