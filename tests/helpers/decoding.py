"""Decoding one text without an engine, for tests that look into its sequence."""

from __future__ import annotations

from collections.abc import Iterator

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
