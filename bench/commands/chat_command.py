"""`selfspec-bench chat`: one file in selfspec, llama.cpp, ik_llama.cpp and OpenVINO GenAI, on chat prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.loaded_peers import (
    load_once,
    loading_line,
    other_file_peer,
    own_file_peer,
)
from bench.commands.peer_makers import IK_LLAMA_CPP, LLAMA_CPP, OPENVINO, installed
from bench.commands.preparation import (
    configuration,
    exit_if_outputs_differ,
    run_line,
    show,
)
from bench.commands.started_peers import measure_peers, start, start_all, tell_lost, versions_of
from bench.datasets import chat_prompts, load_prompts
from bench.engines.peer_process import Peer
from bench.measure import until_end
from layerskip_models import load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from selfspec.cli.arguments import one_line_errors
from selfspec.defaults import DEFAULT_POLICY


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
        samples = [until_end(sample, engines[0], max_new_tokens, tokenizer.eos_token_id) for sample in samples]
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
