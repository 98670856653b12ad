"""The interface of a measured engine, and selfspec as one.

All engines continue token ids by exactly as many tokens as they are asked for, greedily unless a run samples, with EOS off,
and are timed by the same clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from bench.machine import synchronize
from bench.provenance import public_argument
from bench.record import WARMED_UP
from selfspec import SelfSpecGenerator

GREEDY: Mapping[str, Any] = {"do_sample": False, "eos_token_id": []}
"""Arguments of `generate` for measurements that always yield as many tokens as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One timed continuation.

    tokens: the new ones. seconds: of the whole call, prefill included, tokenisation not. time_to_first_token: seconds
    until the first new token was there. decode_seconds: from then to the end, None where the first token was timed in
    another call. processor_seconds: of all threads, of selfspec's engines. stats: the engine's own counts
    (`GenerationStats.as_dict`), None if it keeps none.
    """

    tokens: tuple[int, ...]
    seconds: float
    time_to_first_token: float | None = None
    decode_seconds: float | None = None
    processor_seconds: float | None = None
    stats: Mapping[str, Any] | None = None

    @classmethod
    def with_first(cls, tokens: Iterable[int], seconds: float, first: float, **more: Any) -> Generation:
        """Describe a run whose first token was there after `first` of `seconds`."""
        times: dict[str, Any] = {"seconds": seconds, "time_to_first_token": first, "decode_seconds": seconds - first}
        return cls(tokens=tuple(tokens), **times, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """Many texts continued together. tokens: the new ones of each. seconds: from the call to the last of them.

    decode_tokens, decode_seconds: while all texts were past their prompts and none was complete; None where that is not seen.
    """

    tokens: list[list[int]]
    seconds: float
    decode_tokens: int | None = None
    decode_seconds: float | None = None

    @classmethod
    def after_prompts(cls, tokens: list[list[int]], seconds: float, prompt_seconds: float) -> BatchRun:
        """Describe texts that all have their first token after `prompt_seconds` of `seconds`, and end together."""
        count = sum(len(text) - 1 for text in tokens)
        return cls(tokens=tokens, seconds=seconds, decode_tokens=count, decode_seconds=seconds - prompt_seconds)


class EngineLostError(RuntimeError):
    """An engine in a process of its own crashed, raised or did not answer. mistake: what it said of the user's value."""

    def __init__(self, message: str, mistake: str | None = None) -> None:
        super().__init__(message)
        self.mistake = mistake


class TimedEngine:
    """Something that continues token ids. An engine implements what the commands that take it call.

    name: short and unique, for records; label: for tables. warmed_up: it goes on learning from prompt to prompt.
    weights: what the run's weights were rounded to ("int4", ..), which makes another model of them; None for the run's own.
    arithmetic: the dtype whose near-ties its outputs are judged by; None for the first engine's.
    """

    name: str
    label: str
    warmed_up: bool = False
    weights: str | None = None
    arithmetic: torch.dtype | None = None

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """Continue a prompt, int64 [n], timed. repeat: number of the run; sampled runs draw with another seed in each."""
        raise NotImplementedError

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """Continue several prompts, int64 [n] each, in shared passes, timed."""
        raise NotImplementedError

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the full model's logits after the ids, int64 [n]: floats [vocab] on the CPU."""
        raise NotImplementedError

    def answer_length(self, prompt: Tensor, max_new_tokens: int) -> int:
        """Return how many tokens the answer has where the model ends it. Only selfspec's first engine is asked."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget what was learned from warm-up runs."""


class SelfSpecEngine(TimedEngine):
    """selfspec with one policy; "ar" is plain decoding (num_speculations=0).

    The policy forgets what it learned before every run, so that a run's rounds do not depend on what was measured before.
    With `warmed_up` it starts every run on a prompt with what it had learned from one run on each prompt before it.
    sampling: arguments of `generate`, the seed of a prompt's first run among them; None for greedy decoding. weights: see
    `TimedEngine`. as_found: the policy is left as it is, as a user has it: all that a first call does is in its time.
    """

    _prompt: Tensor | None
    _known: dict[str, Any] | None  # before this prompt
    _learned: dict[str, Any] | None  # after the last run

    def __init__(
        self,
        generator: SelfSpecGenerator,
        policy: str,
        *,
        warmed_up: bool = False,
        sampling: Mapping[str, Any] | None = None,
        weights: str | None = None,
        as_found: bool = False,
    ) -> None:
        self.weights, self.warmed_up = weights, warmed_up
        self.arithmetic = None if weights else generator.model.weights_dtype
        self._generator = generator
        self._sampling = sampling
        self._policy = policy
        self._as_found = as_found
        self.forget()
        shown = public_argument(policy)
        self.name = f"selfspec:{weights + ':' if weights else ''}{shown}{WARMED_UP if warmed_up else ''}"
        mode = "plain" if policy == "ar" else shown
        self.label = f"selfspec{' ' + weights if weights else ''}, {mode}{', warmed up' if warmed_up else ''}"

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        decoding = dict(GREEDY)
        if self._sampling is not None:
            decoding |= {**self._sampling, "seed": self._sampling["seed"] + repeat}
        device = self._generator.model.device
        if not self._as_found:
            self._prepare(prompt)
        synchronize(device)
        start, processor_start = perf_counter(), process_time()
        result = self._generator.generate(prompt, max_new_tokens=max_new_tokens, policy=self._policy, **decoding)
        synchronize(device)
        seconds, processor = perf_counter() - start, process_time() - processor_start
        if self.warmed_up:
            self._learned = self._generator.resolve_policy(self._policy).state()
        more = {
            "processor_seconds": processor,
            "stats": {**result.stats.as_dict(), "policy": public_argument(self._policy)},
        }
        return Generation.with_first(result.new_tokens, seconds, result.stats.time_to_first_token, **more)

    def _prepare(self, prompt: Tensor) -> None:
        """Let the policy forget, or give it what it knew before the first run on this prompt."""
        policy = self._generator.resolve_policy(self._policy)
        policy.reset()
        if self.warmed_up:
            if self._prompt is None or not torch.equal(prompt, self._prompt):  # a copy, where it came through a pipe
                self._prompt, self._known = prompt, self._learned
            if self._known is not None:
                policy.restore(self._known)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `TimedEngine`. The policy keeps what it learns."""
        start = perf_counter()
        with self._generator.engine() as engine:
            options = {**GREEDY, "max_new_tokens": max_new_tokens, "policy": self._policy}
            places = {engine.add(prompt, **options): place for place, prompt in enumerate(prompts)}
            tokens: list[list[int]] = [[] for _ in prompts]
            began = ended = None
            counted = 0
            while len(engine):
                for progress in engine.step():
                    if progress.error is not None:
                        raise progress.error
                    tokens[places[progress.ticket]] += progress.tokens
                    counted += len(progress.tokens) if began is not None and ended is None else 0
                if began is None and all(tokens):
                    began = perf_counter()
                if ended is None and len(engine) < len(prompts):
                    ended = perf_counter()
        seconds = perf_counter() - start
        assert began is not None
        assert ended is not None
        return BatchRun(tokens=tokens, seconds=seconds, decode_tokens=counted, decode_seconds=ended - began)

    def next_logits(self, ids: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def keep(_: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores[-1].float().cpu())
            return scores

        self._generator.generate(ids, max_new_tokens=1, policy="ar", logits_processor=[keep], **GREEDY)
        return seen[0]

    def answer_length(self, prompt: Tensor, max_new_tokens: int) -> int:
        result = self._generator.generate(prompt, max_new_tokens=max_new_tokens, policy="ar", do_sample=False)
        return result.stats.num_new_tokens

    def forget(self) -> None:
        self._prompt, self._known, self._learned = None, None, None
