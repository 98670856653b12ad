"""Many prompts in one call: their options, their results and their errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from selfspec.cache.copy_index import CopyStore
from selfspec.engine.engine import BoundRequest, run_calls
from selfspec.engine.results import GenerationResult

_LISTS = ("eos_token_id", "stop_strings", "logits_processor", "stopping_criteria", "copy_from")


class BatchError(RuntimeError):
    """Some texts of a batch failed. results: in order, None for those. errors: by index."""

    def __init__(self, results: Sequence[GenerationResult | None], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        failed = f"{len(errors)} of {len(results)} texts could not be completed; text {first}: {errors[first]}"
        super().__init__(f"{failed}. This error's `results` holds the others")
        self.results, self.errors = list(results), dict(errors)


def check_all(
    check: Callable[..., BoundRequest], prompts: Sequence[Any], options: Mapping[str, Any]
) -> list[BoundRequest]:
    """Check every call of a batch.

    options: each holds one value for all texts, or a list with one for each. The value of some is a list itself, such as
    stop_strings: a list of these is one value for all, unless an item is None or such a value by itself.
    Raises ValueError for a list of the wrong length, and the same errors as `generate`, naming the text.
    """
    separate = {name: value for name, value in options.items() if _is_for_each(name, value)}
    for name, values in separate.items():
        if len(values) != len(prompts):
            raise ValueError(
                f"{name} has {len(values)} values for {len(prompts)} prompts: give one for each, or one for all"
            )
    checked = []
    for index, prompt in enumerate(prompts):
        try:
            checked.append(check(prompt, **{**options, **{name: values[index] for name, values in separate.items()}}))
        except (ValueError, TypeError) as error:
            error.args = (f"text {index}: {error}",)
            raise
    return checked


def _is_for_each(name: str, value: object) -> bool:
    return type(value) is list and (name not in _LISTS or any(_is_whole(name, item) for item in value))


def _is_whole(name: str, item: object) -> bool:
    """Say whether an item of a list is a value of this option by itself. A list of ids to copy from is a part of one."""
    if name == "copy_from" and isinstance(item, list) and all(type(token) is int for token in item):
        return False
    return item is None or isinstance(item, (list, tuple, CopyStore))


def completed(checked: list[BoundRequest], batch_size: int) -> Generator[tuple[int, GenerationResult | Exception]]:
    """Yield (index, result or error) of each call when it ends; arguments as for `run_calls`. Close it if not exhausted."""
    with closing(run_calls(checked, batch_size, raises=False)) as steps:
        for progress in steps:
            ended = progress.result or progress.error
            if ended is not None:
                yield progress.ticket, ended
