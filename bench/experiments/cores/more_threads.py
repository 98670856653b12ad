"""Speed with any number of threads, also with more of them than there are cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from bench.engines.own import GREEDY
from bench.experiments.busy.busy import TimedSelfSpec, measure_cell
from bench.record import Line
from layerskip_models.kernels.threads import on_threads
from selfspec import SelfSpecGenerator

POLICIES = ("ar", "auto")


@contextmanager
def _one_operator_thread() -> Iterator[None]:
    """PyTorch's own team would take cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_threads(
    generator: SelfSpecGenerator, prompts: Sequence[Tensor], threads: int, seconds: float, max_new_tokens: int
) -> Iterator[Line]:
    """Decode with each policy, then read the prompts, with this number of threads. Yields a line for each."""
    with on_threads(threads), _one_operator_thread():
        for policy in POLICIES:
            engine = TimedSelfSpec(generator, policy, policy)
            cell = measure_cell(engine, prompts, max_new_tokens, seconds, generator.model.device)
            yield {**cell, "what": policy, "threads": threads}
        start, tokens, turn = perf_counter(), 0, 0
        while perf_counter() - start < seconds:
            generator.generate(prompts[turn % len(prompts)], max_new_tokens=1, **GREEDY, policy="ar")
            tokens, turn = tokens + prompts[turn % len(prompts)].numel(), turn + 1
        yield {
            "kind": "cell", "what": "prompt", "threads": threads, "tokens": tokens, "seconds": perf_counter() - start,
        }  # fmt: skip
