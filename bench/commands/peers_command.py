"""`selfspec-bench peers`: selfspec, transformers and llama.cpp on the same weights, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from bench.commands import bench_options as options
from bench.commands.peers_by_bits import measure_by_bits
from bench.commands.preparation import (
    configuration,
    encoded,
    exit_if_outputs_differ,
    llama_cpp_kinds,
    load_network,
    num_layers_of,
    open_tokenizer,
    run_line,
    show,
    transformers_engines,
)
from bench.commands.started_peers import (
    PeerTimeoutOption,
    llama_cpp_version_of,
    measure_peers,
    start,
    start_all,
    tell_lost,
)
from bench.engines.own import EngineLostError, SelfSpecEngine
from bench.engines.peer_process import Peer
from bench.provenance import llama_cpp_version, provenance
from layerskip_models import DEMO_PATH, from_transformers, load_model
from layerskip_models.linear import Layout
from policies import FixedExit, RoundContext, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.defaults import DEFAULT_POLICY, fixed_policy


def peers(
    model: options.ModelOption = None,
    policy: Annotated[
        str | None, typer.Option(help='Fixed setting "ls:E-G". Default: the checkpoint\'s best known.')
    ] = None,
    prompts: options.PromptsOption = None,
    num_samples: options.NumSamplesOption = 4,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    repeats: options.RepeatsOption = 5,
    warmups: options.WarmupsOption = 2,
    dtype: options.DtypeOption = "float32",
    int8: Annotated[bool, typer.Option("--int8", help="Also run selfspec with weights in 8 bits.")] = False,
    int4: Annotated[bool, typer.Option("--int4", help="Also run selfspec with weights in 4 bits.")] = False,
    llama_cpp: options.LlamaCppOption = None,
    gguf: options.GgufOption = None,
    transformers: Annotated[bool, typer.Option(help="Run transformers, which takes longest.")] = True,
    converted: Annotated[
        Path | None,
        typer.Option(
            help="Folder that `selfspec-bench convert` wrote. Its weights are run, and no others, by selfspec, llama.cpp, "
            "ik_llama.cpp, OpenVINO GenAI, ONNX Runtime GenAI and CTranslate2."
        ),
    ] = None,
    bits: Annotated[str, typer.Option(help="With --converted: of the weights.")] = "16,8,4",
    texts: Annotated[int, typer.Option(min=2, help="With --converted: texts decoded together, beside one alone.")] = 8,
    loads: Annotated[int, typer.Option(min=1, help="With --converted: how often each engine is loaded.")] = 2,
    peer_timeout: PeerTimeoutOption = 600,
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
) -> None:
    """selfspec against transformers' generate and assistant_early_exit, and llama.cpp: same weights, one alternating run,
    greedy. With --converted: beside five other engines, at 16, 8 and 4 bits, on one text and on several.

    Each of them runs in a process of its own and holds the weights itself (so does selfspec for 8 and for 4 bits, and
    llama.cpp for each kind). One that crashes or hangs is left out with a message, and the others go on. Outputs are compared
    with those of selfspec without speculation. Ends with status 1 if one differs by more than a near-tie. Weights rounded to
    8 or 4 bits are another model: their outputs are compared, but a difference is no fault.
    """
    if converted is not None:
        with one_line_errors(), _loss_in_one_line():
            if model is not None or policy is not None or llama_cpp or gguf or int8 or int4:
                raise ValueError(
                    "--converted brings its own weights and engines: leave out --model, --policy, --llama-cpp, --gguf, "
                    "--int8 and --int4"
                )
            lines, left_out = measure_by_bits(
                converted,
                bits=bits,
                texts=texts,
                prompts=prompts,
                num_samples=num_samples,
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                loads=loads,
                timeout=peer_timeout,
                output=output,
            )
        show(lines)
        tell_lost({}, left_out)
        return
    with one_line_errors(), _loss_in_one_line(), ExitStack() as running:
        checkpoint = str(model or DEMO_PATH)
        num_layers = num_layers_of(checkpoint)
        policy_name = policy or fixed_policy(checkpoint, num_layers)
        exit_layer, num_speculations = _fixed_setting(policy_name, num_layers)
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        files = list(dict.fromkeys(gguf or []))
        if unknown := sorted(set(files) - set(options.GGUF_KINDS)):
            raise ValueError(f"--gguf must be {', '.join(options.GGUF_KINDS)}, got {', '.join(unknown)}")
        kinds = llama_cpp_kinds(llama_cpp or [], device, files)
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
        for kind in kinds:
            others[f"llama.cpp {kind}"] = partial(llama_cpp_peer, *weights, kind, longest)
        if transformers:
            others["transformers"] = partial(transformers_peer, *weights, exit_layer, num_speculations)
        started, missing = start_all(others, peer_timeout, running)
        engines = [engine for peer in (ours, *started) for engine in peer.engines]
        found = ours.about["provenance"]
        about = {
            **configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
            "policy": policy_name,
            "num_layers": num_layers,
            **ours.about["configuration"],
        }
        where = {**found, "llama_cpp": llama_cpp_version_of(started, found["llama_cpp"])}
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
    from bench.engines.gguf_file import write_gguf  # its package is optional

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(load_network(checkpoint, dtype, device), path, kind)
        generator = SelfSpecGenerator(load_model(path, device=device), prefix_cache=0)
    return Peer(engines=[SelfSpecEngine(generator, name, weights=kind) for name in policies], about={})


def llama_cpp_peer(checkpoint: str, dtype: str, device: str, kind: str, max_tokens: int) -> Peer:
    """llama.cpp on the weights as this kind. max_tokens: of a prompt and its continuation."""
    from bench.engines.llama_cpp import LlamaCppEngine  # its packages are optional

    engine = LlamaCppEngine(load_network(checkpoint, dtype, device), kind, max_tokens)
    return Peer(engines=[engine], about={"llama_cpp": llama_cpp_version()})


def transformers_peer(checkpoint: str, dtype: str, device: str, exit_layer: int, num_speculations: int) -> Peer:
    """transformers' own decoding."""
    return Peer(engines=transformers_engines(load_network(checkpoint, dtype, device), exit_layer, num_speculations))


def _fixed_setting(policy: str, num_layers: int) -> tuple[int, int]:
    """(exit layer, length) of an "ls:E-G" policy. Raises ValueError for any other."""
    exit_policy = parse_policy(policy, num_layers=num_layers).exit
    plan = exit_policy.plan(RoundContext(round_index=0, num_committed=1, remaining_tokens=1))
    if not isinstance(exit_policy, FixedExit) or plan.exit_layer is None:
        raise ValueError(f'--policy must be a fixed setting such as "ls:3-6", got {policy!r}')
    return plan.exit_layer, plan.max_speculations
