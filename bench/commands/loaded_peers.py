"""Engines on a file as it is, one to a process, which tells how long it took to load and what it has in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.commands.peer_makers import PACKAGES, engine_on_file
from bench.commands.started_peers import start
from bench.engines.own import EngineLostError, SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.machine.process_memory import forget_peak, peak_bytes_of, resident_bytes
from bench.provenance import provenance
from bench.record import Line
from layerskip_models import load_model
from selfspec import SelfSpecGenerator

_FIRST = torch.tensor([0])
"""A prompt of one token: what happens only at the first call is part of loading."""


def own_file_peer(path: Path, policy: str, kept: bool, dtype: str = "auto") -> Peer:
    """selfspec with one policy. kept: it goes on learning from prompt to prompt. dtype: that the weights are loaded in."""
    found = provenance(torch.device("cpu"), torch.float32)

    def make() -> tuple[TimedEngine, Mapping[str, Any]]:
        model = load_model(path, dtype=dtype, device="cpu")
        engine = SelfSpecEngine(SelfSpecGenerator(model, prefix_cache=0), policy, kept=kept)
        return engine, {"dtype": model.dtype, "versions": found}

    return _loaded(make, "from selfspec import SelfSpecGenerator")


def other_file_peer(program: str, path: Path, max_tokens: int) -> Peer:
    """Another engine. max_tokens: of a prompt and its continuation."""
    return _loaded(partial(engine_on_file, program, path, max_tokens), f"import {PACKAGES[program][0]}")


def loading_line(peer: PeerProcess) -> Line:
    """What a record says about an engine's process: of loading, and the most memory it had since then."""
    return {
        "kind": "loading",
        "engine": peer.engines[0].name,
        **peer.about["loading"],
        "peak_bytes": peak_bytes_of(peer.pid),
    }


def load_once(name: str, make: Callable[[], Peer], timeout: float) -> Line | None:
    """The line for an engine in a process that ends as soon as it has loaded; None if it cannot load."""
    with ExitStack() as running:
        try:
            return loading_line(start(name, make, timeout, running))
        except EngineLostError:
            return None


def _loaded(make: Callable[[], tuple[TimedEngine, Mapping[str, Any]]], importing: str) -> Peer:
    """The engine that `make` gives with what the parent is to know of it, once it has said a first token.

    importing: the line with which a program imports it.
    """
    began = perf_counter()
    subprocess.run([sys.executable, "-c", importing], check=True, capture_output=True)
    imported = perf_counter() - began
    before = resident_bytes()
    began = perf_counter()
    engine, about = make()
    engine.generate(_FIRST, 1)
    loading = {
        "load_seconds": perf_counter() - began,
        "import_seconds": imported,
        "bytes_before": before,
        "peak_loading_bytes": peak_bytes_of(),
    }
    forget_peak()
    return Peer(engines=[engine], about={"loading": loading, **about})
