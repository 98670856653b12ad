"""`selfspec-bench peers`: selfspec, transformers, llama.cpp and OpenVINO on one model, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.peer_makers import (
    IK_LLAMA_CPP,
    LLAMA_CPP,
    OPENVINO,
    gguf_kinds,
    installed,
    llama_peer,
    openvino_peer,
    own_gguf_peer,
    own_peer,
    transformers_peer,
)
from bench.commands.preparation import (
    configuration,
    encoded,
    exit_if_outputs_differ,
    num_layers_of,
    open_tokenizer,
    run_line,
    show,
)
from bench.commands.started_peers import measure_peers, start, start_all, tell_lost, versions_of
from bench.datasets import chat_prompts, load_prompts
from bench.engines.own import EngineLostError
from bench.engines.peer_process import Peer
from layerskip_models import DEMO_PATH
from layerskip_models.linear import Layout
from policies import FixedExit, RoundContext, parse_policy
from selfspec.cli.console import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy


def peers(
    model: options.ModelOption = None,
    policy: Annotated[
        str | None, typer.Option(help='Fixed setting "ls:E-G". Default: the checkpoint\'s best known.')
    ] = None,
    prompts: options.PromptsOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages of a user, in the model's chat template.")
    ] = False,
    num_samples: options.NumSamplesOption = 4,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 5,
    warmups: options.WarmupsOption = 2,
    dtype: options.DtypeOption = "float32",
    int8: Annotated[bool, typer.Option("--int8", help="Also run selfspec with weights in 8 bits.")] = False,
    int4: Annotated[bool, typer.Option("--int4", help="Also run selfspec with weights in 4 bits.")] = False,
    llama_cpp: options.LlamaCppOption = None,
    ik_llama_cpp: options.IkLlamaCppOption = None,
    openvino: options.OpenVinoOption = None,
    gguf: options.GgufOption = None,
    transformers: Annotated[bool, typer.Option(help="Run transformers, which takes longest.")] = True,
    peer_timeout: options.PeerTimeoutOption = 600,
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """selfspec against transformers' generate and assistant_early_exit, llama.cpp, ik_llama.cpp and OpenVINO GenAI: the same
    model, one alternating run, greedy.

    Each of them runs in a process of its own and holds the weights itself (so does selfspec for 8 and for 4 bits, and
    llama.cpp for each kind). One that crashes or hangs is left out with a message, and the others go on. Outputs are compared
    with those of selfspec without speculation. Ends with status 1 if one differs by more than a near-tie. Weights rounded to
    8 or 4 bits are another model: their outputs are compared, but a difference is no fault.

    Engines at one number of bits: --dtype bfloat16 and BF16 for 16, --int8 and Q8_0 for 8, --int4 and Q4_0 for 4.
    """
    with one_line_errors(), _loss_in_one_line(), ExitStack() as running:
        checkpoint = str(model or DEMO_PATH)
        num_layers = num_layers_of(checkpoint)
        policy_name = policy or fixed_policy(checkpoint, num_layers)
        setting = _fixed_setting(policy_name, num_layers)
        tokenizer = open_tokenizer(checkpoint)
        if chat:
            samples = chat_prompts(load_prompts(prompts), tokenizer, prompt_tokens, num_samples)
        else:
            samples = encoded(prompts, num_samples, tokenizer, prompt_tokens)
        files = list(dict.fromkeys(gguf or []))
        if unknown := sorted(set(files) - set(options.GGUF_KINDS)):
            raise ValueError(f"--gguf must be {', '.join(options.GGUF_KINDS)}, got {', '.join(unknown)}")
        llamas = [(LLAMA_CPP, kind) for kind in gguf_kinds(LLAMA_CPP, llama_cpp or [], device, files)]
        llamas += [(IK_LLAMA_CPP, kind) for kind in gguf_kinds(IK_LLAMA_CPP, ik_llama_cpp or [], device)]
        exported = openvino if openvino and installed(OPENVINO) else []
        weights = (checkpoint, dtype, device)
        longest = max(sample.ids.numel() for sample in samples) + max_new_tokens
        own = partial(own_peer, *weights, ("ar", policy_name, DEFAULT_POLICY))
        ours = start("selfspec", own, peer_timeout, running)
        others: dict[str, Callable[[], Peer]] = {}
        asked: dict[Layout, bool] = {"int8": int8, "int4": int4}
        for layout in (name for name, wanted in asked.items() if wanted):
            others[f"selfspec {layout}"] = partial(own_peer, *weights, ("ar", DEFAULT_POLICY), layout)
        for kind in files:
            others[f"selfspec {kind}"] = partial(own_gguf_peer, *weights, kind, ("ar", DEFAULT_POLICY))
        for program, kind in llamas:
            others[f"{program} {kind}"] = partial(llama_peer, program, *weights, kind, longest)
        for folder in exported:
            others[f"{OPENVINO} {folder.name}"] = partial(openvino_peer, folder, longest)
        if transformers:
            others["transformers"] = partial(transformers_peer, *weights, setting)
        started, missing = start_all(others, peer_timeout, running)
        engines = [engine for peer in (ours, *started) for engine in peer.engines]
        about = {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
            "policy": policy_name,
            "num_layers": num_layers,
            **ours.about["configuration"],
        }
        where = {**ours.about["provenance"], **versions_of(started)}
        lines, lost = measure_peers(
            run_line("peers", about, engines, where),
            engines,
            samples,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            warmups=warmups,
            dtype=ours.about["dtype"],
            missing=missing,
            output=output,
        )
    show(lines)
    tell_lost(missing, lost)
    exit_if_outputs_differ(lines)


@contextmanager
def _loss_in_one_line() -> Iterator[None]:
    """Without our own engine there is nothing to compare with."""
    try:
        yield
    except EngineLostError as error:
        if error.mistake is not None:
            raise ValueError(error.mistake) from None
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _fixed_setting(policy: str, num_layers: int) -> tuple[int, int]:
    """(exit layer, length) of an "ls:E-G" policy. Raises ValueError for any other."""
    exit_policy = parse_policy(policy, num_layers=num_layers).exit
    plan = exit_policy.plan(RoundContext(round_index=0, num_committed=1, remaining_tokens=1))
    if not isinstance(exit_policy, FixedExit) or plan.exit_layer is None:
        raise ValueError(f'--policy must be a fixed setting such as "ls:3-6", got {policy!r}')
    return plan.exit_layer, plan.max_speculations
