"""llama.cpp as an engine to compare with, through the package llama-cpp-python: a GGUF file, or weights written as one.

Its C functions are called directly, so that no Python of that package is timed, and with llama.cpp's own defaults (a KV cache
in float16 among them) but for the number of threads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import llama_cpp
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.engines.gguf_file import write_gguf
from bench.engines.own import Generation
from layerskip_models.kernels.threads import num_threads

# What llama.cpp rounds a matrix's inputs to, as its outputs are judged by; None: another model than the full weights.
_ARITHMETIC = {"F16": torch.float16, "BF16": torch.bfloat16}

logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # else it prints how it loads


class LlamaCppFile:
    """Greedy decoding of a GGUF file by llama.cpp, on as many threads as our kernels use.

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


class LlamaCppEngine(LlamaCppFile):
    """llama.cpp on a transformers model's weights.

    kind: as in `write_gguf`. The GGUF file is written to the temporary folder (TMPDIR) and removed once it is loaded.
    """

    def __init__(self, network: LlamaForCausalLM, kind: str, max_tokens: int) -> None:
        arithmetic = _ARITHMETIC.get(kind)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(network, path, kind)
            super().__init__(
                path,
                max_tokens,
                name=f"llama.cpp:{kind}",
                label=f"llama.cpp {kind}",
                weights=kind if arithmetic is None else None,
                arithmetic=arithmetic,
            )


def _free(sampler: Any, context: Any, model: Any) -> None:
    llama_cpp.llama_sampler_free(sampler)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
