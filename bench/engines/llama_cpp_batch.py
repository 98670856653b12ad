"""llama.cpp with many texts in one pass: its parallel slots, through the same C functions as one text."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import llama_cpp
from torch import Tensor

from bench.engines.llama_batches import fill_batch
from bench.engines.llama_cpp import LlamaCppEngine, LlamaCppFile
from bench.machine.throughput import BatchRun, after_prompts


class LlamaCppTexts(LlamaCppFile):
    """Continues texts together, greedily, each a sequence with cells of its own. Arguments as `LlamaCppFile`."""

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`. The context is made before the clock starts."""
        count = len(prompts)
        context = self._new_context(sequences=count)
        batch = llama_cpp.llama_batch_init(sum(len(prompt) for prompt in prompts), 0, 1)
        try:
            start = perf_counter()
            places = self._decode(context, batch, [(text, prompt.tolist(), 0) for text, prompt in enumerate(prompts)])
            tokens = [[self._choice(context, place)] for place in places]
            began = perf_counter()
            for length in range(max_new_tokens - 1):
                rows = [(text, own[-1:], len(prompts[text]) + length) for text, own in enumerate(tokens)]
                for own, place in zip(tokens, self._decode(context, batch, rows)):
                    own.append(self._choice(context, place))
            ended = perf_counter()
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)
        return after_prompts(tokens, ended - start, began - start)

    def _choice(self, context: Any, place: int) -> int:
        token: int = llama_cpp.llama_sampler_sample(self._greedy, context, place)
        return token

    def _decode(self, context: Any, batch: Any, rows: Sequence[tuple[int, list[int], int]]) -> list[int]:
        """One pass over (text, tokens, position of the first) of each text. Returns where each text's last row is."""
        places = fill_batch(batch, rows)
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"{self.label} failed to decode {len(rows)} texts: status {status}")
        return places


class LlamaCppBatch(LlamaCppTexts, LlamaCppEngine):
    """`LlamaCppTexts` with the weights of a transformers model. Arguments as `LlamaCppEngine`."""
