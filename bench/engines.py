"""What a measured engine is, and selfspec as one. transformers is in `bench.peers`.

All engines continue token ids greedily by exactly `max_new_tokens` tokens, EOS off, and are timed by the same clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.record import KEPT
from policies import kept_between_texts
from selfspec import SelfSpecGenerator
from selfspec.calibrate import synchronize
from selfspec.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One timed continuation.

    tokens: the new ones. seconds: of the whole call, prefill included, tokenisation not. time_to_first_token: seconds
    until the first new token was there. decode_seconds: from then to the end, None where the first token was timed in
    another call. stats: the engine's own counts (`GenerationStats.as_dict`), None if it keeps none.
    """

    tokens: tuple[int, ...]
    seconds: float
    time_to_first_token: float | None = None
    decode_seconds: float | None = None
    stats: Mapping[str, Any] | None = None


class Engine(Protocol):
    """Something that continues token ids. name: short and unique; label: for tables."""

    name: str
    label: str

    def generate(self, prompt: Tensor, max_new_tokens: int) -> Generation:
        """Continue a prompt, int64 [n], greedily and timed."""
        ...

    def generate_afresh(self, prompt: Tensor, max_new_tokens: int) -> None:
        """The same continuation with every buffer allocated during the call, for measuring memory; not timed."""
        ...

    def count(self, prompt: Tensor, max_new_tokens: int) -> Mapping[str, float | int | None] | None:
        """Rounds and drafts of that continuation, from a run that is not timed; None where `generate` tells or none are."""
        ...

    def next_logits(self, ids: Tensor) -> Tensor:
        """float32 [vocab] on the CPU: the full model's logits after the ids, int64 [n]."""
        ...


class SelfSpecEngine:
    """selfspec with one policy; "ar" is its autoregressive mode (num_speculations=0).

    The policy forgets what it learned before every run, so that a run's rounds do not depend on what was measured before.
    With `kept` it starts every run on a prompt with what it had learned from one run on each prompt before it.
    name, label: of the engine, when not the policy's.
    """

    def __init__(
        self,
        generator: SelfSpecGenerator,
        policy: str,
        *,
        kept: bool = False,
        name: str | None = None,
        label: str | None = None,
    ) -> None:
        self._generator = generator
        self._policy = kept_between_texts(policy) if kept else policy
        self._kept = kept
        self._prompt: Tensor | None = None
        self._known: dict[str, Any] | None = None  # before this prompt
        self._learned: dict[str, Any] | None = None  # after the last run
        self.name = name or f"selfspec:{policy}{KEPT if kept else ''}"
        self.label = label or ("selfspec, autoregressive" if policy == "ar" else f"selfspec, {policy}")
        if kept:
            self.label += ", kept"

    def generate(self, prompt: Tensor, max_new_tokens: int) -> Generation:
        """See `Engine`."""
        device = self._generator.model.device
        policy = self._generator.resolve_policy(self._policy)
        policy.reset()
        if self._kept:
            if prompt is not self._prompt:
                self._prompt, self._known = prompt, self._learned
            if self._known is not None:
                policy.restore(self._known)
        synchronize(device)
        start = perf_counter()
        result = self._generator.generate(
            prompt, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[], policy=self._policy
        )
        synchronize(device)
        seconds = perf_counter() - start
        if self._kept:
            self._learned = policy.state()
        first = result.stats.time_to_first_token
        return Generation(
            tokens=tuple(result.new_tokens),
            seconds=seconds,
            time_to_first_token=first,
            decode_seconds=seconds - first,
            stats={**result.stats.as_dict(), "policy": self._policy},
        )

    def forget(self) -> None:
        """What was learned from warm-up runs."""
        self._prompt = self._known = self._learned = None

    def capture_ahead(self, max_length: int) -> None:
        """Capture what texts of up to `max_length` tokens may need, where the runner captures: not while a run is timed."""
        self._generator.warm_up(self._policy, max_length=max_length)

    def generate_afresh(self, prompt: Tensor, max_new_tokens: int) -> None:
        """See `Engine`: by a generator that has no KV cache yet."""
        fresh = SelfSpecGenerator(self._generator.model, runner=self._generator.runner)
        fresh.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[], policy=self._policy)

    def count(self, prompt: Tensor, max_new_tokens: int) -> None:
        """None: `generate` counts."""
        return

    def next_logits(self, ids: Tensor) -> Tensor:
        """See `Engine`."""
        model = self._generator.model
        with torch.inference_mode():
            cache = KVCache(model, ids.numel())
            hidden = model.run_layers(model.embed(ids.to(model.device)), 0, model.num_layers, cache, 0)
            return model.logits(hidden[-1:])[0].cpu()
