"""Every check of what a user may pass to `generate`, and the translation into what the engine runs on.

Names and defaults are transformers' GenerationConfig's, and its own code merges them (call over config over checkpoint),
builds the logits processors and the stopping criteria.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.logits_process import DiaEOSDelayPatternLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria

from layerskip_models.families import family_of
from selfspec.cache.copy_index import CopyStore
from selfspec.cache.prefix_cache import ANYONE, Owner
from selfspec.engine.stopping import StopConditions
from selfspec.messages import are_messages, encode_messages

DEFAULT_MAX_NEW_TOKENS = 128
"""Where neither the call nor a configuration says how long (transformers would stop at 20 tokens in all)."""

COLDEST = 1e-20
"""Below this temperature the argmax is taken, the limit of sampling: logits divided by less would not be finite numbers."""

_REFUSED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1, 1.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""GenerationConfig fields that do not apply to this engine, with the values that leave them off."""


_COUNTS_ITS_CALLS: dict[type, str] = {
    SynthIDTextWatermarkLogitsProcessor: "a SynthID watermark",
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "classifier-free guidance",
    DiaEOSDelayPatternLogitsProcessor: "Dia's delay of the last token",
}
"""Processors of transformers whose result depends on the calls before, which drafts change."""

_ANY_CONFIG = GenerationConfig()
_MEANT = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "input_ids": "prompt",
    "inputs": "prompt",
    "text": "prompt",
    "assistant_early_exit": "exit_layer",
}
"""What other libraries call these arguments."""


class GenerationHost(GenerationMixin):
    """Lets transformers' own code prepare a call without a transformers model in memory."""

    def __init__(self, config: PreTrainedConfig, generation_config: GenerationConfig, device: torch.device) -> None:
        self.config = config
        self.generation_config = generation_config
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where processors keep their tensors."""
        return self._device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One checked call: prompt ids (int64 [n]), processors, stop conditions, and the generator when sampling.

    copy_from: texts to copy from beside the prompt and what was written, for policies that copy.
    watch_prompt: called with (position of the first row, hidden states [rows, hidden] of the last layer) for every row of the
    prompt, in order. None of them is then taken from an earlier text.
    shares_generator: whether others may draw from the generator as well, because the caller gave it.
    owner: whose texts a prompt may go on from.
    """

    prompt: Tensor
    processors: LogitsProcessorList
    stops: StopConditions
    generator: torch.Generator | None
    copy_from: CopyStore | None = None
    owner: Owner = ANYONE
    watch_prompt: Callable[[int, Tensor], None] | None = None
    shares_generator: bool = True


def encode_prompt(prompt: object, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Tensor:
    """A prompt in any accepted form as int64 ids [n] on the CPU.

    prompt: text (needs a tokenizer, which adds its special tokens), messages (need its chat template), a list of ids, or an
    integer tensor [n] or [1, n].
    Raises ValueError when it is empty, of another shape, or holds an id outside the vocabulary; TypeError for other types.
    """
    encoded = isinstance(prompt, str) or are_messages(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: pass one to SelfSpecGenerator, or give token ids")
        prompt = list(tokenizer(prompt)["input_ids"])
    elif are_messages(prompt):
        prompt = encode_messages(prompt, tokenizer)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(p, str) for p in prompt):
        raise TypeError(f"got a list of {len(prompt)} texts: one text is decoded at a time, call generate for each")
    if isinstance(prompt, Tensor):
        if prompt.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"prompt ids must be integers, got a tensor of {prompt.dtype}")
        ids = prompt.detach().to("cpu", torch.long, copy=True)  # the caller may write to theirs while a call runs
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1:
            raise ValueError(
                f"prompt ids must have shape [n] or [1, n], got {list(prompt.shape)}: "
                "one text is decoded at a time, call generate for each row"
            )
    elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = torch.tensor(list(prompt), dtype=torch.long, device="cpu")
    else:
        raise TypeError(
            f"prompt must be text, a list of token ids or an integer tensor, got {_describe(prompt)}; "
            "of a tokenizer's output pass ['input_ids']"
        )
    if ids.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token to continue")
    check_ids(ids, vocab_size, from_tokenizer=encoded)
    return ids


def check_ids(ids: Tensor, vocab_size: int, *, from_tokenizer: bool) -> None:
    """Raise ValueError for a token id that the model does not have, which would end every text that shares its passes."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        source, hint = ("the tokenizer's", ": is it this model's tokenizer?") if from_tokenizer else ("prompt", "")
        raise ValueError(f"{source} ids must be in [0, {vocab_size - 1}], the model's vocabulary, got {wrong}{hint}")


def _describe(prompt: object) -> str:
    """The type of a prompt, and of a list the type of its first item that is no token id."""
    if isinstance(prompt, (list, tuple)):
        wrong = next((item for item in prompt if not isinstance(item, int) or isinstance(item, bool)), None)
        return f"a {type(prompt).__name__} that holds a {type(wrong).__name__}"
    return type(prompt).__name__


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise for keyword arguments that `generate` does not have, if there are any.

    Raises ValueError for a field of GenerationConfig that does not apply here, TypeError for any other name, with the
    argument that is meant if one is close.
    """
    known = [name for name in known if name != "unknown"]
    for name in names:
        if name in _REFUSED:
            raise ValueError(f"{name} does not apply to self-speculative decoding of one sequence: leave it out")
        if hasattr(_ANY_CONFIG, name):
            raise TypeError(
                f"generate() has no argument {name!r}: set it in a GenerationConfig and pass that as generation_config"
            )
        meant = _MEANT.get(name) or next(iter(get_close_matches(name, known, 1)), None)
        hint = f": did you mean {meant}?" if meant else f"; it takes {', '.join(known)}"
        raise TypeError(f"generate() has no argument {name!r}{hint}")


def refuse_fields(config: GenerationConfig, allowed: Container[str] = ()) -> None:
    """Raise ValueError for a configuration that sets a field which does not apply to this engine."""
    for name, neutral in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in neutral and name not in allowed:
            raise ValueError(
                f"{name}={value!r} does not apply to self-speculative decoding of one sequence: leave it unset"
            )


def refuse_processors(processors: Iterable[object]) -> None:
    """Raise ValueError for a logits processor that is no pure function of text and scores, as far as we know."""
    for processor in processors:
        for kind, called in _COUNTS_ITS_CALLS.items():
            if isinstance(processor, kind):
                raise ValueError(
                    f"{called} keeps a state that its every call changes ({kind.__name__}), and drafts call it more often "
                    "than plain decoding does: leave it out, or decode with transformers' own generate"
                )


class ContextLengthError(ValueError):
    """A prompt and its new tokens are longer than the model's context. The message says by how much."""

    def __init__(self, num_prompt: int, max_new_tokens: int, context: int) -> None:
        total = num_prompt + max_new_tokens
        super().__init__(
            f"prompt ({num_prompt}) + max_new_tokens ({max_new_tokens}) = {total} tokens exceed this model's context "
            f"of {context} by {total - context}: shorten the prompt or lower max_new_tokens"
        )
        self.num_prompt, self.max_new_tokens, self.context = num_prompt, max_new_tokens, context


def check_context(num_prompt: int, max_new_tokens: int, context: int) -> None:
    """Raise ContextLengthError where a prompt and all its new tokens are longer than the model's context."""
    if num_prompt + max_new_tokens > context:
        raise ContextLengthError(num_prompt, max_new_tokens, context)


def make_generator(
    seed: int | None, generator: torch.Generator | None, device: torch.device, do_sample: bool
) -> torch.Generator | None:
    """The source of randomness of one call: the given generator, one seeded by `seed`, or a freshly seeded one.

    None when greedy. Raises ValueError if both are given or the generator is on another device.
    """
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both")
    if not do_sample:
        return None
    if generator is not None:
        if generator.device.type != device.type:
            raise ValueError(f"the generator is on {generator.device}, the model on {device}: make it there")
        return generator
    fresh = torch.Generator(device=device)
    if seed is None:
        fresh.seed()
    else:
        fresh.manual_seed(seed)
    return fresh


def make_request(
    *,
    host: GenerationHost,
    prompt: object,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    seed: int | None,
    generator: torch.Generator | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
) -> Request:
    """Check one call and turn it into what the engine needs.

    options: GenerationConfig fields given by the caller; those that are None were not given.
    Raises ValueError (TypeError for a wrong type) that names the argument, its range and the remedy.
    """
    options = {name: value for name, value in options.items() if value is not None}
    _check_options(options)
    never_stops = isinstance(options.get("eos_token_id"), (list, tuple)) and not options["eos_token_id"]
    if never_stops:
        del options["eos_token_id"]
    given = (generation_config, host.generation_config)
    has_length = "max_new_tokens" in options or any(
        c is not None and (c.max_length is not None or c.max_new_tokens is not None) for c in given
    )
    config, _ = host._prepare_generation_config(generation_config)
    config.update(**options)
    if config.do_sample and config.temperature is not None and 0 <= config.temperature < COLDEST:
        config.do_sample, config.temperature = False, 1.0
    if never_stops:
        config.eos_token_id = None
    refuse_fields(config)

    context, vocab_size = family_of(host.config).max_positions(host.config), host.config.vocab_size
    ids = encode_prompt(prompt, tokenizer, vocab_size)
    num_prompt = ids.numel()
    if not has_length:
        config.max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, context - num_prompt))
    elif config.max_new_tokens is None:
        config.max_new_tokens = config.max_length - num_prompt
        if config.max_new_tokens < 1:
            raise ValueError(
                f"max_length={config.max_length} leaves no room behind a prompt of {num_prompt} tokens: "
                "raise it, or set max_new_tokens"
            )
    check_context(num_prompt, config.max_new_tokens, context)
    config.max_length = num_prompt + config.max_new_tokens
    if config.min_new_tokens is not None:  # in transformers it takes precedence over min_length
        config.min_length = num_prompt + config.min_new_tokens

    device = host.device
    sampler_source = make_generator(seed, generator, device, bool(config.do_sample))
    host._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device)
    processors = host._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=num_prompt,
        encoder_input_ids=ids.unsqueeze(0).to(device),
        logits_processor=LogitsProcessorList(logits_processor or []),
        device=str(device),
    )
    refuse_processors(processors)
    criteria = host._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
        tokenizer=tokenizer,
    )
    eos = frozenset(_as_list(None if never_stops else config.eos_token_id))
    own = (MaxLengthCriteria, EosTokenCriteria)  # ours are decided on the host, without a tensor per token
    criteria = StoppingCriteriaList([c for c in criteria if type(c) not in own or c in (stopping_criteria or [])])
    clocks = tuple(c for c in criteria if isinstance(c, MaxTimeCriteria) and c not in (stopping_criteria or []))
    stops = StopConditions(eos=eos, criteria=criteria, max_new_tokens=config.max_new_tokens, clocks=clocks)
    return Request(
        prompt=ids,
        processors=processors,
        stops=stops,
        generator=sampler_source,
        shares_generator=generator is not None,
    )


def _as_list(ids: int | Sequence[int] | Tensor | None) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    return [ids] if isinstance(ids, int) else [int(i) for i in ids]


def _check_options(options: dict[str, Any]) -> None:
    """Ranges of the numbers a caller gives directly."""

    def number(name: str, low: float, high: float, *, open_low: bool = False, integer: bool = False) -> None:
        value = options.get(name)
        if value is None:
            return
        kinds = (int,) if integer else (int, float)
        in_range = (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (low < value if open_low else low <= value)
            and value <= high
        )
        if not in_range:
            kind = "an integer" if integer else "a number"
            if high == float("inf"):
                allowed = f"above {low}" if open_low else f"of at least {low}"
            else:
                allowed = f"in {'(' if open_low else '['}{low}, {high}]"
            raise ValueError(f"{name} must be {kind} {allowed}, got {value!r}")

    number("max_new_tokens", 1, float("inf"), integer=True)
    number("temperature", 0, float("inf"))
    number("top_k", 0, float("inf"), integer=True)
    number("top_p", 0, 1, open_low=True)
    number("min_p", 0, 1)
    number("repetition_penalty", 0, float("inf"), open_low=True)
