"""transformers' own decoding as engines to compare with, called the way that is fair to it.

Settings of assisted generation are read from `model.generation_config` (passed as arguments they are ignored), so every
call runs under a fresh GenerationConfig, without EOS and without what the checkpoint's own may carry (sampling), and the
model's is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator
from transformers.generation.streamers import BaseStreamer

from bench.engines.own import Generation, Sampling
from bench.machine.throughput import BatchRun
from selfspec.engine.calibrate import synchronize
from selfspec.engine.results import ratio

NOTHING: Mapping[str, Any] = MappingProxyType({})


@contextmanager
def generation_settings(model: PreTrainedModel, **fields: Any) -> Iterator[None]:
    """Within it, `model.generation_config` is a fresh one with these fields and no EOS; then the old one again."""
    saved = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=None, **fields)
    try:
        yield
    finally:
        model.generation_config = saved


class _FirstTokenSeen(Exception):
    """No error: raised by the streamer to leave `generate` once the first token is there."""


class FirstToken(BaseStreamer):
    """Calls `seen` once the first new token is there; the prompt comes before it."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen
        self._puts = 0

    def put(self, value: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self._seen()

    def end(self) -> None:
        pass


def _leave() -> None:
    raise _FirstTokenSeen


def transformers_sequences(
    model: PreTrainedModel,
    ids: Tensor,
    max_new_tokens: int,
    settings: Mapping[str, Any] = NOTHING,
    **arguments: Any,
) -> Tensor:
    """`model.generate` on ids, int64 [texts, n]: greedy, without padding and EOS, unless the arguments say otherwise.

    settings: of its GenerationConfig. Returns prompts with their continuations, [texts, n + new].
    """
    defaults = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    with torch.inference_mode(), generation_settings(model, **settings):
        return model.generate(input_ids=ids, max_new_tokens=max_new_tokens, **{**defaults, **arguments})


class TransformersEngine:
    """`model.generate`. arguments: more keywords for it. settings: of its GenerationConfig. sampling: None if greedy."""

    weights: str | None = None
    arithmetic: torch.dtype | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        label: str,
        arguments: Mapping[str, Any] = NOTHING,
        settings: Mapping[str, Any] = NOTHING,
        sampling: Sampling | None = None,
    ) -> None:
        self.name, self.label = name, label
        self._model, self._sampling = model, sampling
        self._arguments, self._settings = arguments, settings

    def _call(
        self, prompt: Tensor, max_new_tokens: int, repeat: int = 0, streamer: BaseStreamer | None = None
    ) -> Tensor:
        """Sequences [1, n + new]."""
        ids = prompt.to(self._model.device).unsqueeze(0)
        decoding: dict[str, Any] = {}
        if self._sampling is not None:
            torch.manual_seed(self._sampling.seed + repeat)
            decoding = self._sampling.arguments()
        arguments = {"streamer": streamer, **decoding, **self._arguments}
        return transformers_sequences(self._model, ids, max_new_tokens, self._settings, **arguments)

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`. The first token is timed in a second call, so that no streamer slows the first one down."""
        device = self._model.device
        synchronize(device)
        start = perf_counter()
        sequences = self._call(prompt, max_new_tokens, repeat)
        synchronize(device)
        seconds = perf_counter() - start
        first = None
        start = perf_counter()
        try:
            self._call(prompt, max_new_tokens, repeat, FirstToken(_leave))
        except _FirstTokenSeen:
            first = perf_counter() - start
        return Generation(
            tokens=tuple(sequences[0, prompt.numel() :].tolist()), seconds=seconds, time_to_first_token=first
        )

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`: greedily, the shorter prompts padded on the left."""
        device = self._model.device
        start = perf_counter()
        ids = pad_sequence([*prompts], batch_first=True, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        settings = {**self._settings, "pad_token_id": 0}
        sequences = transformers_sequences(
            self._model, ids, max_new_tokens, settings, attention_mask=mask.to(device), **self._arguments
        )
        synchronize(device)
        return BatchRun(tokens=sequences[:, ids.shape[1] :].tolist(), seconds=perf_counter() - start)

    def count(self, prompt: Tensor, max_new_tokens: int) -> Mapping[str, float | int | None] | None:
        """Count rounds, drafted and accepted tokens of assisted generation, which transformers does not return."""
        if "assistant_early_exit" not in self._arguments:
            return None
        drafted: list[int] = []
        accepted: list[int] = []
        original = EarlyExitCandidateGenerator.update_candidate_strategy

        def watched(generator: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
            drafted.append(scores.shape[1] - 1)
            accepted.append(int(num_matches))
            original(generator, input_ids, scores, num_matches)

        with patch.object(EarlyExitCandidateGenerator, "update_candidate_strategy", watched):
            sequences = self._call(prompt, max_new_tokens)
        num_new = sequences.shape[1] - prompt.numel()
        return {
            "rounds": len(drafted),
            "num_drafted": sum(drafted),
            "num_accepted": sum(accepted),
            "acceptance_rate": ratio(sum(accepted), sum(drafted)),
            "accepted_per_round": ratio(sum(accepted), len(drafted)),
            "tokens_per_round": ratio(num_new, len(drafted)),
        }

    def next_logits(self, ids: Tensor) -> Tensor:
        """See `TimedEngine`."""
        with torch.inference_mode():
            output = self._model(input_ids=ids.to(self._model.device).unsqueeze(0), logits_to_keep=1, use_cache=False)
            return output.logits[0, -1].float().cpu()


def transformers_generate(model: PreTrainedModel, sampling: Sampling | None = None) -> TransformersEngine:
    """Plain `generate` with its default, dynamic cache."""
    return TransformersEngine(model, "transformers:generate", "transformers generate", sampling=sampling)


def transformers_static(model: PreTrainedModel, sampling: Sampling | None = None) -> TransformersEngine:
    """`generate` with a static cache; on CUDA transformers compiles it by itself."""
    arguments, label = {"cache_implementation": "static"}, "transformers generate, static cache"
    return TransformersEngine(model, "transformers:static", label, arguments, sampling=sampling)


def transformers_early_exit(
    model: PreTrainedModel, exit_layer: int, num_speculations: int, sampling: Sampling | None = None
) -> TransformersEngine:
    """`assistant_early_exit` with a fixed exit layer and length: no schedule, no confidence threshold."""
    setting = f"{exit_layer}-{num_speculations}"
    name, label = f"transformers:early-exit:{setting}", f"transformers early exit {setting}"
    fixed = {
        "num_assistant_tokens": num_speculations,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    return TransformersEngine(model, name, label, {"assistant_early_exit": exit_layer}, fixed, sampling)


def transformers_early_exit_default(
    model: PreTrainedModel, exit_layer: int, sampling: Sampling | None = None
) -> TransformersEngine:
    """`assistant_early_exit` at its defaults: up to 20 drafts, until one has a probability below 0.4."""
    name, label = f"transformers:early-exit:{exit_layer}-default", f"transformers early exit {exit_layer}, defaults"
    return TransformersEngine(model, name, label, {"assistant_early_exit": exit_layer}, sampling=sampling)
