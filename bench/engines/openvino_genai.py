"""OpenVINO GenAI as an engine to compare with, on the CPU: a GGUF file, or a folder that optimum-intel exported.

Its own defaults hold, but for the number of threads, and that no prompt is kept for the next call. It is given token ids, and
its own clock tells the time of the first token, so that no Python is called back while it generates. It tells no
logits; nobody asks for them, since its weights are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.engines.own import BatchRun, Generation, TimedEngine
from layerskip_models.kernels.threads import num_threads


class OpenVinoEngine(TimedEngine):
    """Greedy decoding by `openvino_genai.LLMPipeline`. path: a GGUF file or exported folder, or FileNotFoundError."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.label = name, f"OpenVINO GenAI, {name.partition(':')[2]}"
        self.weights = self.label
        if path.suffix != ".gguf" and not (path / "openvino_model.xml").is_file():
            raise FileNotFoundError(f"{path.name} has no openvino_model.xml: export a model (docs/benchmarks.md)")
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False  # or a repeat would not read its prompt
        device = {"scheduler_config": scheduling, "INFERENCE_NUM_THREADS": num_threads()}
        self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **device)

    def _call(self, ids: NDArray[np.int64], max_new_tokens: int) -> tuple[Any, float]:
        """Return what it gives for ids [texts, n], and the seconds that it took."""
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        plain = {"ignore_eos": True, "do_sample": False, "apply_chat_template": False}
        settings = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, **plain)
        start = perf_counter()
        result = self._pipeline.generate(inputs, settings)
        return result, perf_counter() - start

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        result, seconds = self._call(prompt.numpy().reshape(1, -1), max_new_tokens)
        return Generation.with_first(result.tokens[0], seconds, result.perf_metrics.get_ttft().mean / 1000)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> BatchRun:
        """See `TimedEngine`. prompts: of one length. Its clock tells of single texts only, so the time until all texts have
        their first token is that of another call."""
        ids = torch.stack([*prompts]).numpy()
        _, first = self._call(ids, 1)
        result, seconds = self._call(ids, max_new_tokens)
        return BatchRun.after_prompts([[*tokens] for tokens in result.tokens], seconds, first)


def openvino_version() -> str:
    """Return the versions of the library that runs models and of the one that generates text."""
    return f"{openvino.get_version()}, GenAI {openvino_genai.get_version()}"
