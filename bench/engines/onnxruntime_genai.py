"""ONNX Runtime GenAI as an engine to compare with, on the CPU: a folder that its model builder wrote.

Its own defaults hold, but for the number of threads. Its loop is called once a token, as its examples do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import onnxruntime_genai
import torch
from torch import Tensor

from bench.machine.throughput import BatchRun, after_prompts
from layerskip_models.kernels.threads import num_threads


class OnnxRuntimeTexts:
    """Greedy decoding by `onnxruntime_genai.Generator`. Raises RuntimeError, as it does, for a folder that it cannot load."""

    def __init__(self, path: Path, name: str, label: str) -> None:
        self.name, self.label = name, label
        self.weights: str | None = label
        config = onnxruntime_genai.Config(str(path))
        threads = {"intra_op_num_threads": num_threads()}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = onnxruntime_genai.Model(config)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `BatchEngine`. prompts: of one length. Its end tokens are forbidden, since it cannot be told to ignore them."""
        ids = torch.stack([*prompts]).to(torch.int32).numpy()
        length = ids.shape[1] + max_new_tokens
        settings = onnxruntime_genai.GeneratorParams(self._model)
        settings.set_search_options(do_sample=False, min_length=length, max_length=length, batch_size=len(ids))
        start = perf_counter()
        generator = onnxruntime_genai.Generator(self._model, settings)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = perf_counter() - start
        for _ in range(max_new_tokens - 1):
            generator.generate_next_token()
        seconds = perf_counter() - start
        tokens = [generator.get_sequence(text)[ids.shape[1] :].tolist() for text in range(len(ids))]
        return after_prompts(tokens, seconds, first)


def onnxruntime_version() -> str:
    """The version of the library that generates text."""
    return str(onnxruntime_genai.__version__)
