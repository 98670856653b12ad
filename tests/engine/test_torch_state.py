"""Whatever the caller has set in PyTorch (default dtype, autocast, gradients), the output is the model's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from batched_runs import LAYOUTS
from callbacks import Recorder
from decoding import default_dtype
from layerskip_models import from_transformers
from layerskip_models.kernels import check
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]
GREEDY: dict[str, Any] = {"max_new_tokens": 12}
SAMPLING: dict[str, Any] = {
    **GREEDY, "do_sample": True, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "seed": 4, "repetition_penalty": 1.1,
}  # fmt: skip


STATES: dict[str, Any] = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "meta": lambda: torch.device("meta"),
}


CALLS = (
    ("ls:2-4", False), ("ls:2-4", True), ("auto:cost=layers", False), ("auto:cost=layers", True), ("del", True),
    ("ls:1-6+spide", True), ("ls:2-5+svip", False), ("dv:2", True), ("fs:2-3", False), ("adaedl:2", True), ("copy:4", False),
)  # fmt: skip
"""Policies that decide alike in every run, and whether they sample."""


def texts(engine: SelfSpecGenerator) -> list[list[int]]:
    """Each by a policy that has learned nothing before."""
    found = []
    for name, sampled in CALLS:
        engine.resolve_policy(name).reset()
        found.append(engine.generate(PROMPT, policy=name, **(SAMPLING if sampled else GREEDY)).new_tokens)
    return found


def engine_for(layout: Layout = "plain") -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(seed=3, late_scale=0.5), layout=layout)
    return SelfSpecGenerator(model, tiny_tokenizer())


@cache
def expected_texts(layout: Layout) -> list[list[int]]:
    """In the state that PyTorch begins in, by a generator that no other state has seen."""
    return texts(engine_for(layout))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_callers_state_changes_no_text(state: str, layout: Layout) -> None:
    """The generator is made outside of that state or in it; what a call keeps for later calls serves these, too.

    Scratch memory of the kernels took PyTorch's default dtype once: half as large in bfloat16, and written beyond.
    """
    expected, engine, llama = expected_texts(layout), engine_for(layout), tiny_llama(seed=3, late_scale=0.5)
    with STATES[state]():
        assert texts(engine) == expected
        inside = engine if state == "meta" else SelfSpecGenerator(from_transformers(llama, layout=layout))
        assert texts(inside) == expected
        assert layout == "plain" or state == "meta" or check.fault() is None
        inside.generate(PROMPT, max_new_tokens=12, policy="auto")  # its costs are measured in here
    assert texts(engine) == texts(inside) == expected


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
def test_callbacks_run_in_the_callers_mode(mode: Any) -> None:
    """A streamer may train, or run a model of its own under autocast: the engine's mode is not theirs."""
    seen: list[tuple[bool, bool, bool]] = []

    def now() -> tuple[bool, bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    class Watching(Recorder):
        def put(self, value: torch.Tensor) -> None:
            seen.append(now())

    context: AbstractContextManager[Any] = mode()
    with context, torch.autocast("cpu", torch.bfloat16):
        expected = now()
        engine_for().generate(PROMPT, policy="ls:2-4", streamer=Watching(), **GREEDY)
    assert len(seen) > 2
    assert set(seen) == {expected}


def test_what_is_returned_can_be_trained_on() -> None:
    """Sequences and streamed blocks are ordinary tensors: an embedding keeps its indices for the backward pass."""
    llama, recorder = tiny_llama(seed=3), Recorder()
    result = SelfSpecGenerator(llama).generate(PROMPT, policy="ls:2-4", streamer=recorder, **GREEDY)
    for ids in (result.sequences, torch.cat(recorder.values)[None]):
        llama(input_ids=ids, labels=ids).loss.backward()
    assert not result.sequences.is_inference()
