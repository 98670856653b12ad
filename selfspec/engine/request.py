"""Checks of what a user passes to `generate`, and its translation into what the engine runs on.

Names and defaults are those of transformers' GenerationConfig, which merges them: the call over the given configuration over
the checkpoint's. Logits processors and stopping criteria are transformers' own. Its code that chooses them takes a second to
import, so the usual ones are chosen here, and it is asked where any other field is set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.families.plain_config import PlainConfig
from selfspec.cache.copy_index import CopyStore
from selfspec.cache.prefix_cache import ANYONE, Owner
from selfspec.engine.stopping import StopConditions
from selfspec.messages import are_messages, check_characters, encode_messages
from selfspec.options import NAMES, check_ranges

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

DEFAULT_MAX_NEW_TOKENS = 128
"""Used when neither the call nor a configuration gives a length (transformers would stop at 20 tokens in all)."""

COLDEST = 1e-20
"""Below this temperature the most likely token is taken: logits divided by less would not be finite."""

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
"""GenerationConfig fields that do not apply to this engine, with the values that turn them off."""
_DOES_NOT_APPLY = "does not apply to self-speculative decoding of one sequence: leave it"

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


@cache
def config_fields() -> dict[str, Any]:
    """Return the fields of transformers' GenerationConfig, with what `generate` takes for those that nobody sets."""
    from transformers import GenerationConfig

    return {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}


@cache
def counts_its_calls() -> tuple[type, ...]:
    """Processors of transformers whose result depends on earlier calls. Drafting adds calls."""
    from transformers.generation import logits_process as theirs

    return (
        theirs.SynthIDTextWatermarkLogitsProcessor,
        theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor,
        theirs.DiaEOSDelayPatternLogitsProcessor,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One checked call: prompt ids (int64 [n]), processors, stop conditions, and the random generator when sampling.

    copy_from: further texts to copy drafts from, for policies that copy.
    owner: whose earlier texts a prompt may reuse.
    watch_prompt: called with (position of the first row, hidden states [rows, hidden] of the last layer) for all rows of the
        prompt, in order. No row is then taken from an earlier text.
    shares_generator: the caller gave the generator, so others may draw from it too.
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
    """Encode a prompt in any accepted form as int64 ids [n] on the CPU.

    prompt: text (needs a tokenizer, which adds its special tokens), messages (need its chat template), a list of ids, or an
    integer tensor [n] or [1, n].
    Raises ValueError when it is empty, of another shape, or holds an id outside the vocabulary; TypeError for other types.
    """
    encoded = isinstance(prompt, str) or are_messages(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: pass one to SelfSpecGenerator, or give token ids")
        check_characters(prompt, "the prompt")
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
        got = type(prompt).__name__
        if isinstance(prompt, Sequence):
            wrong = next((item for item in prompt if not isinstance(item, int) or isinstance(item, bool)), None)
            got = f"a {got} that holds a {type(wrong).__name__}"
        raise TypeError(
            f"prompt must be text, a list of token ids or an integer tensor, got {got}; "
            "of a tokenizer's output pass ['input_ids']"
        )
    if ids.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token to continue")
    check_ids(ids, vocab_size, from_tokenizer=encoded)
    return ids


def check_ids(ids: Tensor, vocab_size: int, *, from_tokenizer: bool) -> None:
    """Raise ValueError for a token id outside the vocabulary. It would break every sequence in the same batch."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        source, hint = ("the tokenizer's", ": is it this model's tokenizer?") if from_tokenizer else ("prompt", "")
        raise ValueError(f"{source} ids must be in [0, {vocab_size - 1}], the model's vocabulary, got {wrong}{hint}")


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise TypeError for an argument that is not among `GenerationOptions`, naming the one that is meant if one is close.

    Raises ValueError for a field of GenerationConfig that does not apply here.
    """
    for name in names:
        if name in NAMES:
            continue
        if name in _REFUSED:
            raise ValueError(f"{name} {_DOES_NOT_APPLY} out")
        if name in config_fields():
            raise TypeError(
                f"generate() has no argument {name!r}: set it in a GenerationConfig and pass that as generation_config"
            )
        known = [other for other in ("prompt", "messages", *NAMES, "streamer") if other != name]
        meant = _MEANT.get(name) or next(iter(get_close_matches(name, known, 1)), None)
        hint = f": did you mean {meant}?" if meant else f"; it takes {', '.join(known)}"
        raise TypeError(f"generate() has no argument {name!r}{hint}")


def refuse_fields(config: GenerationConfig, allowed: Container[str] = ()) -> None:
    """Raise ValueError if a configuration sets a field that does not apply to this engine."""
    for name, neutral in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in neutral and name not in allowed:
            raise ValueError(f"{name}={value!r} {_DOES_NOT_APPLY} unset")


def refuse_processors(processors: Iterable[object]) -> None:
    """Raise ValueError for a logits processor known not to be a pure function of text and scores."""
    for processor in processors:
        if isinstance(processor, counts_its_calls()):
            raise ValueError(
                f"{type(processor).__name__} keeps a state that its every call changes, and drafts call it more often than "
                "plain decoding does: leave it out, or decode with transformers' own generate"
            )


class ContextLengthError(ValueError):
    """A prompt and its new tokens exceed the model's context. The message says by how much."""

    def __init__(self, num_prompt: int, max_new_tokens: int, context: int) -> None:
        total = num_prompt + max_new_tokens
        super().__init__(
            f"prompt ({num_prompt}) + max_new_tokens ({max_new_tokens}) = {total} tokens exceed this model's context "
            f"of {context} by {total - context}: shorten the prompt or lower max_new_tokens"
        )
        self.num_prompt, self.max_new_tokens, self.context = num_prompt, max_new_tokens, context


def check_context(num_prompt: int, max_new_tokens: int, context: int) -> None:
    """Raise ContextLengthError if a prompt and its new tokens exceed the model's context."""
    if num_prompt + max_new_tokens > context:
        raise ContextLengthError(num_prompt, max_new_tokens, context)


def make_generator(
    seed: int | None, generator: torch.Generator | None, device: torch.device, do_sample: bool
) -> torch.Generator | None:
    """Choose one call's random generator: the given one, one seeded by `seed`, or a freshly seeded one; None when greedy."""
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


_USUAL_PROCESSORS = {
    "repetition_penalty": ("RepetitionPenaltyLogitsProcessor", 1.0),
    "temperature": ("TemperatureLogitsWarper", 1.0),
    "top_k": ("TopKLogitsWarper", 0),
    "top_p": ("TopPLogitsWarper", 1.0),
    "min_p": ("MinPLogitsWarper", None),
}
"""transformers' processors of these fields, and the values without effect."""
_USUAL = {
    "do_sample", "max_length", "max_new_tokens", "max_time", "stop_strings", "eos_token_id", "bos_token_id", "pad_token_id",
    "use_cache", "cache_implementation", "return_dict_in_generate", "transformers_version", *_USUAL_PROCESSORS,
}  # fmt: skip
"""Fields that `usual_lists` knows, or that have no processors."""


def _is_default(name: str, value: object) -> bool:
    return isinstance(value, (bool, int, float, str)) and value == config_fields().get(name)


def usual_lists(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None, processors: Sequence[Any], own: Sequence[Any]
) -> tuple[LogitsProcessorList, StoppingCriteriaList] | None:
    """Build the processors and criteria that transformers would; None for a call that its own code must prepare.

    processors, own: the caller's processors and criteria. Criteria of a length and of EOS are left out.
    """
    from transformers import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
    from transformers.generation import logits_process as theirs

    def made(*fields: str) -> list[Any]:
        kinds = ((*_USUAL_PROCESSORS[field], getattr(config, field)) for field in fields)
        return [getattr(theirs, kind)(value) for kind, neutral, value in kinds if value not in (None, neutral)]

    unusual = any(
        not (name in _USUAL or name[0] == "_" or value is None or value is False or _is_default(name, value))
        for name, value in vars(config).items()
    )
    # One of these would take the place of one that an option asks for.
    replacing = theirs.RepetitionPenaltyLogitsProcessor in map(type, processors) or any(
        type(one).__module__.startswith("transformers.") for one in own
    )
    if unusual or replacing or (config.stop_strings is not None and tokenizer is None):
        return None
    chosen, criteria = LogitsProcessorList(made("repetition_penalty")), StoppingCriteriaList()
    chosen.extend(one for one in processors if one not in chosen)
    chosen.extend(made("temperature", "top_k", "top_p", "min_p") if config.do_sample else [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time))
    if config.stop_strings is not None:
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    criteria.extend(one for one in own if one not in criteria)
    return chosen, criteria


def plain_request(prompt: Tensor, max_new_tokens: int, eos: frozenset[int] = frozenset()) -> Request:
    """Make a greedy request without processors or stopping criteria. prompt: int64 [n] on the CPU."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    stops = StopConditions(eos=eos, criteria=StoppingCriteriaList(), max_new_tokens=max_new_tokens)
    return Request(prompt=prompt, processors=LogitsProcessorList(), stops=stops, generator=None)


def make_request(
    *,
    model: LayerSkipModel,
    defaults: GenerationConfig,
    prompt: object,
    tokenizer: PreTrainedTokenizerBase | None,
    options: Mapping[str, Any],
) -> Request:
    """Check one call and turn it into what the engine needs.

    defaults: the checkpoint's. options: `GenerationOptions`. Those that are None were not given. How to speculate is not
        decided here.
    Raises ValueError (TypeError for a wrong type) that names the argument, its range and the remedy.
    """
    from transformers import GenerationConfig, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList

    generation_config, generator = options.get("generation_config"), options.get("generator")
    logits_processor, stopping_criteria = options.get("logits_processor") or [], options.get("stopping_criteria") or []
    check_ranges(options)
    fields = {name: value for name, value in options.items() if value is not None and name in config_fields()}
    never_stops = isinstance(fields.get("eos_token_id"), (list, tuple)) and not fields["eos_token_id"]
    if never_stops:
        del fields["eos_token_id"]
    given = (generation_config, defaults)
    has_length = "max_new_tokens" in fields or any(
        c is not None and (c.max_length is not None or c.max_new_tokens is not None) for c in given
    )
    plain = generation_config is not None or type(model.config) is PlainConfig
    if not plain and (own := model.config._get_generation_parameters()):
        raise ValueError(f"the model's config sets {own}, which nothing reads there: set it in its generation_config")
    config = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    config.update(**defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    config.update(**fields)
    if config.do_sample and config.temperature is not None and 0 <= config.temperature < COLDEST:
        config.do_sample, config.temperature = False, 1.0
    if never_stops:
        config.eos_token_id = None
    elif "eos_token_id" not in fields and getattr(generation_config, "eos_token_id", None) is None:
        config.eos_token_id = end_tokens(config, tokenizer) or None
    refuse_fields(config)

    context, device = model.max_positions, model.device
    ids = encode_prompt(prompt, tokenizer, model.vocab_size)
    num_prompt = ids.numel()
    if not has_length:
        config.max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, context - num_prompt))
    elif config.max_new_tokens is None:
        config.max_new_tokens = config.max_length - num_prompt
        if config.max_new_tokens < 1:
            raise ValueError(
                f"max_length={config.max_length} leaves no room after a prompt of {num_prompt} tokens: "
                "raise it, or set max_new_tokens"
            )
    check_context(num_prompt, config.max_new_tokens, context)
    config.max_length = num_prompt + config.max_new_tokens
    if config.min_new_tokens is not None:  # transformers lets it override min_length
        config.min_length = num_prompt + config.min_new_tokens

    source = make_generator(options.get("seed"), generator, device, bool(config.do_sample))
    lists = usual_lists(config, tokenizer, logits_processor, stopping_criteria)
    if lists is None:
        from transformers import GenerationMixin, MaxLengthCriteria
        from transformers.generation.stopping_criteria import EosTokenCriteria

        host: Any = GenerationMixin()  # instead of one of its models
        host.config, host.device = model.config, device
        host._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device)
        processors = host._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=num_prompt,
            encoder_input_ids=ids.unsqueeze(0).to(device),
            logits_processor=LogitsProcessorList(logits_processor),
            device=str(device),
        )
        criteria = host._get_stopping_criteria(
            generation_config=config,
            stopping_criteria=StoppingCriteriaList(stopping_criteria),
            tokenizer=tokenizer,
        )
        decided = (MaxLengthCriteria, EosTokenCriteria)  # by us, without a tensor for each token
        lists = (
            processors,
            StoppingCriteriaList(one for one in criteria if type(one) not in decided or one in stopping_criteria),
        )
    processors, criteria = lists
    refuse_processors(processors)
    eos = frozenset(_as_list(None if never_stops else config.eos_token_id))
    clocks = tuple(c for c in criteria if isinstance(c, MaxTimeCriteria) and c not in stopping_criteria)
    stops = StopConditions(eos=eos, criteria=criteria, max_new_tokens=config.max_new_tokens, clocks=clocks)
    shared = generator is not None
    return Request(prompt=ids, processors=processors, stops=stops, generator=source, shares_generator=shared)


def end_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the tokens that end a text: those of a checkpoint's configuration, and its tokenizer's own.

    Fine-tuned models often end their answers with the tokenizer's, while the configuration still names the base model's.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    return [*dict.fromkeys([*_as_list(config.eos_token_id), *([] if own is None else [own])])]


def _as_list(ids: int | Sequence[int] | Tensor | None) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    return [ids] if isinstance(ids, int) else [int(i) for i in ids]
