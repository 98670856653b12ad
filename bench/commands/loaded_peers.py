"""Engines on a file as it is, one to a process, which tells how long it took to load and what it has in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from bench.commands.started_peers import start
from bench.engines.own import EngineLostError, SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.machine.process_memory import forget_peak, peak_bytes_of, resident_bytes
from bench.provenance import llama_cpp_version, provenance
from bench.record import Line
from layerskip_models import load_model
from selfspec import SelfSpecGenerator

Engine = TypeVar("Engine")
FIRST = torch.tensor([0])
"""A prompt of one token: what happens only at the first call is part of loading."""
_ROUNDED = "rows to 16 bits, for the head to 24"
_ROUNDED_IN_GROUPS = "rows to 16 bits, but for the head"
_ROUNDED_ROWS = {"amx": _ROUNDED, "vnni": _ROUNDED, "avx512": _ROUNDED_IN_GROUPS, "avx2": _ROUNDED_IN_GROUPS}
"""What kernels round rows to that become whole numbers (docs/kernels.md), by variant."""


def own_peer(path: Path, policy: str, kept: bool, dtype: str = "auto") -> Peer:
    """selfspec with one policy. kept: it goes on learning from prompt to prompt. dtype: that the weights are loaded in."""

    def make() -> tuple[TimedEngine, Mapping[str, Any]]:
        model = load_model(path, dtype=dtype, device="cpu")
        return SelfSpecEngine(SelfSpecGenerator(model, prefix_cache=0), policy, kept=kept), {"dtype": model.dtype}

    found = provenance(torch.device("cpu"), torch.float32)
    return loaded(make, "from selfspec import SelfSpecGenerator", own_rounding(found["kernels"]), found)


def own_rounding(variant: str | None, few_bits: bool = True) -> str:
    """What ours rounds beyond the weights. variant: of the kernels. few_bits: whether weights are in fewer than 16 bits."""
    rows = _ROUNDED_ROWS.get(variant or "", "no rows") if few_bits else "no rows"
    return f"{rows}; keys, values and all else in float32"


def llama_cpp_peer(path: Path, max_tokens: int) -> Peer:
    """llama.cpp. max_tokens: of a prompt and its continuation."""
    from bench.engines.llama_cpp import LlamaCppFile  # its package is optional

    def make() -> tuple[TimedEngine, Mapping[str, Any]]:
        return LlamaCppFile(path, max_tokens), {}

    return loaded(make, "import llama_cpp", ggml_rounding(), {"llama_cpp": llama_cpp_version()})


def ggml_rounding(few_bits: bool = True) -> str:
    """What llama.cpp and its forks round beyond the weights. few_bits: whether these are in fewer than 16 bits."""
    rows = "rows to 8 bits, 32 inputs sharing a scale" if few_bits else "rows to bfloat16"
    return f"{rows}; keys and values to float16"


def openvino_peer(path: Path, rounding: str) -> Peer:
    """OpenVINO GenAI on a GGUF file or an exported folder. rounding: see `openvino_rounding_of`."""
    from bench.engines.openvino_genai import OpenVinoEngine, openvino_version  # its package is optional

    def make() -> tuple[TimedEngine, Mapping[str, Any]]:
        return OpenVinoEngine(path), {}

    return loaded(make, "import openvino_genai", rounding, {"openvino": openvino_version()})


def openvino_rounding_of(path: Path) -> str:
    """What OpenVINO rounds, asked in a process of its own, whose memory does not count; "unknown" if it fails there."""
    asked = (
        "import sys, pathlib; from bench.engines.openvino_genai import openvino_rounding; "
        "print(openvino_rounding(pathlib.Path(sys.argv[1])))"
    )
    answer = subprocess.run([sys.executable, "-c", asked, str(path)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def loading_line(peer: PeerProcess) -> Line:
    """What a record says about an engine's process: of loading, and the most memory it had since then."""
    engine = (*peer.engines, *peer.batches)[0].name
    return {"kind": "loading", "engine": engine, **peer.about["loading"], "peak_bytes": peak_bytes_of(peer.pid)}


def load_once(name: str, make: Callable[[], Peer], timeout: float) -> Line | None:
    """The line for an engine in a process that ends as soon as it has loaded; None if it cannot load."""
    with ExitStack() as running:
        try:
            return loading_line(start(name, make, timeout, running))
        except EngineLostError:
            return None


def loaded(
    make: Callable[[], tuple[TimedEngine, Mapping[str, Any]]],
    importing: str,
    rounding: str,
    versions: Mapping[str, Any],
) -> Peer:
    """The engine that `make` gives, once it has said a first token. Other arguments as in `loading_measured`."""

    def say(engine: TimedEngine) -> None:
        engine.generate(FIRST, 1)

    engine, loading, about = loading_measured(make, say, importing, rounding)
    return Peer(engines=[engine], about={"loading": loading, "versions": versions, **about})


def loading_measured(
    make: Callable[[], tuple[Engine, Mapping[str, Any]]], say: Callable[[Engine], None], importing: str, rounding: str
) -> tuple[Engine, Mapping[str, Any], Mapping[str, Any]]:
    """What `make` gives, and between the two what a record says of its loading, until it has said a first token.

    importing: the line with which a program imports it. rounding: beyond the weights, what it rounds.
    """
    began = perf_counter()
    subprocess.run([sys.executable, "-c", importing], check=True, capture_output=True)
    imported = perf_counter() - began
    before = resident_bytes()
    began = perf_counter()
    engine, about = make()
    say(engine)
    loading = {
        "load_seconds": perf_counter() - began,
        "import_seconds": imported,
        "bytes_before": before,
        "peak_loading_bytes": peak_bytes_of(),
        "rounding": rounding,
    }
    forget_peak()
    return engine, loading, about
