"""Many prompts through one engine, a few at a time: the next one joins as soon as a text is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from selfspec.engine.engine import BoundRequest, Engine, GenerationResult

DEFAULT_BATCH_SIZE = 8
"""Texts that are decoded together. With more, throughput on a CPU grows a little still, and so does each text's time."""
_LISTS = ("eos_token_id", "stop_strings", "logits_processor", "stopping_criteria", "copy_from")


class BatchError(RuntimeError):
    """Some texts of a batch could not be completed; the others were.

    results: in the order of the prompts, None for those that could not. errors: why, by index.
    """

    def __init__(self, results: Sequence[GenerationResult | None], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(results)} texts could not be completed; text {first}: {errors[first]}. "
            "This error's `results` holds the others"
        )
        self.results, self.errors = list(results), dict(errors)


def options_per_text(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Keyword arguments for all texts, or one value for each where a list is given -> the arguments of each text.

    For arguments that are lists themselves (stop_strings, say), a list of lists has one for each text.
    Raises ValueError for a list of another length.
    """
    separate = []
    for name, value in options.items():
        if type(value) is list and (
            name not in _LISTS or any(item is None or isinstance(item, list) for item in value)
        ):
            if len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values for {count} prompts: give one for each, or one for all"
                )
            separate.append(name)
    return [
        {name: value[index] if name in separate else value for name, value in options.items()} for index in range(count)
    ]


def check_all(
    check: Callable[..., BoundRequest], prompts: Sequence[Any], options: Mapping[str, Any]
) -> list[BoundRequest]:
    """Every call of a batch, checked before any of them runs. Errors as of `generate`, naming the text."""
    checked = []
    for index, (prompt, own) in enumerate(zip(prompts, options_per_text(options, len(prompts)))):
        try:
            checked.append(check(prompt, **own))
        except (ValueError, TypeError) as error:
            error.args = (f"text {index}: {error}",)
            raise
    return checked


def completed(checked: Sequence[BoundRequest], batch_size: int) -> Generator[tuple[int, GenerationResult | Exception]]:
    """(index, result or why there is none) of each call, as they become complete; `batch_size` decode at a time.

    Whoever does not exhaust it must close it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with Engine() as engine:
        places: dict[int, int] = {}
        waiting = deque(enumerate(checked))
        while True:
            while len(engine) < batch_size and waiting:
                index, call = waiting.popleft()
                try:
                    call = replace(call, started=perf_counter() - call.calibration_seconds)  # it has waited for others
                    places[engine.join(call, min(batch_size - len(engine) - 1, len(waiting)))] = index
                except Exception as error:
                    yield index, error
            if not len(engine):
                return
            for progress in engine.step():
                ended = progress.result or progress.error
                if ended is not None:
                    yield places.pop(progress.ticket), ended
