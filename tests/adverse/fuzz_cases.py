"""What fuzzed calls are tried on and ask for: random models, prompts, policies, settings, stops, processors and criteria."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

from callbacks import Spoiling, StopAt
from fuzz_models import CONTEXT, draw_config, random_model, word_tokenizer
from layerskip_models.draft_weights import DRAFT_BITS, why_no_drafter
from layerskip_models.exits import FORMS
from layerskip_models.families import FAMILIES
from layerskip_models.linear import Layout
from looped_models import converted
from random_adapters import adapted
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator


@dataclass(frozen=True, slots=True)
class Case:
    """One call. stop: a stop to be taken from the model's own text, so that it is met, ("eos" or "string", where)."""

    prompt: list[int]
    policy: str
    options: dict[str, Any]
    stop: tuple[str, int] | None
    processors: list[tuple[str, int]] = field(default_factory=list)
    criteria: list[tuple[str, int]] = field(default_factory=list)
    sample_seed: int | None = None

    @property
    def masks_by_text(self) -> bool:
        """Whether the text so far decides which tokens are masked: then it may be that some sampled texts end in an error, in
        which every token is masked, and others do not."""
        return bool(self.processors) or not {"no_repeat_ngram_size", "bad_words_ids"}.isdisjoint(self.options)

    def config(self, **more: Any) -> GenerationConfig:
        """The settings; greedy, unless the case samples."""
        return GenerationConfig(do_sample=self.sample_seed is not None, pad_token_id=0, **{**self.options, **more})

    def arguments(self, model: FuzzModel) -> dict[str, Any]:
        """Of the engine, but for the prompt. Policies, processors and criteria are made afresh."""
        seeded = {} if self.sample_seed is None else {"seed": self.sample_seed}
        policy = named_policy(self.policy, 1, model.engine.model)
        return {"generation_config": self.config(), "policy": policy, **seeded, **self.lists()}

    def lists(self) -> dict[str, Any]:
        """Fresh processors and criteria of our own."""
        return {
            "logits_processor": LogitsProcessorList([PROCESSORS[name](at) for name, at in self.processors]),
            "stopping_criteria": StoppingCriteriaList([CRITERIA[name](at) for name, at in self.criteria]),
        }


class _Own(LogitsProcessor):
    def __init__(self, at: int, change: Callable[[list[int], Tensor, int], Tensor]) -> None:
        self.at, self.change = at, change

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.change(input_ids[0].tolist(), scores, self.at)


def _shift(text: list[int], scores: Tensor, at: int) -> Tensor:
    favoured = (sum(text) + torch.arange(scores.shape[-1])) % 5 == at % 5
    return torch.where(favoured, scores + 1.5, scores)


def _ban(text: list[int], scores: Tensor, at: int) -> Tensor:
    banned = (text[-1] + torch.arange(scores.shape[-1])) % 3 == at % 3
    return scores.masked_fill(banned, -torch.inf)


def _infinite(text: list[int], scores: Tensor, at: int) -> Tensor:
    if len(text) != at:
        return scores
    return scores.index_fill(-1, torch.tensor([at % scores.shape[-1]]), torch.inf)


def _raise_at(text: list[int], scores: Tensor, at: int) -> Tensor:
    if text[-1] == at % scores.shape[-1]:
        raise LookupError(f"no state behind token {text[-1]}")
    return scores


class _AtSum(StopAt):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([int(input_ids.sum()) % 7 == self.length % 7])


PROCESSORS: dict[str, Callable[[int], LogitsProcessor]] = {
    "shift": partial(_Own, change=_shift),
    "ban": partial(_Own, change=_ban),
    "mask all": partial(Spoiling, how="masked"),
    "infinite": partial(_Own, change=_infinite),
    "raise": Spoiling,
    "raise at": partial(_Own, change=_raise_at),
}
CRITERIA = {"at length": StopAt, "at sum": _AtSum}


def make_case(random: Random, model: FuzzModel) -> Case:
    vocab_size = model.vocab_size
    tokens = lambda most: [random.randrange(vocab_size) for _ in range(random.randint(1, most))]  # noqa: E731
    prompt = tokens(random.choice([3, 14, 40]))
    if random.random() < 0.3:
        prompt = (prompt[:4] * 12)[: random.randint(1, 40)]
    room = CONTEXT - len(prompt)
    budget = min(random.choice([random.randint(1, 6), random.randint(4, 20), random.randint(10, 30)]), room)
    options: dict[str, Any] = {"max_new_tokens": budget}
    if random.random() < 0.25:
        options = {"max_length": len(prompt) + budget}
    if random.random() < 0.6:
        options |= processing_options(random, vocab_size, budget, prompt)
    end = len(prompt) + random.randint(1, 16)
    processors: list[tuple[str, int]] = []
    if random.random() < 0.3:
        name = random.choice([*PROCESSORS, "shift", "ban", "shift"])
        processors.append((name, end if name in ("mask all", "infinite", "raise") else random.randrange(100)))
    criteria: list[tuple[str, int]] = []
    if random.random() < 0.3:
        criteria.append(("at sum", random.randrange(7)) if random.random() < 0.5 else ("at length", end))
    stop = None
    if random.random() < 0.45:
        stop = (random.choice(["eos", "string"]), random.randint(0, 12))
    sample_seed = None
    if random.random() < 0.12:
        sample_seed = random.randrange(1000)
        options |= {"temperature": random.choice([0.5, 1.0, 1.7]), "top_k": random.choice([0, 2, 5])}
        options |= {"top_p": 0.9} if random.random() < 0.3 else {}
    policy = _policy(random, model.num_layers, model.draft_bits)
    if model.engine.model.num_loops > 1 and random.random() < 0.4:
        policy = f"wave:loop={random.randint(1, model.engine.model.num_loops - 1)}"
    return Case(prompt, policy, options, stop, processors, criteria, sample_seed)


def processing_options(random: Random, vocab_size: int, budget: int, prompt: list[int]) -> dict[str, Any]:
    """Fields of GenerationConfig that change greedy decoding, one to three of them."""
    token = lambda: random.randrange(vocab_size)  # noqa: E731
    some = lambda most: sorted({token() for _ in range(random.randint(1, most))})  # noqa: E731
    eos = some(2)
    choices: list[dict[str, Any]] = [
        {"repetition_penalty": random.choice([0.5, 0.7, 1.2, 2.0, 10.0])},
        {"no_repeat_ngram_size": random.randint(1, 4)},
        {"min_new_tokens": random.randint(1, budget), "eos_token_id": eos},
        {"min_length": random.randint(1, len(prompt) + budget), "eos_token_id": eos},
        {"bad_words_ids": [[token() for _ in range(random.randint(1, 3))] for _ in range(random.randint(1, 3))]},
        {"suppress_tokens": some(4)},
        {"begin_suppress_tokens": some(4)},
        {"sequence_bias": [[[token() for _ in range(random.randint(1, 2))], random.choice([-3.0, 2.0, 5.0])]]},
        {
            "exponential_decay_length_penalty": (random.randint(0, 5), random.choice([1.05, 1.3, 3.0])),
            "eos_token_id": eos,
        },
        {"forced_eos_token_id": token()},
        {"forced_bos_token_id": token()},
        {"remove_invalid_values": True},
        {"renormalize_logits": True},
        {"eos_token_id": eos},
        {"eos_token_id": token()},
        {"temperature": 0.5, "top_k": 3},  # greedy decoding ignores both
    ]
    drawn: dict[str, Any] = {}
    for chosen in random.sample(choices, random.randint(1, 3)):
        drawn |= chosen
    return drawn


def _policy(random: Random, num_layers: int, draft_bits: Sequence[int]) -> str:
    """A policy's name with random arguments. draft_bits: those that the model can draft in."""
    exit_layer = random.randint(1, num_layers - 1)
    length = random.choice([0, 1, 2, 3, 4, 6, 9, 20])
    if draft_bits and random.random() < 0.15:
        depth, rule = random.choice(["", ",layer={E}"]), random.choice(["", "+svip:threshold=1"])
        names = [f"bits:{random.choice(draft_bits)}-{max(length, 1)}{depth}{rule}"]
    else:
        names = ["ar", f"ls:{{E}}-{length}", f"fs:{{E}}-{max(length, 1)}", f"copy:{max(length, 1)}", *EVERY_POLICY]
    return random.choice(names).format(E=exit_layer)


def quiet() -> None:
    """Without transformers' remarks on settings that contradict each other, which is what fuzzing is for."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


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


DTYPES = (torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
VOCAB_SIZES = (2, 3, 7, 16, 24, 24, 31, 50, 64, 97, 128, 257)


def make_model(
    random: Random,
    dtypes: Sequence[torch.dtype] = DTYPES,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    families: Iterable[str] = FAMILIES,
) -> FuzzModel:
    """Draw a model. The same state of `random` gives the same weights; layouts depend on what the machine has."""
    vocab_size, dtype = random.choice(vocab_sizes), random.choice(dtypes)
    kind = random.choice(["llama", "llama", *families])
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
    model = converted(source, layout)
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
