"""OpenVINO GenAI as an engine to compare with: a folder that optimum-intel exported, on the CPU.

Its own defaults hold, but for the number of threads. It is given token ids, and its own clock tells the time of the first
token, so that no Python is called back while it generates.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import numpy as np
import openvino
import openvino_genai
import torch
from torch import Tensor

from bench.engines.own import Generation
from layerskip_models.kernels.threads import num_threads

SETTINGS = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
"""What tells how it computes: its arithmetic, the inputs that share a scale where rows are rounded to 8 bits, its cache."""


class OpenVinoEngine:
    """Greedy decoding by `openvino_genai.LLMPipeline`. folder: an exported model; the name of the folder is the engine's.

    Raises RuntimeError, as OpenVINO does, for a folder that it cannot load.
    """

    arithmetic: torch.dtype | None = None

    def __init__(self, folder: Path) -> None:
        self.name, self.label = f"openvino:{folder.name}", f"OpenVINO GenAI {folder.name}"
        self.weights: str | None = self.label
        if not (folder / "openvino_model.xml").is_file():
            raise FileNotFoundError(f"{folder} has no openvino_model.xml: export a model into it (docs/benchmarks.md)")
        self._pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=num_threads())

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        """See `TimedEngine`."""
        ids = prompt.numpy().reshape(1, -1)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        settings = openvino_genai.GenerationConfig(
            max_new_tokens=max_new_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        start = perf_counter()
        result = self._pipeline.generate(inputs, settings)
        seconds = perf_counter() - start
        first = result.perf_metrics.get_ttft().mean / 1000
        return Generation(
            tokens=tuple(result.tokens[0]), seconds=seconds, time_to_first_token=first, decode_seconds=seconds - first
        )

    def count(self, prompt: Tensor, max_new_tokens: int) -> None:
        """None: there are no rounds."""
        return

    def next_logits(self, ids: Tensor) -> Tensor:
        """Raises RuntimeError: OpenVINO GenAI keeps its logits to itself. No other engine has its weights, so none asks."""
        raise RuntimeError(f"{self.label} does not tell its logits")


def openvino_version() -> str:
    """Of the library that runs models and of the one that generates text."""
    return f"{openvino.get_version()}, GenAI {openvino_genai.get_version()}"


def openvino_rounding(folder: Path) -> str:
    """What an exported model's weights are stored as, and how this processor computes with them by default."""
    core = openvino.Core()
    model = core.read_model(folder / "openvino_model.xml")
    stored = sorted({op.get_element_type().get_type_name() for op in model.get_ops() if _is_matrix(op)})
    compiled = core.compile_model(model, "CPU")
    found = {name: compiled.get_property(name) for name in SETTINGS}
    arithmetic, group, cache = (found[name] for name in SETTINGS)
    names = [kind.get_type_name() if hasattr(kind, "get_type_name") else str(kind) for kind in (arithmetic, cache)]
    rows = f"rows to 8 bits, {group} inputs sharing a scale" if group else "rows not"
    return f"weights to {' and '.join(stored)}; {rows}; arithmetic {names[0]}; keys and values {names[1]}"


def _is_matrix(op: openvino.Node) -> bool:
    """Whether it is a constant as large as a matrix of weights."""
    return (
        op.get_type_name() == "Constant"
        and op.get_output_size() == 1
        and int(np.prod(op.get_output_shape(0))) > 1 << 16
    )
