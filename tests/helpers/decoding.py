"""Decoding one text without an engine, for tests that look into its sequence; and within another state of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from selfspec.engine.results import StepOutput
from selfspec.engine.round import read_prompts, run_round
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sequence import Sequence


def decode(sequence: Sequence, runner: Runner) -> Iterator[StepOutput]:
    """From the prompt to the stop: what each step commits. Raises what ends the text early."""
    while sequence.reading:
        for _, output in read_prompts([sequence]):
            yield _sound(output)
    while sequence.stop_reason is None:
        (output,) = run_round([sequence], runner)
        yield _sound(output)


def _sound(output: StepOutput) -> StepOutput:
    if output.error is not None:
        raise output.error
    return output


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
