"""Engines that take one text or many, on the folder that `convert` wrote, one to a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.commands.loaded_peers import FIRST, ggml_rounding, loading_measured, openvino_rounding_of, own_rounding
from bench.engines.converted import CONVERTERS, GGUF_KINDS, WEIGHTS, converted
from bench.engines.peer_process import Peer
from bench.machine.throughput import BatchEngine
from bench.provenance import llama_cpp_version, provenance
from layerskip_models import load_model
from selfspec import SelfSpecGenerator
from selfspec.defaults import DEFAULT_POLICY

OURS = {"ar": "selfspec, plain", DEFAULT_POLICY: "selfspec"}
"""What the rows of our policies are called; the default is what a user gets."""
PACKAGES = {
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "ik_llama.cpp": ("ik_llama_cpp", "ik-llama-cpp-python"),
    "OpenVINO GenAI": ("openvino_genai", "openvino-genai"),
    "ONNX Runtime GenAI": ("onnxruntime_genai", "onnxruntime-genai"),
    "CTranslate2": ("ctranslate2", "ctranslate2"),
}
"""Another engine's module, and the package that has it."""


def peers_at(bits: int, folder: Path, max_tokens: int) -> tuple[dict[str, Callable[[], Peer]], dict[str, str]]:
    """What makes each engine at this many bits, by label, ours first; and why others cannot be made.

    max_tokens: of a prompt and its continuation.
    """
    kind = GGUF_KINDS[bits]
    file = folder / f"{kind}.gguf"
    own = folder / WEIGHTS if bits == 16 else file
    makers: dict[str, Callable[[], Peer]] = {
        f"{label}, {kind}": partial(own_peer, own, policy, f"selfspec:{bits}:{policy}", f"{label}, {kind}")
        for policy, label in OURS.items()
    }
    found: dict[str, Callable[[str], Callable[[], Peer]]] = {
        "llama.cpp": lambda label: partial(llama_cpp_peer, file, max_tokens, label),
        "ik_llama.cpp": lambda label: partial(ik_llama_cpp_peer, file, max_tokens, label),
        "OpenVINO GenAI": lambda label: partial(openvino_peer, converted("openvino", bits, folder), label),
        "ONNX Runtime GenAI": lambda label: partial(
            onnxruntime_peer, converted("onnxruntime", bits, folder), label, bits
        ),
        "CTranslate2": lambda label: partial(ctranslate2_peer, converted("ctranslate2", bits, folder), label),
    }
    kinds = {converter.label: converter.kinds[bits] for converter in CONVERTERS.values()}
    missing = {}
    for engine, make in found.items():
        label = f"{engine}, {kinds.get(engine, kind)}"
        module, package = PACKAGES[engine]
        try:
            if find_spec(module) is None:
                raise ValueError(f"it needs {package}: pip install {package}")
            makers[label] = make(label)
        except ValueError as error:
            missing[label] = str(error)
    return makers, missing


def own_peer(path: Path, policy: str, name: str, label: str) -> Peer:
    """selfspec with one policy, on a folder or a GGUF file."""
    from bench.engines.own_texts import SelfSpecTexts

    found = provenance(torch.device("cpu"), torch.float32)
    rounding = own_rounding(found["kernels"], few_bits=path.suffix == ".gguf" and _has_few_bits(path))

    def make() -> tuple[BatchEngine, Mapping[str, Any]]:
        model = load_model(path, device="cpu")
        return SelfSpecTexts(SelfSpecGenerator(model, prefix_cache=0), policy, name, label), {"dtype": model.dtype}

    return _loaded(make, "from selfspec import SelfSpecGenerator", rounding, found)


def llama_cpp_peer(path: Path, max_tokens: int, label: str) -> Peer:
    """llama.cpp on a GGUF file. max_tokens: of a prompt and its continuation."""
    from bench.engines.llama_cpp_batch import LlamaCppTexts

    def make() -> tuple[BatchEngine, Mapping[str, Any]]:
        return LlamaCppTexts(path, max_tokens, name=f"llama.cpp:{path.stem}", label=label, weights=label), {}

    return _loaded(make, "import llama_cpp", ggml_rounding(_has_few_bits(path)), {"llama_cpp": llama_cpp_version()})


def ik_llama_cpp_peer(path: Path, max_tokens: int, label: str) -> Peer:
    """ik_llama.cpp on a GGUF file. max_tokens: of a prompt and its continuation."""
    from bench.engines.ik_llama_cpp import IkLlamaCppTexts, ik_llama_cpp_version

    def make() -> tuple[BatchEngine, Mapping[str, Any]]:
        return IkLlamaCppTexts(path, max_tokens, f"ik_llama.cpp:{path.stem}", label), {}

    return _loaded(
        make, "import ik_llama_cpp", ggml_rounding(_has_few_bits(path)), {"ik_llama_cpp": ik_llama_cpp_version()}
    )


def openvino_peer(path: Path, label: str) -> Peer:
    """OpenVINO GenAI on an exported folder."""
    from bench.engines.openvino_genai import OpenVinoEngine, openvino_version

    def make() -> tuple[BatchEngine, Mapping[str, Any]]:
        return OpenVinoEngine(path, label), {}

    return _loaded(make, "import openvino_genai", openvino_rounding_of(path), {"openvino": openvino_version()})


def onnxruntime_peer(path: Path, label: str, bits: int) -> Peer:
    """ONNX Runtime GenAI on a folder of its model builder, whose default is that rows meet few bits in 8 bits."""
    from bench.engines.onnxruntime_genai import OnnxRuntimeTexts, onnxruntime_version

    def make() -> tuple[BatchEngine, Mapping[str, Any]]:
        return OnnxRuntimeTexts(path, f"onnxruntime:{path.name.partition('-')[2]}", label), {}

    rows = "weights kept as float32; no rows" if bits == 16 else "rows to 8 bits, 32 inputs sharing a scale"
    rounding = f"{rows}; the embedding, keys, values and all else in float32"
    return _loaded(make, "import onnxruntime_genai", rounding, {"onnxruntime": onnxruntime_version()})


def ctranslate2_peer(path: Path, label: str) -> Peer:
    """CTranslate2 on a folder of its converter."""
    from bench.engines.ctranslate2 import CTranslate2Texts, ctranslate2_version

    def make() -> tuple[CTranslate2Texts, Mapping[str, Any]]:
        engine = CTranslate2Texts(path, f"ctranslate2:{path.name.partition('-')[2]}", label)
        return engine, {"arithmetic": engine.arithmetic}

    peer = _loaded(make, "import ctranslate2", "", {"ctranslate2": ctranslate2_version()})
    few = str(peer.about["arithmetic"]).startswith("int8")
    rows = (
        "a scale for each output; rows to 8 bits, one scale for a row"
        if few
        else "weights turned into float32; no rows"
    )
    peer.about["loading"]["rounding"] = f"{rows}; keys, values and all else in float32"
    return peer


def _has_few_bits(file: Path) -> bool:
    """Whether a GGUF file of the folder has weights in fewer than 16 bits."""
    return file.stem != GGUF_KINDS[16]


def _loaded(
    make: Callable[[], tuple[BatchEngine, Mapping[str, Any]]],
    importing: str,
    rounding: str,
    versions: Mapping[str, Any],
) -> Peer:
    """The engine that `make` gives, once it has said a first token. Other arguments as in `loading_measured`."""

    def say(engine: BatchEngine) -> None:
        engine.run([FIRST], 2)  # with one token some could not tell what decoding takes

    engine, loading, about = loading_measured(make, say, importing, rounding)
    return Peer(batches=[engine], about={"loading": dict(loading), "versions": versions, **about})
