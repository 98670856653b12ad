"""Many sequences in one pass: they join and leave between rounds, and whoever drives the engine gets results as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from layerskip_models.kernels.threads import reclaim_buffers
from layerskip_models.prefill import MAX_ROWS
from selfspec.engine.batch_slot import BatchSlot, BoundRequest
from selfspec.engine.model_source import BoundModel
from selfspec.engine.policy_loans import BatchPolicies
from selfspec.engine.results import StepOutput
from selfspec.engine.round import Outputs, emit, read_prompts, run_round
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sequence import Sequence
from selfspec.engine.torch_mode import engine_mode
from selfspec.messages import Messages

PIECE_ROWS = 64
"""Prompt rows that are read between two rounds while other sequences decode: none of them waits longer than for that."""
FULL_ROWS = 128
"""Rows from which on a pass is bound by arithmetic, and another prompt in it would only delay the first."""


class Engine:
    """Decodes sequences together. Made by `SelfSpecGenerator.engine`; for one thread at a time.

    Every sequence has its own KV cache, policy state and random generator. A row gets cheaper as sequences join, since all
    share one reading of the weights; policies that measure cost know the batch size. On a CPU with our own kernels a sequence
    gets bit for bit what it would get alone, except when sampling with a policy that decides by measured time ("auto").
    """

    def __init__(self, check: Callable[..., BoundRequest] | None = None) -> None:
        self._check = check
        self._next = 0
        self._slots: dict[int, BatchSlot] = {}
        self._policies = BatchPolicies()
        # For each copy of the weights in use.
        self._runners: dict[BoundModel, tuple[Runner, ExitStack]] = {}
        # What sequences got in this step, and what of that is ready to be returned. A step that raises leaves both to the
        # next one.
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
        return sum(slot.cache_bytes for slot in self._slots.values())

    def add(self, prompt: str | list[int] | Tensor | Messages | None = None, **options: object) -> int:
        """Let a sequence join. Arguments and errors are those of `SelfSpecGenerator.generate`, without `streamer`.

        Returns its ticket. Nothing is run before the next step.
        """
        assert self._check is not None
        return self.join(self._check(prompt, **options))

    def join(self, call: BoundRequest, following: int = 0) -> int:
        """Let an already checked call join. following: others that join before the next step, so that policies know."""
        self._next += 1
        self._slots[self._next] = BatchSlot(self._next, call, self._policies, len(self._slots) + 1 + following)
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
        self._let_go()
        reclaim_buffers()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> list[StepOutput]:
        """Read the next piece of waiting prompts, then run one round of all sequences that are past theirs.

        Returns the output of each sequence that got something; a step that only reads may return none. An error of one
        sequence is in its `StepOutput`, and the others go on.

        Raises what concerns the engine as a whole: no memory, say, or Ctrl-C. Nothing is lost then. Every sequence goes on
        from what it had committed, and the next step returns what this one had found. Greedy sequences, and those that sample
        with a seed and a policy that does not learn, come out as without the error. Others are still drawn from the model's
        distribution. Records of rounds that were broken off may be missing in the statistics and the trace.
        """
        self._catch_up()
        for slots in self._by_model():
            bound = slots[0].call.bound
            model = bound.model
            # Left again before the caller works with the tokens.
            with engine_mode(model.device), model.on_one_team(), _Locked(slots):
                waiting = [slot for slot in slots if slot.sequence.reading]
                going = [slot for slot in slots if not slot.sequence.reading] if waiting else slots
                if waiting:
                    self._read(waiting, alone=not going)
                if going:
                    run_round([slot.sequence for slot in going], self._eager(bound), self._got)
            self._report()
        for output in self._outputs:
            if output.ended:
                self._leave(output.ticket)
        found, self._outputs = self._outputs, []
        return found

    def _catch_up(self) -> None:
        """Report what a step that broke off has left; nothing after one that did not."""
        self._report()
        for slot in [*self._slots.values()]:
            if slot.sequence.unsent:
                emit(slot.sequence, self._got, StepOutput(tokens=slot.sequence.unsent))
        self._report()

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

    def _by_model(self) -> list[list[BatchSlot]]:
        """Sequences that can share passes: those of one copy of the weights."""
        groups: dict[BoundModel, list[BatchSlot]] = {}
        ended = {output.ticket for output in self._outputs if output.ended}
        for slot in self._slots.values():
            if slot.ticket not in ended:
                groups.setdefault(slot.call.bound, []).append(slot)
        return [*groups.values()]

    def _read(self, waiting: list[BatchSlot], alone: bool) -> None:
        """Read prompts in the order in which they came, several in a pass if they are short.

        alone: no sequence is past its prompt, so nobody waits for this pass, which may be as long as memory allows.
        """
        most, enough = (MAX_ROWS, FULL_ROWS) if alone else (PIECE_ROWS, PIECE_ROWS)
        read_prompts([slot.sequence for slot in waiting], most, enough, self._got)

    def _eager(self, bound: BoundModel) -> Runner:
        if bound not in self._runners:
            self._let_go()
            held = ExitStack()
            self._runners[bound] = held.enter_context(bound.pool.eager_runner()), held
        return self._runners[bound][0]

    def _let_go(self) -> None:
        """Give back the runners of copies of the weights that no sequence uses any more."""
        in_use = {slot.call.bound for slot in self._slots.values()}
        for bound in self._runners.keys() - in_use:
            self._runners.pop(bound)[1].close()


class _Locked:
    """Holds the locks of these sequences' policies."""

    __slots__ = ("_held", "_locks")

    def __init__(self, slots: list[BatchSlot]) -> None:
        self._locks = [slot.policy_lock for slot in slots]

    def __enter__(self) -> None:
        self._held = ExitStack()
        try:
            for lock in self._locks:
                self._held.enter_context(lock)
        except BaseException:
            self._held.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._held.close()


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
