"""ik_llama.cpp, a fork of llama.cpp, as an engine to compare with, through the package ik-llama-cpp-python: a GGUF file.

Its C functions are called directly, as llama.cpp's are, with its own defaults but for the number of threads and two more.
Weights are repacked for the processor when they are loaded, which llama.cpp does by default. Its flash attention is off: in
the package's wheel, which is built for AVX2, it ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as library
from torch import Tensor

from bench.engines.llama_batches import fill_batch
from bench.machine.throughput import BatchRun, after_prompts
from layerskip_models.kernels.threads import num_threads


class IkLlamaCppTexts:
    """Greedy decoding, several texts in one pass. max_tokens: of a prompt and its continuation.

    Raises RuntimeError if it cannot load the file or make room.
    """

    def __init__(self, path: Path, max_tokens: int, name: str, label: str) -> None:
        self.name, self.label = name, label
        self.weights: str | None = label
        self._max_tokens = max_tokens
        settings = library.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.repack_tensors = True
        self._model = library.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError(f"{label} did not load {path.name}")
        weakref.finalize(self, library.llama_free_model, self._model)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`. The context is made before the clock starts."""
        settings = library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = len(prompts) * (-(-self._max_tokens // 256) * 256)
        settings.n_seq_max = len(prompts)
        settings.flash_attn = False
        settings.n_threads = settings.n_threads_batch = num_threads()
        context = library.llama_init_from_model(self._model, settings)
        if not context:
            raise RuntimeError(f"{self.label} did not make room for {len(prompts)} texts")
        batch = library.llama_batch_init(sum(len(prompt) for prompt in prompts), 0, 1)
        try:
            start = perf_counter()
            rows = [(text, prompt.tolist(), 0) for text, prompt in enumerate(prompts)]
            tokens = [[best] for best in self._decode(context, batch, rows)]
            first = perf_counter() - start
            for length in range(max_new_tokens - 1):
                rows = [(text, own[-1:], len(prompts[text]) + length) for text, own in enumerate(tokens)]
                for own, best in zip(tokens, self._decode(context, batch, rows)):
                    own.append(best)
            seconds = perf_counter() - start
        finally:
            library.llama_batch_free(batch)
            library.llama_free(context)
        return after_prompts(tokens, seconds, first)

    def _decode(self, context: Any, batch: Any, rows: Sequence[tuple[int, list[int], int]]) -> list[int]:
        """One pass over (text, tokens, position of the first) of each text. Returns the likeliest next token of each."""
        places = fill_batch(batch, rows)
        status = library.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"{self.label} failed to decode {len(rows)} texts: status {status}")
        return [self._likeliest(context, place) for place in places]

    def _likeliest(self, context: Any, place: int) -> int:
        logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, place), (self._vocab_size,))
        return int(logits.argmax())


def ik_llama_cpp_version() -> str:
    """The package's version."""
    return version("ik-llama-cpp-python")
