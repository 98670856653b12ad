"""One call of `generate` or `stream`, from its checked request to its result."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies import Policy, RoundRecord
from selfspec.decoding import Decoding
from selfspec.passes import EagerRunner, Runner
from selfspec.request import Request
from selfspec.runtime.model_source import BoundModel, ModelSource
from selfspec.runtime.policy_use import use
from selfspec.runtime.torch_mode import engine_mode
from selfspec.sampling import NonFiniteLogitsError
from selfspec.shadow import settle
from selfspec.stats import GenerationStats
from selfspec.stop_conditions import StopReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class GenerationResult:
    """What `generate` returns.

    sequences: int64 [1, prompt + new] on the CPU. text: the new text without special tokens, None without a tokenizer.
    policy: the name of the policy that ran. trace: every round's record, None unless asked for.
    """

    sequences: Tensor
    text: str | None
    stop_reason: StopReason
    stats: GenerationStats
    policy: str
    trace: tuple[RoundRecord, ...] | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The generated ids, the EOS token included if there was one."""
        return self.sequences[0, self.stats.num_prompt_tokens :].tolist()

    def __repr__(self) -> str:
        new, stats = self.new_tokens if self.text is None else self.text, self.stats
        shown = repr(new[:_SHOWN]) + ("..." if len(new) > _SHOWN else "")
        return (
            f"GenerationResult({shown}, {stats.num_new_tokens} tokens, stop_reason={self.stop_reason!r}, "
            f"policy={self.policy!r}, {stats.tokens_per_second:.0f} tokens/s)"
        )


Committed = tuple[list[int], RoundRecord | None]
"""Tokens that prefill or a round committed, and the round's record; prefill has none."""

_SHOWN = 60  # characters, or ids, of the new text in a repr


class Call:
    """Runs one checked request. It keeps the model that it began with, and a runner that no other call has, to its end.

    started: `perf_counter` when the user called. calibration_seconds: spent since then on the policy.
    tokenizer: for the result's text, None for none.
    """

    def __init__(
        self,
        models: ModelSource,
        bound: BoundModel,
        request: Request,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        started: float,
        calibration_seconds: float = 0.0,
        keep_trace: bool,
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.result: GenerationResult | None = None
        self._models, self._bound, self._policy = models, bound, policy
        self._started, self._keep_trace = started, keep_trace
        self._calibration_seconds = calibration_seconds

    def rounds(self) -> Generator[Committed]:
        """Yield the committed tokens of prefill (its record is None) and of every round; then `result` is set.

        Whoever does not exhaust it must close it, which ends the call.
        """
        request = self.request
        num_tokens = request.prompt.numel() + request.stops.max_new_tokens
        with self._bound.runners.lend(num_tokens) as runner, use(self._policy) as (policy, at_work):
            try:
                yield from self._run(runner, policy, at_work)
            except NonFiniteLogitsError:
                runner.clear()
                raise
            finally:
                self._models.called(perf_counter() - self._started)

    def _run(self, runner: Runner, policy: Policy, at_work: threading.RLock) -> Generator[Committed]:
        model = self._bound.model
        captures, capture_seconds = runner.num_captures, runner.capture_seconds
        first_token_seconds = 0.0
        records: list[RoundRecord] = []
        with engine_mode(model.device), at_work:
            decoding = Decoding(model, runner.cache, self.request, policy, runner)
        rounds = decoding.run()
        while True:
            with engine_mode(model.device), at_work:  # both are left while whoever reads the tokens is at work
                committed = next(rounds, None)
            if decoding.capture_error is not None:
                self._bound.runners.give_up_graphs(decoding.capture_error)
            if committed is None:
                break
            if committed[1] is None:
                first_token_seconds = perf_counter() - self._started
            elif self._keep_trace:
                records.append(settle(committed[1]))
            yield committed
        num_prompt = self.request.prompt.numel()
        sequences = decoding.tokens[:, : decoding.length].to("cpu", copy=True)
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(sequences[0, num_prompt:], skip_special_tokens=True)
            assert isinstance(text, str)
        kind = "eager" if isinstance(decoding.runner, EagerRunner) else "captured"
        stats = decoding.stats.finish(
            num_prompt_tokens=num_prompt,
            seconds=perf_counter() - self._started,
            prefill_seconds=decoding.prefill_seconds,
            calibration_seconds=self._calibration_seconds,
            first_token=first_token_seconds,
            cache_bytes=runner.cache.num_bytes,
            runner=kind,
            kernels=self._bound.model.kernels if kind == "eager" else None,  # what is captured are PyTorch's operators
            num_captures=runner.num_captures - captures,
            capture_seconds=runner.capture_seconds - capture_seconds,
        )
        assert decoding.stop_reason is not None
        self.result = GenerationResult(
            sequences=sequences,
            text=text,
            stop_reason=decoding.stop_reason,
            stats=stats,
            policy=self._policy.name,
            trace=tuple(records) if self._keep_trace else None,
        )
