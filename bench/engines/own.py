"""What a measured engine is, and selfspec as one. transformers is in `bench.engines.peers`, llama.cpp in `llama_cpp`.

All engines continue token ids by exactly `max_new_tokens` tokens, EOS off, and are timed by the same clock; all greedily, or
all with the same sampling settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.record import KEPT
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.engine.calibrate import synchronize

GREEDY: Mapping[str, Any] = {"do_sample": False, "eos_token_id": []}
"""Arguments of `generate` for measurements that always yield as many tokens as were asked for."""


def run_afresh(
    generator: SelfSpecGenerator, policy: str, prompt: Tensor, max_new_tokens: int, *, trace: bool = False
) -> GenerationResult:
    """Continue a prompt, int64 [n], greedily and without EOS, by a policy that has forgotten what it knew."""
    generator.resolve_policy(policy).reset()
    return generator.generate(prompt, max_new_tokens=max_new_tokens, **GREEDY, policy=policy, trace=trace)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How engines draw tokens. top_p 1 and top_k 0 leave all tokens. seed: of a prompt's first run, then seed + 1, ...

    Raises ValueError for a temperature or top_p that is not positive, a top_p above 1 or a negative top_k.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"--temperature must be above 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be 0 (all tokens) or more, got {self.top_k}")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, the seed left out."""
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


class EngineLostError(RuntimeError):
    """An engine in a process of its own crashed, raised or did not answer. The others can go on.

    mistake: what it said of a value that the user gave, if that was why.
    """

    def __init__(self, message: str, mistake: str | None = None) -> None:
        super().__init__(message)
        self.mistake = mistake


class HasLabel(Protocol):
    """name: short and unique, for records; label: for tables."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...


class TimedEngine(HasLabel, Protocol):
    """Something that continues token ids.

    weights: what the run's weights were rounded to ("int4", ..), which makes another model of them; None for the run's own.
    arithmetic: the dtype whose near-ties its outputs are judged by; None for the run's.
    """

    weights: str | None
    arithmetic: torch.dtype | None

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """Continue a prompt, int64 [n], timed. repeat: number of the run; sampled runs draw with another seed in each."""
        ...

    def count(self, prompt: Tensor, max_new_tokens: int) -> Mapping[str, float | int | None] | None:
        """Count that continuation's rounds and drafts, untimed; None if `generate` counts them or there are none."""
        ...

    def next_logits(self, ids: Tensor) -> Tensor:
        """float32 [vocab] on the CPU: the full model's logits after the ids, int64 [n]."""
        ...


class SelfSpecEngine:
    """selfspec with one policy; "ar" is its autoregressive mode (num_speculations=0).

    The policy forgets what it learned before every run, so that a run's rounds do not depend on what was measured before.
    With `kept` it starts every run on a prompt with what it had learned from one run on each prompt before it.
    name, label: of the engine, when not the policy's. sampling: None for greedy decoding. weights: see `TimedEngine`.
    """

    arithmetic: torch.dtype | None = None

    def __init__(
        self,
        generator: SelfSpecGenerator,
        policy: str,
        *,
        kept: bool = False,
        name: str | None = None,
        label: str | None = None,
        sampling: Sampling | None = None,
        weights: str | None = None,
    ) -> None:
        self.weights = weights
        self._generator = generator
        self._sampling = sampling
        self._policy = policy
        self._kept = kept
        self._prompt: Tensor | None = None
        self._known: dict[str, Any] | None = None  # before this prompt
        self._learned: dict[str, Any] | None = None  # after the last run
        self.name = name or f"selfspec:{weights + ':' if weights else ''}{policy}{KEPT if kept else ''}"
        self.label = label or (
            f"selfspec{' ' + weights if weights else ''}, {'autoregressive' if policy == 'ar' else policy}"
        )
        if kept:
            self.label += ", kept"

    def _decoding(self, repeat: int) -> dict[str, Any]:
        sampling = self._sampling
        options: dict[str, Any] = {"eos_token_id": [], "policy": self._policy}
        if sampling is None:
            return {**options, "do_sample": False}
        return {**options, **sampling.arguments(), "seed": sampling.seed + repeat}

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`."""
        device = self._generator.model.device
        policy = self._generator.resolve_policy(self._policy)
        policy.reset()
        if self._kept:
            if self._prompt is None or not torch.equal(prompt, self._prompt):  # a copy, where it came through a pipe
                self._prompt, self._known = prompt, self._learned
            if self._known is not None:
                policy.restore(self._known)
        synchronize(device)
        start = perf_counter()
        result = self._generator.generate(prompt, max_new_tokens=max_new_tokens, **self._decoding(repeat))
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
        """Forget what was learned from warm-up runs."""
        self._prompt = self._known = self._learned = None

    def count(self, prompt: Tensor, max_new_tokens: int) -> None:
        """None: `generate` counts."""
        return

    def next_logits(self, ids: Tensor) -> Tensor:
        """See `TimedEngine`."""
        model = self._generator.model
        with torch.inference_mode():
            cache = KVCache(model, ids.numel())
            hidden = prefill(model, ids.to(model.device), cache)
            return model.logits(hidden[-1:])[0].cpu()
