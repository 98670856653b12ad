"""Engines on the weights of a checkpoint, made in a process of their own: ours, llama.cpp's, OpenVINO's and transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from bench.commands.bench_options import LLAMA_CPP_KINDS
from bench.commands.preparation import load_network, transformers_engines
from bench.engines.llama_batches import names_of
from bench.engines.own import SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer
from bench.engines.peers import transformers_generate
from bench.provenance import provenance
from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints.loading import resolve_device
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator

LLAMA_CPP, IK_LLAMA_CPP, OPENVINO = "llama.cpp", "ik_llama.cpp", "OpenVINO GenAI"
PACKAGES = {
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
    IK_LLAMA_CPP: ("ik_llama_cpp", "ik-llama-cpp-python"),
    OPENVINO: ("openvino_genai", "openvino-genai"),
}
"""Another engine's module, and the package that has it."""


def installed(program: str, *others: str) -> bool:
    """Return whether an engine's package and those it needs are installed; if not, say so in a line on stderr."""
    module, package = PACKAGES[program]
    missing = [] if find_spec(module) else [package]
    missing += [name for name in others if find_spec(name) is None]
    if missing:
        typer.echo(
            f"{program} is left out: it needs {' and '.join(missing)}; pip install {' '.join(missing)}", err=True
        )
    return not missing


def gguf_kinds(program: str, asked: Sequence[str], device: str, more: Sequence[str] = ()) -> list[str]:
    """Choose the kinds of `LLAMA_CPP_KINDS` that a program runs: those asked for ("all": each) and those of `more`.

    Returns none where its packages are missing. Raises ValueError for another kind, and for a device that is not the CPU.
    """
    unknown = sorted(set(asked) - {"all", *LLAMA_CPP_KINDS})
    if unknown:
        option = program.replace(".", "-").replace("_", "-")
        raise ValueError(f"--{option} must be {', '.join(LLAMA_CPP_KINDS)} or all, got {', '.join(unknown)}")
    kinds = list(dict.fromkeys([*(LLAMA_CPP_KINDS if "all" in asked else asked), *more]))
    if kinds and resolve_device(device).type != "cpu":
        raise ValueError(f"{program} is measured on a CPU: add --device cpu, or leave it out")
    return kinds if kinds and installed(program, "gguf") else []


def own_peer(checkpoint: str, dtype: str, device: str, policies: Sequence[str], layout: Layout | None = None) -> Peer:
    """selfspec with these policies. layout: of rounded weights."""
    network = load_network(checkpoint, dtype, device)
    about: dict[str, Any] = {
        "provenance": provenance(network.device, network.dtype),
        "dtype": network.dtype,
        "configuration": {
            "attention": network.config._attn_implementation,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
        },
    }
    rounded: dict[str, Any] = {} if layout is None else {"layout": layout}
    generator = SelfSpecGenerator(from_transformers(network, release=True, **rounded), prefix_cache=0)
    about["configuration"]["runner"] = generator.runner
    return Peer(engines=[SelfSpecEngine(generator, name, weights=layout) for name in policies], about=about)


def own_gguf_peer(checkpoint: str, dtype: str, device: str, kind: str, policies: Sequence[str]) -> Peer:
    """selfspec with these policies, on a GGUF file of the weights as this kind, as it is loaded without options."""
    from bench.engines.gguf_file import written_gguf  # its package is optional

    with written_gguf(load_network(checkpoint, dtype, device), kind) as path:
        generator = SelfSpecGenerator(load_model(path, device=device), prefix_cache=0)
    return Peer(engines=[SelfSpecEngine(generator, name, weights=kind) for name in policies])


def llama_peer(program: str, checkpoint: str, dtype: str, device: str, kind: str, max_tokens: int) -> Peer:
    """llama.cpp or its fork on the weights as this kind. max_tokens: of a prompt and its continuation."""
    from bench.engines.gguf_file import written_gguf

    with written_gguf(load_network(checkpoint, dtype, device), kind) as path:
        engine, about = engine_on_file(program, path, max_tokens, **names_of(program, kind))
    return Peer(engines=[engine], about=about)


def engine_on_file(program: str, path: Path, max_tokens: int, **names: Any) -> tuple[TimedEngine, Mapping[str, Any]]:
    """llama.cpp, its fork or OpenVINO on a file (OpenVINO: or a folder), and its version as `Peer.about` tells it."""
    if program == LLAMA_CPP:
        from bench.engines.llama_cpp import (  # its package is optional, as are the others
            LlamaCppFile,
            llama_cpp_version,
        )

        return LlamaCppFile(path, max_tokens, **names), {"versions": {"llama_cpp": llama_cpp_version()}}
    if program == IK_LLAMA_CPP:
        from bench.engines.ik_llama_cpp import IkLlamaCppFile, ik_llama_cpp_version

        return IkLlamaCppFile(path, max_tokens, **names), {"versions": {"ik_llama_cpp": ik_llama_cpp_version()}}
    from bench.engines.openvino_genai import OpenVinoEngine, openvino_version

    return OpenVinoEngine(path, **names), {"versions": {"openvino": openvino_version()}}


def openvino_peer(path: Path, max_tokens: int) -> Peer:
    """OpenVINO GenAI on an exported folder."""
    engine, about = engine_on_file(OPENVINO, path, max_tokens)
    return Peer(engines=[engine], about=about)


def transformers_peer(checkpoint: str, dtype: str, device: str, setting: tuple[int, int] | None = None) -> Peer:
    """Make transformers' own decoding.

    setting: exit layer and length of its early exit; None for plain decoding alone.
    """
    network = load_network(checkpoint, dtype, device)
    return Peer(
        engines=[transformers_generate(network)] if setting is None else transformers_engines(network, *setting)
    )
