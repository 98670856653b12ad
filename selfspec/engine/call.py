"""Running checked calls in an engine of their own: one for `generate` and `stream`, many for `generate_batch`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from time import perf_counter

from selfspec.engine.batch_slot import BoundRequest
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput


def run_calls(
    calls: Sequence[BoundRequest], batch_size: int | None = None, *, raises: bool = True
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
