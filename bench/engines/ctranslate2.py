"""CTranslate2 as an engine to compare with, on the CPU: a folder that its converter wrote.

Its own defaults hold, but for the number of threads. Weights that it has no arithmetic for become float32 when they are
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import ctranslate2
from torch import Tensor

from bench.machine.throughput import BatchRun, after_prompts
from layerskip_models.kernels.threads import num_threads


class CTranslate2Texts:
    """Greedy decoding by `ctranslate2.Generator`. Raises ValueError or RuntimeError, as it does, for a bad folder."""

    def __init__(self, path: Path, name: str, label: str) -> None:
        self.name, self.label = name, label
        self.weights: str | None = label
        self._words: list[str] = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(str(path), device="cpu", inter_threads=1, intra_threads=num_threads())

    @property
    def arithmetic(self) -> str:
        """What it computes in, such as "int8_float32"."""
        return str(self._generator.compute_type)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`. It takes a token's word for its id. How long it reads prompts is not seen from outside, so that
        is the time of another call, for one token."""
        texts = [[self._words[token] for token in prompt.tolist()] for prompt in prompts]
        _, first = self._call(texts, 1)
        tokens, seconds = self._call(texts, max_new_tokens)
        return after_prompts(tokens, seconds, first)

    def _call(self, texts: list[list[str]], max_new_tokens: int) -> tuple[list[list[int]], float]:
        start = perf_counter()
        results = self._generator.generate_batch(
            texts,
            min_length=max_new_tokens,
            max_length=max_new_tokens,
            end_token=[],
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        seconds = perf_counter() - start
        return [[*result.sequences_ids[0]] for result in results], seconds


def ctranslate2_version() -> str:
    """The library's version."""
    return str(ctranslate2.__version__)
