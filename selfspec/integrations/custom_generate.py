"""Decoding with selfspec inside transformers' own `model.generate`.

    model.generate(**inputs, custom_generate=selfspec.custom_generate(policy="auto"))

transformers prepares the call (configuration, lengths, logits processors, stopping criteria, masks, expanded rows), and the
engine decodes from exactly that. Every row of the batch is one text in the engine.
"""

from __future__ import annotations

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
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip_models.draft_weights import DraftWeights, check_draft_weights
from layerskip_models.fork_safe import fork_safe
from layerskip_models.transformers_names import CACHE_NAMES
from policies import Policy
from selfspec.engine.engine import BoundRequest, run_calls
from selfspec.engine.request import Request, encode_prompt, end_tokens, refuse_fields, refuse_processors
from selfspec.engine.results import GenerationResult, GenerationStats
from selfspec.engine.stopping import StopConditions
from selfspec.generator import SelfSpecGenerator
from selfspec.integrations.batch_rows import BatchRow, RowCriterion, StopTogether, row_processor, split_rows
from selfspec.options import SpeculationOptions

_OF_A_BATCH = ("num_return_sequences",)
_PREPARED = ("attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep")
"""Passed by transformers to every callable."""

_generators: WeakKeyDictionary[PreTrainedModel, dict[str, SelfSpecGenerator]] = WeakKeyDictionary()
_lock = fork_safe(threading.Lock())


def generator_of(model: PreTrainedModel, draft_weights: DraftWeights = "auto") -> SelfSpecGenerator:
    """Return the generator of a transformers model, made at the first call; another for each choice of draft weights.

    On a CPU it copies the weights, again when they have changed; on CUDA it shares them (see `SelfSpecGenerator`). Its
    reference to the model is weak, so that it is freed with the model. Call its `refresh` after writing a few numbers of a
    weight through `.data`. draft_weights: as in `SelfSpecGenerator`. Raises ValueError for a model that this engine cannot
    run.
    """
    with _lock:
        made = _generators.setdefault(model, {})
        if draft_weights not in made:
            weak = cast("PreTrainedModel", proxy(model))
            made[draft_weights] = SelfSpecGenerator(weak, draft_weights=draft_weights)
        return made[draft_weights]


@dataclass
class SelfSpecOutput(GenerateDecoderOnlyOutput):
    """The output of `generate` with `return_dict_in_generate=True`: `sequences`, and the statistics of every row.

    The fields for scores, logits, attentions, hidden states and the cache are None.
    """

    stats: list[GenerationStats] | None = None  # not a tuple, whose items pipelines take for tensors


class CustomGenerate:
    """A decoding loop for `model.generate(..., custom_generate=...)`; `selfspec.custom_generate`. Serves several models.

    policy, exit_layer, num_speculations: how to speculate, as in `SelfSpecGenerator.generate`. A call of `model.generate`
        may name its own.
    tokenizer: for stop strings, since transformers does not pass its own `tokenizer` argument on. Its end token ends a row as
        well as the checkpoint's, unless the call names another eos_token_id.
    streamer: for every call; the `streamer` argument of `model.generate` works as well.
    draft_weights: a copy of the weights in fewer bits to draft with, as in `SelfSpecGenerator`. Loops with different choices
        hold copies of their own.
    """

    def __init__(
        self,
        policy: str | Policy | None = None,
        *,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: BaseStreamer | None = None,
        draft_weights: DraftWeights = "auto",
    ) -> None:
        self.speculation: SpeculationOptions = {
            "policy": policy,
            "exit_layer": exit_layer,
            "num_speculations": num_speculations,
        }
        self.tokenizer, self.streamer = tokenizer, streamer
        self.draft_weights: DraftWeights = check_draft_weights(draft_weights)

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
        """Decode for transformers, which calls this once it has prepared everything except streamers and stop strings.

        Returns int64 [rows, length] on the device of `input_ids`, in which rows that ended early are padded, or a
        `SelfSpecOutput`. Raises ValueError that names what the engine does not support.
        """
        given = _arguments_of_generate(sys._getframe(1))
        if given.get("assistant_model") is not None:
            raise ValueError(_refusal("assistant_model"))
        streamer = given.get("streamer")
        if streamer is None and self.streamer is not None:
            streamer = self.streamer
            streamer.put(input_ids.cpu())
        own: SpeculationOptions = {"policy": policy, "exit_layer": exit_layer, "num_speculations": num_speculations}
        speculation = self.speculation if all(value is None for value in own.values()) else own
        criteria = StoppingCriteriaList(stopping_criteria)
        try:
            if stop_strings is not None:
                if self.tokenizer is None:
                    raise ValueError(
                        "stop_strings need the tokenizer, which transformers does not hand on: "
                        "selfspec.custom_generate(tokenizer=...)"
                    )
                criteria.append(StopStringCriteria(tokenizer=self.tokenizer, stop_strings=stop_strings))
            _refuse(generation_config, logits_processor, prepared)
            rows = split_rows(input_ids, prepared.get("attention_mask"), prepared.get("position_ids"))
            if streamer is not None and len(rows) > 1:
                raise ValueError(
                    f"a streamer takes one row at a time, the batch has {len(rows)}: call generate for each"
                )
            ends = [] if self.tokenizer is None else end_tokens(generation_config, self.tokenizer)
            if ends and generation_config.eos_token_id == getattr(model.generation_config, "eos_token_id", None):
                criteria.append(EosTokenCriteria(ends))
                # Where nothing pads, transformers takes the first end token for it, and so does this.
                if getattr(generation_config, "_pad_token_tensor", None) is None:
                    generation_config._pad_token_tensor = torch.tensor(ends[0], device="cpu")
            do_sample, length = bool(generation_config.do_sample), input_ids.shape[1]
            requests, together = _requests(model, rows, length, logits_processor, criteria, do_sample)
            results = _run(generator_of(model, self.draft_weights).check_prepared(requests, **speculation), streamer)
        finally:
            if streamer is not None:
                streamer.end()
        most = None if together is None else together.num_new
        sequences = _padded(input_ids, [result.new_tokens[:most] for result in results], generation_config)
        if generation_config.return_dict_in_generate:
            return SelfSpecOutput(sequences=sequences, stats=[result.stats for result in results])
        return sequences

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in self.speculation.items() if value is not None)
        return f"selfspec.custom_generate({named})"


custom_generate = CustomGenerate


def _refuse(config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    refuse_fields(config, allowed=_OF_A_BATCH)
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r}: selfspec keeps a KV cache of its own, leave it unset"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False: selfspec always uses its own KV cache, leave it unset")
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise ValueError(_refusal(name))
    for name in CACHE_NAMES:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise ValueError(_refusal(name))
    refuse_processors(processors)


def _refusal(name: str) -> str:
    return f"{name} does not apply to selfspec's decoding: leave it out"


def _requests(
    model: PreTrainedModel,
    rows: Sequence[BatchRow],
    length: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    do_sample: bool,
) -> tuple[list[Request], StopTogether | None]:
    """Make the request of each row, and what makes the rows end together, if they must.

    length: of the padded prompts, from which transformers counts.
    """
    # We decide these on the host. A criterion of these types from the user has replaced the prepared one.
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    max_new_tokens = max(1, min(lengths) - length)
    eos = [int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist()]
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    together = None
    if others and len(rows) > 1 and not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        together = StopTogether(len(rows), max_new_tokens)
    # Draw from PyTorch's own generator as transformers does, so that `torch.manual_seed` makes a call repeatable.
    seeds = torch.randint(2**63 - 1, (len(rows),), device="cpu").tolist() if do_sample else None
    requests = []
    for row in rows:
        own: list[Any] = others if row.alone else [RowCriterion(criterion, row) for criterion in others]
        if together is not None:
            own = [together.criterion(own, row)]
        source = None if seeds is None else torch.Generator(device=model.device).manual_seed(seeds[row.index])
        requests.append(
            Request(
                prompt=encode_prompt(row.prompt, None, model.config.vocab_size),
                processors=LogitsProcessorList([row_processor(processor, row) for processor in processors]),
                stops=StopConditions(
                    eos=frozenset(eos), criteria=StoppingCriteriaList(own), max_new_tokens=max_new_tokens
                ),
                generator=source,
            )
        )
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
    """Find the arguments of `model.generate` that transformers does not pass on, if it is the caller or the caller's caller.

    It passes neither its streamer nor its assistant model to a callable. They are looked up in its frame, because otherwise
    the streamer would stay silent and the assistant model be ignored.
    """
    for frame in (caller, caller and caller.f_back):
        if frame is not None and frame.f_code is _GENERATE:
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}
    return {}
