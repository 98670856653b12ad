"""Many prompts in one call: their options, their results and their errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from selfspec.engine.batch_slot import BoundRequest
from selfspec.engine.call import run_calls
from selfspec.engine.results import GenerationResult

DEFAULT_BATCH_SIZE = 8
"""Number of texts decoded together. A larger batch raises throughput on a CPU only a little, and makes each text slower."""
_LISTS = ("eos_token_id", "stop_strings", "logits_processor", "stopping_criteria", "copy_from")


class BatchError(RuntimeError):
    """Some texts of a batch failed; the others are complete.

    results: in the order of the prompts, None for those that failed. errors: by index.
    """

    def __init__(self, results: Sequence[GenerationResult | None], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(results)} texts could not be completed; text {first}: {errors[first]}. "
            "This error's `results` holds the others"
        )
        self.results, self.errors = list(results), dict(errors)


def options_per_text(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The arguments of each text, from arguments that hold one value for all texts or a list with one for each.

    Arguments that are lists themselves, such as stop_strings, need a list of lists to hold one for each text.
    Raises ValueError for a list of the wrong length.
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
    """Check every call of a batch. Raises the same errors as `generate`, naming the text."""
    checked = []
    for index, (prompt, own) in enumerate(zip(prompts, options_per_text(options, len(prompts)))):
        try:
            checked.append(check(prompt, **own))
        except (ValueError, TypeError) as error:
            error.args = (f"text {index}: {error}",)
            raise
    return checked


def completed(checked: Sequence[BoundRequest], batch_size: int) -> Generator[tuple[int, GenerationResult | Exception]]:
    """(index, result or error) of each call when it ends; arguments as for `run_calls`. Close it if you do not exhaust it."""
    with closing(run_calls(checked, batch_size, raises=False)) as steps:
        for progress in steps:
            ended = progress.result or progress.error
            if ended is not None:
                yield progress.ticket, ended
