"""ik_llama.cpp, a fork of llama.cpp, as an engine to compare with, through the package ik-llama-cpp-python: a GGUF file.

Its C functions are called directly, as llama.cpp's are, with its own defaults but for the number of threads and two more.
Weights are repacked for the processor when they are loaded, which llama.cpp does by default. Its flash attention is off: in
the package's wheel, which is built for AVX2, it ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from ik_llama_cpp import _ctypes_api as library
from numpy.typing import NDArray
from torch import Tensor

from bench.engines.llama_batches import fill_batch
from bench.engines.own import Generation
from bench.machine.throughput import BatchRun, after_prompts
from layerskip_models.kernels.threads import num_threads


class IkLlamaCppFile:
    """Greedy decoding of a GGUF file, one text or many, on as many threads as our kernels use.

    name, label, weights, arithmetic: see `TimedEngine`. max_tokens: of a prompt and its continuation.
    Raises RuntimeError if it cannot load the file or make room.
    """

    def __init__(
        self,
        path: Path,
        max_tokens: int,
        *,
        name: str = "ik_llama.cpp",
        label: str = "ik_llama.cpp",
        weights: str | None = "the file's, rows as ik_llama.cpp rounds them",
        arithmetic: torch.dtype | None = None,
    ) -> None:
        self.name, self.label = name, label
        self.weights, self.arithmetic = weights, arithmetic
        self._max_tokens = max_tokens
        settings = library.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.repack_tensors = True
        self._model = library.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError(f"{label} did not load {path.name}")
        weakref.finalize(self, library.llama_free_model, self._model)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    @contextmanager
    def _room(self, prompts: Sequence[Tensor]) -> Iterator[tuple[Any, Any]]:
        """Yield a context and a batch for these texts and what continues them."""
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
            yield context, batch
        finally:
            library.llama_batch_free(batch)
            library.llama_free(context)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`. The context is made before the clock starts."""
        with self._room(prompts) as (context, batch):
            start = perf_counter()
            tokens = [[best] for best in self._choices(context, batch, _from_start(prompts))]
            first = perf_counter() - start
            for length in range(max_new_tokens - 1):
                rows = [(text, own[-1:], len(prompts[text]) + length) for text, own in enumerate(tokens)]
                for own, best in zip(tokens, self._choices(context, batch, rows)):
                    own.append(best)
            seconds = perf_counter() - start
        return after_prompts(tokens, seconds, first)

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`."""
        run = self.run([prompt], max_new_tokens)
        return Generation(
            tokens=tuple(run.tokens[0]),
            seconds=run.seconds,
            time_to_first_token=run.prompt_seconds,
            decode_seconds=run.decode_seconds,
        )

    def count(self, prompt: Tensor, max_new_tokens: int) -> None:
        """None: there are no rounds."""
        return

    def next_logits(self, ids: Tensor) -> Tensor:
        """See `TimedEngine`."""
        with self._room([ids]) as (context, batch):
            (place,) = self._decode(context, batch, _from_start([ids]))
            return torch.tensor(self._logits(context, place))

    def _choices(self, context: Any, batch: Any, rows: Sequence[tuple[int, list[int], int]]) -> list[int]:
        """Return the likeliest next token of each text after one pass."""
        return [int(self._logits(context, place).argmax()) for place in self._decode(context, batch, rows)]

    def _decode(self, context: Any, batch: Any, rows: Sequence[tuple[int, list[int], int]]) -> list[int]:
        """One pass over (text, tokens, position of the first) of each text. Returns where each text's last row is."""
        places = fill_batch(batch, rows)
        status = library.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"{self.label} failed to decode {len(rows)} texts: status {status}")
        return places

    def _logits(self, context: Any, place: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(library.llama_get_logits_ith(context, place), (self._vocab_size,))


def _from_start(prompts: Sequence[Tensor]) -> list[tuple[int, list[int], int]]:
    return [(text, prompt.tolist(), 0) for text, prompt in enumerate(prompts)]


def ik_llama_cpp_version() -> str:
    """Return the package's version."""
    return version("ik-llama-cpp-python")
