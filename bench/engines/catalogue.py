"""The engines that a command can measure besides the default ones, each made in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import typer
from transformers import PreTrainedModel

from bench.commands.bench_options import OnModel
from bench.engines.gguf_file import written_gguf
from bench.engines.llama_cpp import IK_LLAMA_CPP, LLAMA_CPP, LlamaCppEngine, llama_version
from bench.engines.own import SelfSpecEngine
from bench.engines.peer_process import Peer
from bench.engines.transformers_engine import transformers_engines
from bench.models import load_network, open_model
from bench.provenance import provenance
from layerskip_models import load_model
from layerskip_models.checkpoints.loading import FEW_BITS, resolve_device
from selfspec import SelfSpecGenerator

SELFSPEC, TRANSFORMERS, OPENVINO = "selfspec", "transformers", "openvino"
LLAMA_KINDS = ("BF16", "F16", "Q8_0", "Q4_K_M", "Q4_0")
"""Types that weights are written in for llama.cpp and its fork."""
OWN_KINDS = (*FEW_BITS, "Q4_K_M", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
"""Types of selfspec's weights: those that it rounds to itself, and those of GGUF files whose numbers it keeps."""
_PACKAGES = {
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
    IK_LLAMA_CPP: ("ik_llama_cpp", "ik-llama-cpp-python"),
    OPENVINO: ("openvino_genai", "openvino-genai"),
}
"""Another engine's module, and the package that has it."""
Maker = Callable[[], Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Settings that all engines of a command share.

    options: the command's. file: the GGUF file that is its model, if it is one. policies, warmed_up: selfspec's. setting:
    exit layer and length of transformers' early exit, None for its plain decoding alone. max_tokens: of a prompt and its
    continuation.
    """

    options: OnModel
    file: Path | None
    policies: Sequence[str]
    warmed_up: Sequence[str] = ()
    setting: tuple[int, int] | None = None
    max_tokens: int

    def network(self) -> PreTrainedModel:
        """Load transformers' own model."""
        return load_network(self.options.model, self.options.dtype, self.options.device)


def engines_beside(asked: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return what is measured beside selfspec, by default what is installed and reads the GGUF file, else transformers."""
    if not asked:
        return [TRANSFORMERS] if file is None else [name for name in _PACKAGES if find_spec(_PACKAGES[name][0])]
    return [name for name in dict.fromkeys(asked) if name != "none"]


def makers(asked: Sequence[str], work: Work) -> dict[str, Maker]:
    """Return how to make selfspec and each engine asked for whose package is there. Raises ValueError for an unknown one."""
    found = {name: _maker(name, work) for name in asked}
    return {SELFSPEC: partial(own_peer, work)} | {name: make for name, make in found.items() if _installed(name)}


def _maker(name: str, work: Work) -> Maker:
    program, _, kind = name.partition(":")
    if program in _PACKAGES:
        if resolve_device(work.options.device).type != "cpu":
            raise ValueError(f"{program} is measured on a CPU: add --device cpu, or leave it out")
        if not kind and work.file is None:
            raise ValueError(f"--engine {name} needs a GGUF file as --model, or a kind of weights or folder after ':'")
    if program == TRANSFORMERS and not kind:
        return partial(transformers_peer, work)
    if program == SELFSPEC and kind in OWN_KINDS:
        return partial(own_peer, work, kind)
    if program in (LLAMA_CPP, IK_LLAMA_CPP) and kind in ("", *LLAMA_KINDS):
        return partial(llama_peer, program, work, kind)
    if program == OPENVINO:
        return partial(openvino_peer, Path(kind or work.file or ""))
    raise ValueError(
        f"--engine must be transformers, selfspec:KIND with a KIND of {', '.join(OWN_KINDS)}, llama.cpp or ik_llama.cpp with "
        f":KIND of {', '.join(LLAMA_KINDS)}, or openvino:FOLDER, got {name!r}"
    )


def _installed(name: str) -> bool:
    """Tell whether an engine's packages are there; if not, say so in a line."""
    program = name.partition(":")[0]
    module, package = _PACKAGES.get(program, ("selfspec", ""))
    if find_spec(module) is None:
        typer.echo(f"{program} is left out: it needs {package}; pip install {package}", err=True)
        return False
    return True


def own_peer(work: Work, kind: str | None = None) -> Peer:
    """Make selfspec with each policy, on one copy of the weights. kind: of `OWN_KINDS`, None for the weights as they are."""
    if kind is None or kind in FEW_BITS:
        asked = work.options
        model = open_model(asked.model, kind or asked.dtype, asked.device, None if kind else asked.rows)
    else:
        with written_gguf(work.network(), kind) as path:
            model = load_model(path, device=work.options.device)
    generator = SelfSpecGenerator(model, prefix_cache=0)
    engines = [SelfSpecEngine(generator, name, weights=kind) for name in work.policies]
    engines += [SelfSpecEngine(generator, name, warmed_up=True, weights=kind) for name in work.warmed_up]
    return Peer(engines=engines, about={"provenance": provenance(model.device, model.dtype)})


def transformers_peer(work: Work) -> Peer:
    """Make transformers' own decoding."""
    return Peer(engines=transformers_engines(work.network(), work.setting))


def llama_peer(program: str, work: Work, kind: str) -> Peer:
    """Make llama.cpp or its fork on the work's file, or on its weights written as `kind`."""
    if not kind:
        assert work.file is not None
        engine = LlamaCppEngine(program, work.file, work.max_tokens)
    else:
        with written_gguf(work.network(), kind) as path:
            engine = LlamaCppEngine(program, path, work.max_tokens, kind)
    return Peer(engines=[engine], about={"versions": {program: llama_version(program)}})


def openvino_peer(place: Path) -> Peer:
    """Make OpenVINO GenAI on a GGUF file or an exported folder."""
    from bench.engines.openvino_genai import OpenVinoEngine, openvino_version

    weights = "the file" if place.suffix == ".gguf" else place.name.removeprefix("openvino-")
    engine = OpenVinoEngine(place, f"{OPENVINO}:{weights}")
    return Peer(engines=[engine], about={"versions": {OPENVINO: openvino_version()}})
