"""Speed beside processes that want the same cores: what of its quiet speed an engine keeps.

A cell is one engine decoding for some seconds beside a number of busy processes per core. It is bounded by time, not by
tokens: an engine that comes to a halt ends its cell as soon as its next token is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Protocol

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList

from bench.engines.own import GREEDY
from bench.engines.peers import transformers_sequences
from bench.record import Line
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import synchronize

_WORK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
print(flush=True)
while time.monotonic() < end and os.getppid() == parent:
    for _ in range(20000):
        pass
"""


@contextmanager
def busy_processes(count: int, seconds: float) -> Iterator[list[int]]:
    """Run `count` processes of one thread each, which compute without a pause, within the block. Yields their ids.

    seconds: they end by themselves after this time, or when this process is gone; all are killed at the end of the block.
    """
    command = [sys.executable, "-I", "-S", "-c", _WORK, str(os.getpid()), str(seconds)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            # No setsid: Linux may divide the processor between process sessions first, which would change the fair share.
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Timed(Protocol):
    """An engine that can be told when to stop. name: for the record; label: for tables."""

    name: str
    label: str

    def decode(self, prompt: Tensor, max_new_tokens: int, seconds: float) -> int:
        """Continue a prompt, int64 [n], greedily and without EOS, until the seconds are over. Returns the new tokens."""
        ...


class TimedSelfSpec:
    """selfspec with one policy, which keeps what it learns."""

    def __init__(self, generator: SelfSpecGenerator, policy: str, label: str) -> None:
        self.name, self.label = f"selfspec:{policy}", label
        self._generator, self._policy = generator, policy

    def decode(self, prompt: Tensor, max_new_tokens: int, seconds: float) -> int:
        result = self._generator.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            **GREEDY,
            policy=self._policy,
            stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(seconds)]),
        )
        return result.stats.num_new_tokens


class TimedTransformers:
    """transformers' own greedy `generate`."""

    name, label = "transformers:generate", "transformers generate"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def decode(self, prompt: Tensor, max_new_tokens: int, seconds: float) -> int:
        ids = prompt.to(self._model.device).unsqueeze(0)
        stopping = StoppingCriteriaList([MaxTimeCriteria(seconds)])
        sequences = transformers_sequences(self._model, ids, max_new_tokens, stopping_criteria=stopping)
        return sequences.shape[1] - prompt.numel()


def measure_cell(
    engine: Timed,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    seconds: float,
    device: torch.device,
) -> Line:
    """One engine over the prompts in turn, from the first again when they are used up, until the seconds are over.

    cpu_seconds: processor time of this process, all threads.
    """
    synchronize(device)
    before, tokens, turn = process_time(), 0, 0
    start = now = perf_counter()
    while now - start < seconds:
        tokens += engine.decode(prompts[turn % len(prompts)], max_new_tokens, seconds - (now - start))
        synchronize(device)
        now, turn = perf_counter(), turn + 1
    return {
        "kind": "cell",
        "engine": engine.name,
        "tokens": tokens,
        "seconds": now - start,
        "cpu_seconds": process_time() - before,
    }
