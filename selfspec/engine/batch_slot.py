"""One sequence's slot in an engine: the sequence, what it holds on to, and what its result will say."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from policies import Policy, RoundRecord
from selfspec.engine.draft_choice import make_for
from selfspec.engine.hidden_states import compute_shadow
from selfspec.engine.model_source import BoundModel
from selfspec.engine.policy_loans import BatchPolicies
from selfspec.engine.request import Request
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.sequence import Sequence
from selfspec.engine.torch_mode import engine_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundRequest:
    """A checked call of `generate`, bound to the model as it was then.

    started: `perf_counter` when the user called. calibration_seconds: spent since then on the policy. tokenizer: for the
    result's text; None for no text.
    """

    bound: BoundModel
    request: Request
    policy: Policy
    tokenizer: PreTrainedTokenizerBase | None
    started: float
    calibration_seconds: float
    keep_trace: bool


class BatchSlot:
    """A sequence in the engine. batch_size: of the engine once it has joined.

    policy_lock: held while its policy is at work. leaves_text: whether a later sequence may go on from this one's rows.
    """

    def __init__(self, ticket: int, call: BoundRequest, policies: BatchPolicies, batch_size: int) -> None:
        self.ticket, self.call = ticket, call
        self._held = ExitStack()
        self._records: list[RoundRecord] = []
        self._first_token_seconds = 0.0
        self._closed = False
        self.leaves_text = False
        bound, request = call.bound, call.request
        try:
            self._cache_slot = self._held.enter_context(
                bound.pool.lend(
                    request.prompt.numel() + request.stops.max_new_tokens,
                    request.prompt,
                    request.owner,
                )
            )
            policy, self.policy_lock = self._held.enter_context(policies.lend(call.policy))
            with engine_mode(bound.model.device), self.policy_lock:
                policy.expect_batch_size(batch_size)
                self.sequence = Sequence(bound.model, self._cache_slot.cache, request, policy, self._cache_slot.kept)
            self._cache_slot.begin_sequence(self.sequence.prompt_read)
            observes = self.sequence.observes
            make_for(bound.model, bound.draft_weights, call.policy.name, observes.bits)
            self.leaves_text = True
        except BaseException:
            self.close()
            raise

    @property
    def cache_bytes(self) -> int:
        return self._cache_slot.cache.num_bytes

    def complete(self, output: StepOutput) -> None:
        """Count what the sequence got, and add its result when it has ended. An error in making that is its own."""
        if output.error is None:
            try:
                self._count(output.record)
                output.result = self._result() if self.sequence.stop_reason is not None else None
            except Exception as error:
                output.error = error
        self.leaves_text = output.error is None
        output.ticket = self.ticket

    def _count(self, record: RoundRecord | None) -> None:
        if not self._first_token_seconds:
            self._first_token_seconds = perf_counter() - self.call.started
        if record is not None and self.call.keep_trace:
            compute_shadow(record)
            if not self._records or self._records[-1].index < record.index:  # not again, if it broke off here
                self._records.append(record)

    def close(self) -> None:
        """Give everything back."""
        if self._closed:
            return
        try:
            if self.leaves_text and self.call.bound.pool.reuses:
                tokens = self.sequence.tokens[0, : self.sequence.num_cached]
                self._cache_slot.end_sequence(tokens, self.sequence.states.kept)
        finally:
            self.leaves_text = False  # the cache slot may be another's when an interrupted close is repeated
            self._held.close()
            self._closed = True

    def _result(self) -> GenerationResult:
        call, sequence = self.call, self.sequence
        num_prompt = call.request.prompt.numel()
        ids = sequence.tokens[:, : sequence.length].to("cpu", copy=True)
        text = None
        if call.tokenizer is not None:
            text = call.tokenizer.decode(ids[0, num_prompt:], skip_special_tokens=True)
            assert isinstance(text, str)
        stats = sequence.stats.finish(
            num_prompt_tokens=num_prompt,
            num_new_tokens=sequence.num_new,
            num_reused_tokens=sequence.num_reused,
            seconds=perf_counter() - call.started,
            prefill_seconds=sequence.prefill_seconds,
            calibration_seconds=call.calibration_seconds,
            first_token=self._first_token_seconds,
            cache_bytes=self.cache_bytes,
            kernels=call.bound.model.kernels,
        )
        assert sequence.stop_reason is not None
        return GenerationResult(
            sequences=ids,
            text=text,
            stop_reason=sequence.stop_reason,
            stats=stats,
            policy=call.policy.name,
            trace=tuple(self._records) if call.keep_trace else None,
        )
