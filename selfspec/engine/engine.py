"""Many sequences in one pass: they join and leave between rounds, and whoever drives the engine gets results as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from layerskip_models.draft_weights import make_for
from layerskip_models.kernels.threads import reclaim_buffers
from layerskip_models.prefill import MAX_ROWS
from policies import Policy, RoundRecord
from selfspec.cache.hidden_states import DeferredShadow
from selfspec.engine.model_source import BoundModel
from selfspec.engine.policy_store import BatchPolicies, keep_learned
from selfspec.engine.request import Request
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.round import Outputs, emit, read_prompts, run_round
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.runner import engine_mode
from selfspec.engine.sequence import Sequence
from selfspec.engine.stopping import StopReason
from selfspec.messages import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_ROWS = 64
"""Prompt rows that are read between two rounds while other sequences decode: none of them waits longer than for that."""
FULL_ROWS = 128
"""Rows from which on a pass is bound by arithmetic, and another prompt in it would only delay the first."""


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


class Engine:
    """Decodes sequences together. Made by `SelfSpecGenerator.engine`; for one thread at a time.

    A row gets cheaper as sequences join, since all share one reading of the weights. On a CPU with our own kernels a sequence
    gets bit for bit what it would get alone, except when sampling with a policy that decides by measured time ("auto").
    """

    def __init__(self, check: Callable[..., BoundRequest] | None = None) -> None:
        self._check = check
        self._next = 0
        self._slots: dict[int, _Slot] = {}
        self._policies = BatchPolicies()
        self._runners: dict[BoundModel, EagerRunner] = {}  # for each copy of the weights in use
        # What sequences got in this step, and what of that may be returned. A step that raises leaves both to the next one.
        self._got: Outputs = []
        self._outputs: list[StepOutput] = []

    def __len__(self) -> int:
        """Sequences that are not complete, or whose end `step` has not returned yet because it raised."""
        return len(self._slots) + len({output.ticket for output in self._outputs} - self._slots.keys())

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Sequences that are not complete, by ticket."""
        return {ticket: slot.sequence for ticket, slot in self._slots.items()}

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV caches in use."""
        return sum(slot.sequence.cache.num_bytes for slot in self._slots.values())

    def add(self, prompt: str | list[int] | Tensor | Messages | None = None, **options: object) -> int:
        """Let a sequence join. Arguments and errors are those of `SelfSpecGenerator.generate`, without `streamer`.

        Returns its ticket. Nothing is run before the next step.
        """
        assert self._check is not None
        return self.join(self._check(prompt, **options))

    def join(self, call: BoundRequest, following: int = 0) -> int:
        """Let an already checked call join. following: others that join before the next step, so that policies know."""
        self._next += 1
        self._slots[self._next] = _Slot(self._next, call, self._policies, len(self._slots) + 1 + following)
        return self._next

    def cancel(self, ticket: int) -> None:
        """Let a sequence go. What it held is free at once. Does nothing for one that is complete."""
        self._outputs = [output for output in self._outputs if output.ticket != ticket]
        self._leave(ticket)

    def _leave(self, ticket: int) -> None:
        slot = self._slots.get(ticket)
        if slot is not None:
            slot.close()
            self._slots.pop(ticket, None)

    def close(self) -> None:
        """Cancel all sequences, and give back what the engine holds."""
        for ticket in [*self._slots]:
            self.cancel(ticket)
        self._give_back_runners(set())
        reclaim_buffers()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> list[StepOutput]:
        """Read the next piece of waiting prompts, then run one round of all sequences that are past theirs.

        Returns the output of each sequence that got something; a step that only reads may return none. An error of one
        sequence is in its `StepOutput`, and the others go on.

        Raises what concerns the engine as a whole: no memory, say, or Ctrl-C. Nothing is lost then: every sequence goes on
        from what it had committed, and the next step returns what this one had found. Greedy sequences, and those that sample
        with a seed and a policy that does not learn, come out as without the error, others still follow the model's
        distribution. Records of rounds that were broken off may be missing in the statistics and the trace.
        """
        self._report()  # first, what a step that broke off has left
        for slot in self._slots.values():
            if slot.sequence.unsent:
                emit(slot.sequence, self._got, StepOutput(tokens=slot.sequence.unsent))
        self._report()
        groups: dict[BoundModel, list[_Slot]] = {}  # sequences of one copy of the weights can share passes
        ended = {output.ticket for output in self._outputs if output.ended}
        for slot in self._slots.values():
            if slot.ticket not in ended:
                groups.setdefault(slot.call.bound, []).append(slot)
        for bound, slots in groups.items():
            # Left again before the caller works with the tokens.
            with engine_mode(bound.model.device), bound.model.on_one_team(), ExitStack() as held:
                for slot in slots:
                    held.enter_context(slot.policy_lock)
                waiting = [slot.sequence for slot in slots if slot.sequence.reading]
                going = [slot.sequence for slot in slots if not slot.sequence.reading]
                if waiting:  # in the order in which they came, several in a pass if they are short
                    # Where nobody waits for this pass, it may be as long as memory allows.
                    most, enough = (PIECE_ROWS, PIECE_ROWS) if going else (MAX_ROWS, FULL_ROWS)
                    read_prompts(waiting, most, enough, self._got)
                if going:
                    run_round(going, self._runner(bound), self._got)
            self._report()
        for output in self._outputs:
            if output.ended:
                self._leave(output.ticket)
        found, self._outputs = self._outputs, []
        return found

    def _report(self) -> None:
        """Turn what sequences got into what the caller gets."""
        slots = {slot.sequence: slot for slot in self._slots.values()} if self._got else {}
        while self._got:
            sequence, output = self._got[0]
            slot = slots.get(sequence)
            if slot is not None:
                slot.complete(output)
            outputs = [] if slot is None else [output]
            # Nothing is called here, so no signal comes between: see `emit`.
            self._outputs, self._got = [*self._outputs, *outputs], self._got[1:]

    def _runner(self, bound: BoundModel) -> EagerRunner:
        if bound not in self._runners:
            self._give_back_runners({slot.call.bound for slot in self._slots.values()})
            self._runners[bound] = bound.take_runner()
        return self._runners[bound]

    def _give_back_runners(self, in_use: set[BoundModel]) -> None:
        for bound in [one for one in self._runners if one not in in_use]:
            bound.idle_runners.append(self._runners.pop(bound))


class _Slot:
    """A sequence in the engine, what it holds on to, and what its result will say.

    batch_size: of the engine once it has joined. policy_lock: held while its policy is at work.
    """

    def __init__(self, ticket: int, call: BoundRequest, policies: BatchPolicies, batch_size: int) -> None:
        self.ticket, self.call = ticket, call
        self._held = ExitStack()
        self._records: list[RoundRecord] = []
        self._first_token_seconds = 0.0
        self._closed = False
        self._leaves_text = False  # whether a later sequence may go on from this one's rows
        bound, request = call.bound, call.request
        try:
            num_tokens = request.prompt.numel() + request.stops.max_new_tokens
            self._place = self._held.enter_context(bound.pool.lend(num_tokens, request.prompt, request.owner))
            policy, self.policy_lock = self._held.enter_context(policies.lend(call.policy))
            with engine_mode(bound.model.device), self.policy_lock:
                policy.expect_batch_size(batch_size)
                self.sequence = Sequence(bound.model, self._place.cache, request, policy, self._place.kept)
            self._place.begin_sequence(self.sequence.prompt_read)
            make_for(bound.model, bound.draft_weights, call.policy.name, self.sequence.observes.bits)
            self._leaves_text = True
        except BaseException:
            self.close()
            raise

    def complete(self, output: StepOutput) -> None:
        """Count what the sequence got, and add its result when it has ended. An error in making that is its own."""
        if output.error is None:
            try:
                self._count(output.record)
                if self.sequence.stop_reason is not None:
                    output.result = self._result(self.sequence.stop_reason)
                    keep_learned(self.call.bound, self.sequence.policy)
            except Exception as error:
                output.error = error
        self._leaves_text = output.error is None
        output.ticket = self.ticket

    def _count(self, record: RoundRecord | None) -> None:
        if not self._first_token_seconds:
            self._first_token_seconds = perf_counter() - self.call.started
        if record is not None and self.call.keep_trace:
            for shadow in (record.shadow, record.rejected):
                if isinstance(shadow, DeferredShadow):
                    shadow.compute_all()  # a record that is kept holds no hidden states
            if not self._records or self._records[-1].index < record.index:  # not again, if it broke off here
                self._records.append(record)

    def close(self) -> None:
        """Give everything back."""
        if self._closed:
            return
        try:
            if self._leaves_text and self.call.bound.pool.reuses:
                tokens = self.sequence.tokens[0, : self.sequence.num_cached]
                self._place.end_sequence(tokens, self.sequence.states.kept)
        finally:
            self._leaves_text = False  # the cache may be another's when an interrupted close is repeated
            self._held.close()
            self._closed = True

    def _result(self, reason: StopReason) -> GenerationResult:
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
            peak_cache_bytes=sequence.cache.num_bytes,
            runner=call.bound.runner,
            kernels=call.bound.model.kernels,
        )
        trace = tuple(self._records) if call.keep_trace else None
        return GenerationResult(
            sequences=ids, text=text, stop_reason=reason, stats=stats, policy=call.policy.name, trace=trace
        )


def run_calls(
    calls: list[BoundRequest], batch_size: int | None = None, *, raises: bool = True
) -> Generator[StepOutput]:
    """Decode `batch_size` calls at a time, by default all at once; the next one joins when one is complete.

    Yields what each step brought, with the index of the call as its ticket. With several calls, the times in a call's
    statistics start when it joins. raises: raise the first error of a call instead of yielding it. Close the generator if you
    do not exhaust it.
    """
    batch_size = len(calls) if batch_size is None else batch_size
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with Engine() as engine:
        indices: dict[int, int] = {}
        waiting = deque(enumerate(calls))
        while True:
            while len(engine) < batch_size and waiting:
                index, call = waiting.popleft()
                try:
                    if len(calls) > 1:
                        call = replace(call, started=perf_counter() - call.calibration_seconds)
                    indices[engine.join(call, min(batch_size - len(engine) - 1, len(waiting)))] = index
                except Exception as error:
                    if raises:
                        raise
                    yield StepOutput(ticket=index, tokens=[], error=error)
            if not len(engine):
                return
            for output in engine.step():
                if raises and output.error is not None:
                    raise output.error
                output.ticket = indices[output.ticket]
                yield output
