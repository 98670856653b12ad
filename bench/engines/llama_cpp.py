"""llama.cpp as an engine to compare with, through the package llama-cpp-python: a GGUF file.

Its C functions are called directly, so that no Python of that package is timed, and with llama.cpp's own defaults (a KV cache
in float16 among them) but for the number of threads.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import torch
from torch import Tensor

from bench.engines.llama_batches import fill_batch
from bench.engines.own import Generation
from bench.machine.throughput import BatchRun, after_prompts
from layerskip_models.kernels.threads import num_threads

logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # else it prints how it loads


class LlamaCppFile:
    """Greedy decoding of a GGUF file by llama.cpp, one text or many, on as many threads as our kernels use.

    name, label, weights, arithmetic: see `TimedEngine`. max_tokens: of prompt and continuation together.
    Raises RuntimeError if llama.cpp cannot load it.
    """

    def __init__(
        self,
        path: Path,
        max_tokens: int,
        *,
        name: str = "llama.cpp",
        label: str = "llama.cpp",
        weights: str | None = "the file's, rows in 8 bits",
        arithmetic: torch.dtype | None = None,
    ) -> None:
        self.name, self.label = name, label
        self.weights, self.arithmetic = weights, arithmetic
        self._max_tokens = max_tokens
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError(f"{label} did not load {path.name}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._greedy = llama_cpp.llama_sampler_init_greedy()
        self._context = self._new_context()
        weakref.finalize(self, _free, self._greedy, self._context, self._model)

    def _new_context(self, sequences: int = 1) -> Any:
        """Make room for several texts, each with cells of its own."""
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = sequences * (
            -(-self._max_tokens // 256) * 256 if sequences > 1 else self._max_tokens
        )
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = num_threads()
        return llama_cpp.llama_init_from_model(self._model, settings)

    def _begin(self, ids: Sequence[int]) -> None:
        """Forget the context's text and begin another."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        self._run(ids)

    def _run(self, ids: Sequence[int]) -> None:
        """Append ids to the context's text."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if status:
            raise RuntimeError(f"{self.label} failed to decode: status {status}")

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`."""
        ids = prompt.tolist()
        start = perf_counter()
        self._begin(ids)
        tokens = [llama_cpp.llama_sampler_sample(self._greedy, self._context, -1)]
        first = perf_counter() - start
        while len(tokens) < max_new_tokens:
            self._run(tokens[-1:])
            tokens.append(llama_cpp.llama_sampler_sample(self._greedy, self._context, -1))
        seconds = perf_counter() - start
        return Generation(
            tokens=tuple(tokens), seconds=seconds, time_to_first_token=first, decode_seconds=seconds - first
        )

    def count(self, prompt: Tensor, max_new_tokens: int) -> None:
        """None: there are no rounds."""
        return

    def next_logits(self, ids: Tensor) -> Tensor:
        """See `TimedEngine`."""
        self._begin(ids.tolist())
        return torch.tensor(llama_cpp.llama_get_logits_ith(self._context, -1)[: self._vocab_size])

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


def llama_cpp_version() -> str:
    """Version and processor features."""
    features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
    return f"{llama_cpp.__version__} ({' '.join(features)})"


def _free(sampler: Any, context: Any, model: Any) -> None:
    llama_cpp.llama_sampler_free(sampler)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
