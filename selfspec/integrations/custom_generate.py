"""Decoding with selfspec inside transformers' own `model.generate`.

    model.generate(**inputs, custom_generate=selfspec.custom_generate(policy="auto"))

transformers prepares the call, and the engine decodes from exactly that. Every row of the batch is one text in the engine.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from layerskip_models.fork_safe import fork_safe
from layerskip_models.transformers_names import CACHE_NAMES
from policies import Policy
from selfspec.engine.engine import BoundRequest, run_calls
from selfspec.engine.request import Request, encode_prompt, end_tokens, refuse_fields, refuse_processors
from selfspec.engine.results import GenerationResult, GenerationStats
from selfspec.engine.stopping import StopConditions
from selfspec.generator import SelfSpecGenerator
from selfspec.integrations.batch_rows import BatchRow, StopTogether, row_criterion, row_processor, split_rows
from selfspec.options import SpeculationOptions

_PREPARED = ("attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep")
"""Passed by transformers to every callable."""

_generators: WeakKeyDictionary[PreTrainedModel, SelfSpecGenerator] = WeakKeyDictionary()
_lock = fork_safe(threading.Lock())


def generator_of(model: PreTrainedModel) -> SelfSpecGenerator:
    """Return the generator of a transformers model, made at the first call.

    Its reference to the model is weak, so that it is freed with the model. Call its `refresh` after a few numbers of a weight
    were written through `.data`. Raises ValueError for a model that this engine cannot run.
    """
    with _lock:
        if model not in _generators:
            _generators[model] = SelfSpecGenerator(cast("PreTrainedModel", proxy(model)))
        return _generators[model]


@dataclass
class SelfSpecOutput(GenerateDecoderOnlyOutput):
    """The output of `generate` with `return_dict_in_generate=True`: `sequences`, and statistics of every row."""

    stats: list[GenerationStats] | None = None  # not a tuple, whose items pipelines take for tensors


class CustomGenerate:
    """A decoding loop for `model.generate(..., custom_generate=...)`; `selfspec.custom_generate`. Serves several models.

    policy, exit_layer, num_speculations: how to speculate where a call of `model.generate` does not say.
    tokenizer: for stop strings, since transformers does not pass its own `tokenizer` argument on. Its end token ends a row as
        well as the checkpoint's, unless the call names another eos_token_id.
    """

    def __init__(
        self,
        policy: str | Policy | None = None,
        *,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.speculation = SpeculationOptions(policy=policy, exit_layer=exit_layer, num_speculations=num_speculations)
        self.tokenizer = tokenizer

    # transformers passes on the arguments of `generate` that it does not know and that this signature names. What it
    # prepares itself, such as attention_mask, must not be named here.
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
        **prepared: Any,
    ) -> Tensor | SelfSpecOutput:
        """Decode what transformers has prepared: int64 [rows, length], padded on the right, or a `SelfSpecOutput`."""
        given = _arguments_of_generate(sys._getframe(1))
        streamer = given.get("streamer")
        own = SpeculationOptions(policy=policy, exit_layer=exit_layer, num_speculations=num_speculations)
        speculation = self.speculation if all(value is None for value in own.values()) else own
        criteria = StoppingCriteriaList(stopping_criteria)
        try:
            if stop_strings is not None:
                if self.tokenizer is None:
                    raise ValueError("stop_strings need a tokenizer: selfspec.custom_generate(tokenizer=...)")
                criteria.append(StopStringCriteria(tokenizer=self.tokenizer, stop_strings=stop_strings))
            prepared["assistant_model"] = given.get("assistant_model")
            _refuse(generation_config, logits_processor, prepared)
            rows = split_rows(input_ids, prepared.get("attention_mask"), prepared.get("position_ids"))
            if streamer is not None and len(rows) > 1:
                raise ValueError(f"a streamer takes one row at a time, of {len(rows)} here: call generate for each")
            ends = [] if self.tokenizer is None else end_tokens(generation_config, self.tokenizer)
            if ends and generation_config.eos_token_id == getattr(model.generation_config, "eos_token_id", None):
                criteria.append(EosTokenCriteria(ends))
                # Where nothing pads, transformers takes the first end token for it, and so does this.
                if getattr(generation_config, "_pad_token_tensor", None) is None:
                    generation_config._pad_token_tensor = torch.tensor(ends[0], device="cpu")
            do_sample, length = bool(generation_config.do_sample), input_ids.shape[1]
            requests, together = _requests(model, rows, length, logits_processor, criteria, do_sample)
            results = _run(generator_of(model).check_prepared(requests, **speculation), streamer)
        finally:
            if streamer is not None:
                streamer.end()
        most = None if together is None else together.num_new
        sequences = _padded(input_ids, [result.new_tokens[:most] for result in results], generation_config)
        if generation_config.return_dict_in_generate:
            return SelfSpecOutput(sequences=sequences, stats=[result.stats for result in results])
        return sequences


custom_generate = CustomGenerate


def _refuse(config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    refuse_fields(config, allowed=("num_return_sequences",))
    for name, fine in (("cache_implementation", (None, "dynamic")), ("use_cache", (None, True))):
        if (value := getattr(config, name)) not in fine:
            raise ValueError(f"{name}={value!r}: selfspec always uses a KV cache of its own, leave it unset")
    for name, value in model_kwargs.items():
        if (value is not None and name not in _PREPARED) or getattr(value, "_is_user_defined", False):  # such a cache
            raise ValueError(f"{name} does not apply to selfspec's decoding: leave it out")
    refuse_processors(processors)


def _requests(
    model: PreTrainedModel,
    rows: Sequence[BatchRow],
    length: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    do_sample: bool,
) -> tuple[list[Request], StopTogether | None]:
    """Make the request of each row, and what makes them end together if they must. length: of the padded prompts."""
    # We decide these on the host. A criterion of these types from the user has replaced the prepared one.
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    max_new_tokens = max(1, min(lengths) - length)
    eos = frozenset(int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist())
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    together = None
    if others and len(rows) > 1 and not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        together = StopTogether(len(rows), max_new_tokens)
    # Draw from PyTorch's own generator as transformers does, so that `torch.manual_seed` makes a call repeatable.
    seeds = torch.randint(2**63 - 1, (len(rows),), device="cpu").tolist() if do_sample else None
    requests = []
    for row in rows:
        own = [row_criterion(criterion, row) for criterion in others]
        if together is not None:
            own = [together.criterion(own, row)]
        source = None if seeds is None else torch.Generator(device=model.device).manual_seed(seeds[row.index])
        stops = StopConditions(eos=eos, criteria=StoppingCriteriaList(own), max_new_tokens=max_new_tokens)
        alike = LogitsProcessorList([row_processor(processor, row) for processor in processors])
        prompt = encode_prompt(row.prompt, None, model.config.vocab_size)
        requests.append(Request(prompt=prompt, processors=alike, stops=stops, generator=source))
    return requests, together


def _run(checked: list[BoundRequest], streamer: BaseStreamer | None) -> list[GenerationResult]:
    """Decode all rows together."""
    results: dict[int, GenerationResult] = {}
    for step in run_calls(checked):
        if streamer is not None:
            for token in step.tokens:  # one at a time, as transformers gives them
                streamer.put(torch.tensor([token], device="cpu"))
        if step.result is not None:
            results[step.ticket] = step.result
    return [results[index] for index in range(len(checked))]


def _padded(input_ids: Tensor, texts: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    """Put the new tokens after the prompts as they came; short rows are padded on the right."""
    longest = max(map(len, texts))
    fill = getattr(config, "_pad_token_tensor", None)
    if fill is None and any(len(text) < longest for text in texts):
        raise ValueError("rows ended at different lengths, and there is no pad_token_id to fill them with: set one")
    new = torch.tensor([[*text, *[int(fill or 0)] * (longest - len(text))] for text in texts], dtype=torch.long)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def _arguments_of_generate(caller: FrameType | None) -> dict[str, Any]:
    """Find the streamer and assistant model of `model.generate` in its frame: transformers passes neither on."""
    for frame in (caller, caller and caller.f_back):
        if frame is not None and frame.f_code is _GENERATE:
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}
    return {}


def hub_generate(
    model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any], *, policy: str | Policy | None = None
) -> Tensor | SelfSpecOutput:
    """Decode `model.generate(*arguments, **options)` with selfspec, for the code in exported folders.

    The options may also contain `policy`, `exit_layer` and `num_speculations`. policy: used if none of these is given. An
    explicit `custom_generate` takes precedence over all of them. Stop strings in a configuration work here too.
    """
    bound = inspect.signature(GenerationMixin.generate).bind(model, *arguments, **options).arguments
    others = bound.pop("kwargs", {})
    del bound["self"]
    if bound.get("custom_generate") is None:
        decode = custom_generate(policy, tokenizer=others.pop("tokenizer", None))
        bound["custom_generate"] = decode
        stops = _stop_strings(model, bound, others)
        if stops is not None:
            # `stop_strings` is not in its signature, so that the None among the options reaches the configuration.
            def decode_to_a_stop(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Tensor | SelfSpecOutput:
                return decode(model, input_ids, stop_strings=stops, **prepared)

            bound["custom_generate"] = decode_to_a_stop
    return GenerationMixin.generate(model, **bound, **others)


def _stop_strings(model: PreTrainedModel, bound: dict[str, Any], others: dict[str, Any]) -> Any:
    """Take the stop strings out of a call's arguments. transformers raises if it finds any, even with a tokenizer."""
    config = bound.get("generation_config")
    given = others.pop("stop_strings", None)
    found = [given, None if config is None else config.stop_strings, model.generation_config.stop_strings]
    if found[1] is not None:
        bound["generation_config"] = copy.deepcopy(config)
        bound["generation_config"].stop_strings = None
    if found[2] is not None:
        others["stop_strings"] = None
    return next((stops for stops in found if stops is not None), None)
