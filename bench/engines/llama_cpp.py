"""llama.cpp and its fork ik_llama.cpp as engines to compare with, through llama-cpp-python and ik-llama-cpp-python.

Their C functions are called directly, so that no Python of these packages is timed, and with their own defaults (a KV cache
in float16 among them) but for the number of threads, and two settings of ik_llama.cpp: weights are repacked for the processor
when they are loaded, as llama.cpp does by default, and flash attention is off, because in the package's wheel, which is built
for AVX2, it ends the process.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.engines.own import BatchRun, Generation, TimedEngine
from layerskip_models.kernels.threads import num_threads

LLAMA_CPP, IK_LLAMA_CPP = "llama.cpp", "ik_llama.cpp"
_ARITHMETIC = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Dtype that a product's inputs are rounded to, by the type of the weights. Other types of weights make another model."""
Rows = Sequence[tuple[int, list[int], int]]
"""(text, tokens, position of the first) of each text."""


class LlamaCppEngine(TimedEngine):
    """Greedy decoding of a GGUF file, one text or many, on as many threads as our kernels use.

    program: `LLAMA_CPP` or `IK_LLAMA_CPP`. max_tokens: of a prompt and its continuation. kind: of the file, where it was made
    of the weights that are measured. Raises RuntimeError if it cannot load the file or make room.
    """

    def __init__(self, program: str, path: Path, max_tokens: int, kind: str | None = None) -> None:
        self._library = _library(program)
        self._max_tokens = max_tokens
        self.name = program if kind is None else f"{program}:{kind}"
        self.label = program if kind is None else f"{program} {kind}"
        self.arithmetic = _ARITHMETIC.get(kind or "")
        self.weights = None if self.arithmetic else self.label  # rows are rounded as well
        settings = self._library.llama_model_default_params()
        settings.n_gpu_layers = 0
        if program == IK_LLAMA_CPP:
            settings.repack_tensors = True
        self._model = self._library.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError(f"{self.label} did not load {path.name}")
        free = self._library.llama_free_model if program == IK_LLAMA_CPP else self._library.llama_model_free
        weakref.finalize(self, free, self._model)
        self._vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        self._is_fork = program == IK_LLAMA_CPP

    @contextmanager
    def _room(self, prompts: Sequence[Tensor]) -> Iterator[tuple[Any, Any]]:
        """Yield a context and a batch for these texts and what continues them."""
        settings = self._library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = len(prompts) * (-(-self._max_tokens // 256) * 256)
        settings.n_seq_max = len(prompts)
        if self._is_fork:
            settings.flash_attn = False
        settings.n_threads = settings.n_threads_batch = num_threads()
        context = self._library.llama_init_from_model(self._model, settings)
        if not context:
            raise RuntimeError(f"{self.label} did not make room for {len(prompts)} texts")
        batch = self._library.llama_batch_init(sum(len(prompt) for prompt in prompts), 0, 1)
        try:
            yield context, batch
        finally:
            self._library.llama_batch_free(batch)
            self._library.llama_free(context)

    def _continued(self, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[list[list[int]], float, float]:
        """Return the new tokens of each text, all seconds, and those to the first tokens. The context is made before that."""
        with self._room(prompts) as (context, batch):
            start = perf_counter()
            read = [(text, prompt.tolist(), 0) for text, prompt in enumerate(prompts)]
            tokens = [[best] for best in self._choices(context, batch, read)]
            first = perf_counter() - start
            for length in range(max_new_tokens - 1):
                rows = [(text, own[-1:], len(prompts[text]) + length) for text, own in enumerate(tokens)]
                for own, best in zip(tokens, self._choices(context, batch, rows)):
                    own.append(best)
            return tokens, perf_counter() - start, first

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        (tokens,), seconds, first = self._continued([prompt], max_new_tokens)
        return Generation.with_first(tokens, seconds, first)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        return BatchRun.after_prompts(*self._continued(prompts, max_new_tokens))

    def _choices(self, context: Any, batch: Any, rows: Rows) -> list[int]:
        """Return the likeliest next token of each text after one pass."""
        return [int(self._logits(context, place).argmax()) for place in self._decode(context, batch, rows)]

    def _decode(self, context: Any, batch: Any, rows: Rows) -> list[int]:
        """Run one pass over some tokens of each text. Returns where each text's last row is."""
        batch.n_tokens = 0
        places = []
        for text, ids, position in rows:
            for offset, token in enumerate(ids):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, position + offset
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, text
                batch.logits[row] = offset == len(ids) - 1
                batch.n_tokens += 1
            places.append(batch.n_tokens - 1)
        status = self._library.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"{self.label} failed to decode {len(rows)} texts: status {status}")
        return places

    def _logits(self, context: Any, place: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(self._library.llama_get_logits_ith(context, place), (self._vocab_size,))


def _library(program: str) -> Any:
    """Return the module with a program's C functions. Their packages are optional."""
    if program == IK_LLAMA_CPP:
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # else it prints how it loads
    return llama_cpp


def llama_version(program: str) -> str:
    """Return the package's version, and of llama.cpp the processor's features that it uses."""
    if program == IK_LLAMA_CPP:
        return version("ik-llama-cpp-python")
    library = _library(program)
    features = re.findall(r"(\w+) = 1", library.llama_print_system_info().decode())
    return f"{library.__version__} ({' '.join(features)})"
