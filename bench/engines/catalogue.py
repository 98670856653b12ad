"""The engines that a command can measure besides the default ones, each made in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from bench.engines.gguf_file import written_gguf
from bench.engines.llama_cpp import IK_LLAMA_CPP, LLAMA_CPP, LlamaCppEngine, llama_version
from bench.engines.own import EngineLostError, SelfSpecEngine
from bench.engines.peer_process import Peer
from bench.engines.transformers_engine import transformers_engines
from bench.models import load_network, open_model
from bench.provenance import provenance
from layerskip_models import load_model
from layerskip_models.checkpoints.loading import FEW_BITS, resolve_device
from layerskip_models.kernels.threads import num_threads
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

    file: the GGUF file that `checkpoint` names, if it does. policies, warmed_up: selfspec's. setting: exit layer and length
    of transformers' early exit, None for its plain decoding alone. max_tokens: of a prompt and its continuation. rows: of
    `load_model`, for selfspec's weights as they are.
    """

    checkpoint: str
    file: Path | None
    dtype: str
    device: str
    policies: Sequence[str]
    warmed_up: Sequence[str] = ()
    setting: tuple[int, int] | None = None
    max_tokens: int
    rows: int | None = None


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
        if resolve_device(work.device).type != "cpu":
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
        model = open_model(work.checkpoint, kind or work.dtype, work.device, None if kind else work.rows)
    else:
        with written_gguf(load_network(work.checkpoint, work.dtype, work.device), kind) as path:
            model = load_model(path, device=work.device)
    generator = SelfSpecGenerator(model, prefix_cache=0)
    engines = [SelfSpecEngine(generator, name, weights=kind) for name in work.policies]
    engines += [SelfSpecEngine(generator, name, warmed_up=True, weights=kind) for name in work.warmed_up]
    return Peer(engines=engines, about={"provenance": provenance(model.device, model.dtype)})


def transformers_peer(work: Work) -> Peer:
    """Make transformers' own decoding."""
    network = load_network(work.checkpoint, work.dtype, work.device)
    return Peer(engines=transformers_engines(network, work.setting))


def llama_peer(program: str, work: Work, kind: str) -> Peer:
    """Make llama.cpp or its fork on the work's file, or on its weights written as `kind`."""
    if not kind:
        assert work.file is not None
        engine = LlamaCppEngine(program, work.file, work.max_tokens)
    else:
        with written_gguf(load_network(work.checkpoint, work.dtype, work.device), kind) as path:
            engine = LlamaCppEngine(program, path, work.max_tokens, kind)
    return Peer(engines=[engine], about={"versions": {program: llama_version(program)}})


def openvino_name(place: Path) -> str:
    """Name OpenVINO GenAI on a GGUF file or an exported folder, as records do."""
    return f"{OPENVINO}:{'the file' if place.suffix == '.gguf' else place.name.removeprefix('openvino-')}"


def openvino_peer(place: Path) -> Peer:
    """Make OpenVINO GenAI on a GGUF file or an exported folder."""
    from bench.engines.openvino_genai import OpenVinoEngine, openvino_version

    engine = OpenVinoEngine(place, openvino_name(place))
    return Peer(engines=[engine], about={"versions": {OPENVINO: openvino_version()}})


_PROGRAMS = {
    SELFSPEC: (
        "from selfspec import SelfSpecGenerator",
        "engine = SelfSpecGenerator.from_pretrained(model, dtype=dtype, device=device, rows=rows)",
        "engine.generate(prompt, max_new_tokens=count, policy=policy, do_sample=False, eos_token_id=[])",
    ),
    LLAMA_CPP: (
        "from llama_cpp import Llama",
        "engine = Llama(model, n_ctx=context, n_threads=threads, verbose=False)",
        "engine(prompt, max_tokens=count, temperature=0.0)",
    ),
    IK_LLAMA_CPP: (
        "from ik_llama_cpp import IkLlama",
        "engine = IkLlama(model, n_ctx=context, n_threads=threads)",
        "engine.generate(engine.tokenize(prompt), max_tokens=count)",
    ),
    OPENVINO: (
        "from openvino_genai import LLMPipeline",
        "engine = LLMPipeline(model, 'CPU', INFERENCE_NUM_THREADS=threads)",
        "engine.generate(prompt, max_new_tokens=count, do_sample=False)",
    ),
}
"""A user's own program, by engine: import it, load a model, continue a prompt."""
_TIMED = """
import json, pathlib, sys
from time import perf_counter
names, marks = json.loads(sys.argv[-1]), [perf_counter()]
for step in names["steps"]:
    exec(step, names)
    marks.append(perf_counter())
names["count"] = names["most"]
exec(step, names)
status = pathlib.Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
peak = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
print(json.dumps([marks, *peak]))
"""


def loaders(asked: Sequence[str], work: Work, prompt: str, timeout: float) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return how to time each engine that reads the work's file, selfspec with each policy, in a new process.

    It holds nothing but what the engine imports. Its times are of importing it, of loading, and of the first token, up to
    which all that happens at a first call is done; its memory is all that it has while it answers the prompt.
    """
    shared = {"prompt": prompt, "count": 1, "most": 32, "context": work.max_tokens, "threads": num_threads()}
    shared |= {"model": work.checkpoint, "dtype": work.dtype, "device": work.device, "rows": work.rows}
    found = {f"{SELFSPEC}:{policy}": {"steps": _PROGRAMS[SELFSPEC], "policy": policy} for policy in work.policies}
    for name in asked:
        program, _, place = name.partition(":")
        if program not in _PACKAGES or find_spec(_PACKAGES[program][0]) is None:
            continue
        if program == OPENVINO:
            path = Path(place or work.checkpoint)
            found[openvino_name(path)] = {"steps": _PROGRAMS[OPENVINO], "model": str(path)}
        elif name in _PROGRAMS:
            found[name] = {"steps": _PROGRAMS[name]}
    return {name: partial(_timed_loading, name, shared | own, timeout) for name, own in found.items()}


def _timed_loading(name: str, names: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run a program of `_PROGRAMS` in a process of its own. Raises EngineLostError if it fails."""
    command = [sys.executable, "-c", _TIMED, json.dumps(names)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # bytecode is kept, as where people work
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout, env=environment)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise EngineLostError(f"{name} did not load: {said[-1]}") from error
    marks, *peak = json.loads(done.stdout.splitlines()[-1])
    importing, loading, first = (after - before for before, after in pairwise(marks))
    seconds = {"import_seconds": importing, "load_seconds": loading, "first_seconds": first}
    return {"engine": name, **seconds, "peak_bytes": peak[0] if peak else None}
