"""transformers' own decoding as engines to compare with, called the way that is fair to it.

Settings of assisted generation are read from `model.generation_config` (passed as arguments they are ignored), so every
call runs under a fresh GenerationConfig, without EOS and without what the checkpoint's own may carry (sampling), and the
model's is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from bench.engines.own import BatchRun, Generation, TimedEngine
from bench.machine import synchronize


class TransformersEngine(TimedEngine):
    """`model.generate`, greedy. arguments: more keywords for it. settings: of its GenerationConfig."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        label: str,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.label = name, label
        self._model, self._arguments, self._settings = model, arguments or {}, settings or {}

    @torch.inference_mode()
    def _call(self, ids: Tensor, max_new_tokens: int, mask: Tensor | None = None) -> tuple[list[list[int]], float]:
        """Return what continues ids, int64 [texts, n], and the seconds that it took."""
        device = self._model.device
        mask = torch.ones_like(ids) if mask is None else mask
        arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, **self._arguments}
        saved = self._model.generation_config
        self._model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **self._settings)
        try:
            synchronize(device)
            start = perf_counter()
            sequences = self._model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **arguments)
            synchronize(device)
            return sequences[:, ids.shape[1] :].tolist(), perf_counter() - start
        finally:
            self._model.generation_config = saved

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`. The first token is timed in a second call, so that no streamer slows the first one down."""
        (tokens,), seconds = self._call(prompt.unsqueeze(0), max_new_tokens)
        _, first = self._call(prompt.unsqueeze(0), 1)
        return Generation(tokens=tuple(tokens), seconds=seconds, time_to_first_token=first)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `TimedEngine`: the shorter prompts padded on the left."""
        ids = pad_sequence([*prompts], batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        tokens, seconds = self._call(ids, max_new_tokens, mask)
        return BatchRun(tokens=tokens, seconds=seconds)


def transformers_engines(model: PreTrainedModel, setting: tuple[int, int] | None) -> list[TransformersEngine]:
    """Return plain `generate`; on CUDA with a static cache, too, which transformers then compiles; and two of early exit.

    setting: exit layer and length of `assistant_early_exit`, which then has no schedule and no confidence threshold; beside
    it stands the exit layer with transformers' defaults: up to 20 drafts, until one has a probability below 0.4. None:
    neither.
    """
    engines = [TransformersEngine(model, "transformers:generate", "transformers generate")]
    if model.device.type == "cuda":
        static = {"cache_implementation": "static"}
        engines.append(TransformersEngine(model, "transformers:static", "transformers generate, static cache", static))
    if setting is not None:
        exit_layer, num_speculations = setting
        early = {"assistant_early_exit": exit_layer}
        name, label = f"transformers:early-exit:{exit_layer}", f"transformers early exit {exit_layer}"
        always = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        fixed = {"num_assistant_tokens": num_speculations, **always}
        once = f"-{num_speculations}"
        engines.append(TransformersEngine(model, f"{name}{once}", f"{label}{once}", early, fixed))
        engines.append(TransformersEngine(model, f"{name}-default", f"{label}, defaults", early))
    return engines
