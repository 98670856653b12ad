"""`selfspec-bench chat`: one file in selfspec, llama.cpp, ik_llama.cpp and OpenVINO GenAI, on chat prompts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from bench.commands import bench_options as options
from bench.commands.peer_makers import IK_LLAMA_CPP, LLAMA_CPP, OPENVINO, PACKAGES, engine_on_file, installed
from bench.commands.preparation import (
    configuration,
    exit_if_outputs_differ,
    run_line,
    show,
)
from bench.commands.started_peers import measure_peers, start, start_all, tell_lost, versions_of
from bench.datasets import chat_prompts, load_prompts
from bench.engines.own import EngineLostError, SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.machine.memory import forget_peak, peak_bytes_of, resident_bytes
from bench.measure import until_end
from bench.provenance import provenance
from bench.record import Line
from layerskip_models import load_model, load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.checkpoints.loading import find_source
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY
from selfspec.engine.request import end_tokens

_FIRST = torch.tensor([0])
"""A prompt of one token: what happens only at the first call is part of loading."""


def chat(
    model: Annotated[
        str, typer.Option(help="GGUF file, or a name such as smollm2; without the other engines, any checkpoint.")
    ],
    prompts: Annotated[
        Path, typer.Option(help='Messages to answer, .jsonl[.gz] with "id", "task" (their kind), "prompt".')
    ],
    num_samples: options.NumSamplesOption = 20,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum prompt length with the template; longer ones are left out.")
    ] = 1024,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 3,
    warmups: options.WarmupsOption = 1,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to run beside plain decoding; repeatable. Default: auto.")
    ] = None,
    kept: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to run without forgetting between prompts, as in ordinary use; repeatable. Default: auto."
        ),
    ] = None,
    llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp/--no-llama-cpp", help="Give the file to llama.cpp, too.")
    ] = True,
    ik_llama_cpp: Annotated[
        bool, typer.Option("--ik-llama-cpp/--no-ik-llama-cpp", help="Give the file to ik_llama.cpp, too.")
    ] = False,
    openvino: options.OpenVinoOption = None,
    openvino_file: Annotated[
        bool, typer.Option("--openvino-file/--no-openvino-file", help="Give the file to OpenVINO GenAI, too.")
    ] = True,
    loads: Annotated[int, typer.Option(min=1, help="How often each engine is loaded, in a new process each time.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="What selfspec loads the weights in, such as bfloat16; auto: as in ordinary use.")
    ] = "auto",
    peer_timeout: options.PeerTimeoutOption = 600,
    output: options.OutputOption = None,
) -> None:
    """Answers to chat prompts from one model: loading, prompts, decoding and memory; engines in turn, greedy, on a CPU.

    Each engine runs in a process of its own. An answer ends where the model ends it, or after --max-new-tokens, and every
    engine decodes as many tokens as plain decoding with selfspec did. Tables show medians, and ratios of runs on the same
    prompt side by side, by the prompts' "task".
    """
    with one_line_errors(), ExitStack() as running:
        path = gguf_file(resolve_checkpoint(model))
        if path is None and (llama_cpp or ik_llama_cpp or openvino_file):
            raise ValueError(
                f"--model must be a GGUF file, which the other engines read as well, got {model!r}; without them "
                "(--no-llama-cpp --no-openvino-file) any checkpoint will do"
            )
        path = Path(resolve_checkpoint(model)) if path is None else path
        tokenizer = load_tokenizer(path)
        samples = chat_prompts(load_prompts(prompts), tokenizer, prompt_tokens, num_samples)
        longest = max(sample.ids.numel() for sample in samples) + max_new_tokens
        makers: dict[str, Callable[[], Peer]] = {
            f"selfspec {name}": partial(own_file_peer, path, name, False, dtype)
            for name in ("ar", *(policy or [DEFAULT_POLICY]))
        }
        makers |= {
            f"selfspec {name}, kept": partial(own_file_peer, path, name, True, dtype)
            for name in kept or [DEFAULT_POLICY]
        }
        for program, wanted in ((LLAMA_CPP, llama_cpp), (IK_LLAMA_CPP, ik_llama_cpp)):
            if wanted and installed(program):
                makers[program] = partial(other_file_peer, program, path, longest)
        exported = [*([path] if openvino_file else []), *(openvino or [])]
        for place in exported if exported and installed(OPENVINO) else ():
            makers[f"{OPENVINO} {place.name}"] = partial(other_file_peer, OPENVINO, place, longest)
        earlier = [load_once(name, make, peer_timeout) for _ in range(loads - 1) for name, make in makers.items()]
        (own_name, own), *others = makers.items()
        ours = start(own_name, own, peer_timeout, running)
        started, missing = start_all(dict(others), peer_timeout, running)
        processes = [ours, *started]
        engines = [peer.engines[0] for peer in processes]
        ends = end_tokens(find_source(path, None, True).generation_config(), tokenizer)
        samples = [until_end(sample, engines[0], max_new_tokens, ends) for sample in samples]
        about = {
            **configuration(path.name, samples, max_new_tokens, repeats, warmups),
            "eos": "where plain decoding ends",
            "weights": dtype,
        }
        lines, lost = measure_peers(
            run_line("chat", about, engines, versions_of(processes)),
            engines,
            samples,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            warmups=warmups,
            dtype=ours.about["dtype"],
            missing=missing,
            output=output,
            told=lambda: [*filter(None, earlier), *(loading_line(peer) for peer in processes)],
        )
    show(lines)
    tell_lost(missing, lost)
    exit_if_outputs_differ(lines)


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
    """Return what a record says about an engine's process: how it loaded, and its peak memory since then."""
    return {
        "kind": "loading",
        "engine": peer.engines[0].name,
        **peer.about["loading"],
        "peak_bytes": peak_bytes_of(peer.pid),
    }


def load_once(name: str, make: Callable[[], Peer], timeout: float) -> Line | None:
    """Return the line for an engine in a process that ends as soon as it has loaded; None if it cannot load."""
    with ExitStack() as running:
        try:
            return loading_line(start(name, make, timeout, running))
        except EngineLostError:
            return None


def _loaded(make: Callable[[], tuple[TimedEngine, Mapping[str, Any]]], importing: str) -> Peer:
    """Return the engine that `make` gives with what the parent is to know of it, once it has said a first token.

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
