"""`selfspec-bench`: peers (against transformers), sweep (best fixed setting), policies (side by side), report (tables)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM
from transformers.utils import logging

from bench.datasets import EncodedPrompt, Prompt, digest, encode_prompts, load_prompts, select_prompts
from bench.engines import Engine, SelfSpecEngine
from bench.measure import measure, num_runs
from bench.peers import (
    transformers_early_exit,
    transformers_early_exit_default,
    transformers_generate,
    transformers_static,
)
from bench.policy_table import DEFAULT_POLICIES, check_halves, run_policies
from bench.provenance import provenance, weights_digest
from bench.record import RecordWriter, read_record
from bench.report import fill_markers, headline, markdown, tables
from bench.summary import Bar, Samples, bar_line
from bench.sweep import (
    agreement_line,
    best_line,
    parse_range,
    replay_grid,
    replay_line,
    sweep_engines,
    trace_prompts,
    write_setting,
)
from layerskip_models import DEMO_PATH, from_transformers, load_model, load_tokenizer
from layerskip_models.loading import load_config, resolve_device, resolve_dtype
from policies import FixedExit, RoundContext, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.calibrate import measured_cost
from selfspec.cli_common import one_line_errors
from selfspec.defaults import fixed_policy
from selfspec.replay import GRID_LENGTHS

app = typer.Typer(
    help="Measure self-speculative decoding: against transformers, and over exit layers and lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_errors = Console(stderr=True)

ModelOption = Annotated[str | None, typer.Option(help="LayerSkip checkpoint: folder or hub name; default: the demo.")]
PromptsOption = Annotated[
    Path | None, typer.Option(help='Prompts, .jsonl[.gz] with "id", "task", "prompt"; default: the shipped ones.')
]
NumSamplesOption = Annotated[int, typer.Option(min=1, help="Prompts to measure, the tasks taking turns.")]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Longer prompts keep their last so many tokens.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed runs of each engine on each prompt.")]
WarmupsOption = Annotated[int, typer.Option(min=0, help="Runs of each engine before, not counted.")]
DtypeOption = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
OutputOption = Annotated[Path | None, typer.Option(help="Write the record, JSON lines, to this file.")]


@app.command()
def peers(
    model: ModelOption = None,
    policy: Annotated[str | None, typer.Option(help='"ls:E-G"; default: the checkpoint\'s best known.')] = None,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 4,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 128,
    repeats: RepeatsOption = 5,
    warmups: WarmupsOption = 2,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """selfspec against transformers' generate and assistant_early_exit: same weights, one alternating run, greedy.

    Ends with status 1 if an output differs by more than a near-tie.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        target = resolve_device(device)
        config = load_config(checkpoint)
        chosen_dtype = resolve_dtype(dtype, target, getattr(config, "dtype", None))
        policy_name = policy or fixed_policy(checkpoint, config.num_hidden_layers)
        exit_layer, num_speculations = _fixed_setting(policy_name, config.num_hidden_layers)
        samples = encode_prompts(
            select_prompts(load_prompts(prompts), num_samples), load_tokenizer(checkpoint), prompt_tokens
        )
        network = LlamaForCausalLM.from_pretrained(
            checkpoint, config=config, dtype=chosen_dtype, use_safetensors=True, trust_remote_code=False
        )
        network = network.to(target).eval()
        generator = SelfSpecGenerator(from_transformers(network))
    engines: list[Engine] = [
        transformers_generate(network),  # first, so that outputs are compared with its
        SelfSpecEngine(generator, "ar"),
        SelfSpecEngine(generator, policy_name),
        transformers_early_exit(network, exit_layer, num_speculations),
        transformers_early_exit_default(network, exit_layer),
    ]
    if target.type == "cuda":
        engines.insert(1, transformers_static(network))
    run = {
        "kind": "run",
        "command": "peers",
        "configuration": {
            **_configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
            "policy": policy_name,
            "num_layers": config.num_hidden_layers,
            "attention": network.config._attn_implementation,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
        },
        "engines": {engine.name: engine.label for engine in engines},
        "provenance": provenance(target, chosen_dtype),
    }
    total = num_runs(len(engines), len(samples), repeats=repeats, warmups=warmups)
    with RecordWriter(output) as record:
        record.write(run)
        with _progress(total) as advance:
            measure(
                engines,
                samples,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=chosen_dtype,
                write=record.write,
                advance=advance,
            )
        results = Samples(record.lines)
        for bar in issue_bars(policy_name, engines):
            record.write(bar_line(results, bar))
    _show(record.lines)
    _exit_if_outputs_differ(record.lines)


def issue_bars(policy: str, engines: Sequence[Engine]) -> list[Bar]:
    """What the project set out to reach on its demo model and a CPU, in float32."""
    early_exits = [engine.name for engine in engines if ":early-exit:" in engine.name]
    return [
        Bar(engine="selfspec:ar", baseline="transformers:generate", at_least=1.8),
        Bar(engine=f"selfspec:{policy}", baseline="transformers:generate", at_least=2.7),
        *(Bar(engine=f"selfspec:{policy}", baseline=name, at_least=2.8) for name in early_exits),
    ]


@app.command()
def sweep(
    model: ModelOption = None,
    exit_layers: Annotated[str | None, typer.Option(help='As "1-8" or "2,4,6"; default: the first half.')] = None,
    num_speculations: Annotated[str, typer.Option(help='Drafts a round, as "1-8" or "2,4,6".')] = "1-10",
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 8,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 128,
    num_timed: Annotated[int, typer.Option(min=1, help="Cells to time for real, the best by prediction.")] = 6,
    repeats: RepeatsOption = 5,
    warmups: WarmupsOption = 2,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the best beside the checkpoint's weights.")] = False,
) -> None:
    """Find the best exit layer and length: all by replay of traced runs, the promising ones timed; greedy.

    Ends with status 1 if an output differs from autoregressive decoding by more than a near-tie.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        if write and not Path(checkpoint).is_dir():
            raise ValueError(f"--write needs a local checkpoint folder, got {checkpoint!r}: download it first")
        config = load_config(checkpoint)
        last = config.num_hidden_layers - 1
        layers = parse_range(exit_layers or f"1-{max(1, (last + 1) // 2)}", "--exit-layers")
        if layers[-1] > last:
            raise ValueError(f"--exit-layers must be in [1, {last}] for this {last + 1}-layer model, got {layers[-1]}")
        lengths = parse_range(num_speculations, "--num-speculations")
        samples = encode_prompts(
            select_prompts(load_prompts(prompts), num_samples), load_tokenizer(checkpoint), prompt_tokens
        )
        generator = SelfSpecGenerator(load_model(checkpoint, dtype=dtype, device=device))
    network = generator.model
    num_timed = min(num_timed, len(layers) * len(lengths))
    run: dict[str, Any] = {
        "kind": "run",
        "command": "sweep",
        "configuration": {
            **_configuration(checkpoint, samples, max_new_tokens, repeats, warmups),
            "exit_layers": layers,
            "num_speculations": lengths,
            "num_layers": network.num_layers,
        },
        "provenance": provenance(network.device, network.dtype),
    }
    total = len(samples) + num_runs(num_timed + 1, len(samples), repeats=repeats, warmups=warmups)
    with RecordWriter(output) as record:
        with _progress(total) as advance:
            traces = trace_prompts(generator, samples, max_new_tokens, advance)
            cost = measured_cost(network)
            cells = replay_grid(traces, layers, lengths, cost)
            engines = sweep_engines(generator, cells[:num_timed])
            record.write({**run, "engines": {engine.name: engine.label for engine in engines}})
            record.write({"kind": "costs", **cost.as_dict()})
            record.write(agreement_line(traces))
            for cell in cells:
                record.write(cell.as_line())
            measure(
                engines,
                samples,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=network.dtype,
                write=record.write,
                advance=advance,
            )
        record.write(replay_line(record.lines, cells[:num_timed], samples))
        best = best_line(record.lines, cells[:num_timed])
        record.write(best)
    _show(record.lines)
    if write:
        path = write_setting(Path(checkpoint), best, run)
        typer.echo(
            f"{best['policy']} is now the best known fixed setting of this checkpoint ({path.name} beside its weights)"
        )
    if best["policy"].endswith(f"-{lengths[-1]}"):
        typer.echo(
            f"the best setting is at the edge of the grid: try --num-speculations up to {2 * lengths[-1]}", err=True
        )
    if best["speedup"] < 1:
        typer.echo("no setting was faster than autoregressive decoding (num_speculations=0)", err=True)
    _exit_if_outputs_differ(record.lines)


@app.command()
def policies(
    model: ModelOption = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to run; repeatable. Default: auto, DEL and its variants.")
    ] = None,
    baseline: Annotated[
        list[int] | None, typer.Option(help="Exit layers at which fs, dv, svip, adaedl and spide run; repeatable.")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="File of prompts; repeatable. Default: the shipped ones.")
    ] = None,
    num_per_task: Annotated[int, typer.Option(min=2, help="Prompts of each task.")] = 20,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 96,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    output: OutputOption = None,
) -> None:
    """Policies side by side over kinds of prompts: eTPL and speed, beside the best fixed settings of the whole grid."""
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        paths: list[Path | None] = [*prompts] if prompts else [None]
        loaded = [prompt for path in paths for prompt in load_prompts(path)]
        by_task: dict[str, list[Prompt]] = {}
        for prompt in loaded:
            by_task.setdefault(prompt.task, []).append(prompt)
        chosen = [prompt for group in by_task.values() for prompt in group[:num_per_task]]
        samples = encode_prompts(chosen, load_tokenizer(checkpoint), prompt_tokens)
        check_halves(samples)
        generator = SelfSpecGenerator(load_model(checkpoint, dtype=dtype, device=device))
        network = generator.model
        names = ["ar", *(policy or DEFAULT_POLICIES)]
        for layer in baseline or []:
            names += [f"fs:{layer}-4", f"dv:{layer}", f"svip:{layer}", f"adaedl:{layer}"]
            names += [f"spide:{layer},tau={tau}" for tau in (0.5, 0.7)]
        for name in names:
            generator.resolve_policy(name)
    cost = measured_cost(network)
    with RecordWriter(output) as record:
        record.write(
            {
                "kind": "run",
                "command": "policies",
                "configuration": {
                    **_configuration(checkpoint, samples, max_new_tokens, 1, 0),
                    "num_layers": network.num_layers,
                },
                "engines": {},
                "provenance": provenance(network.device, network.dtype),
            }
        )
        record.write({"kind": "costs", **cost.as_dict()})
        with _progress(len(samples) * (len(names) + 1)) as advance:
            run_policies(
                generator,
                samples,
                names,
                max_new_tokens=max_new_tokens,
                exit_layers=range(1, network.num_layers),
                lengths=GRID_LENGTHS,
                cost=cost,
                write=record.write,
                advance=advance,
            )
    _show(record.lines)


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Records that peers or sweep wrote.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Markdown file; default: print.")] = None,
    into: Annotated[
        list[Path] | None,
        typer.Option(help="Fill a document's <!-- report:NAME --> places; NAME: a record's file name, no ending."),
    ] = None,
) -> None:
    """Turn records into Markdown tables."""
    with one_line_errors():
        loaded = {path.stem: read_record(path) for path in records}
        for document in into or []:
            text = document.read_text(encoding="utf-8")
            document.write_text(fill_markers(text, loaded), encoding="utf-8")
        page = "\n".join(markdown(lines) for lines in loaded.values())
        if output is not None:
            output.write_text(page, encoding="utf-8")
        elif not into:
            typer.echo(page, nl=False)


def main() -> None:
    """Entry point of `selfspec-bench`."""
    # Its hints and loading bars would tear the progress bar apart; errors are still raised.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    app()


def _fixed_setting(policy: str, num_layers: int) -> tuple[int, int]:
    """(exit layer, length) of an "ls:E-G" policy. Raises ValueError for any other."""
    exit_policy = parse_policy(policy, num_layers=num_layers).exit
    plan = exit_policy.plan(RoundContext(round_index=0, num_committed=1, remaining_tokens=1))
    if not isinstance(exit_policy, FixedExit) or plan.exit_layer is None:
        raise ValueError(f'--policy must be a fixed setting such as "ls:3-6", got {policy!r}')
    return plan.exit_layer, plan.max_speculations


def _configuration(
    checkpoint: str, prompts: Sequence[EncodedPrompt], max_new_tokens: int, repeats: int, warmups: int
) -> dict[str, Any]:
    """What a record says about any run. A local checkpoint is named by its folder alone."""
    is_folder = Path(checkpoint).is_dir()
    return {
        "model": "the demo model"
        if checkpoint == str(DEMO_PATH)
        else Path(checkpoint).resolve().name
        if is_folder
        else checkpoint,
        "weights_digest": weights_digest(Path(checkpoint)) if is_folder else None,
        "prompts": [prompt.id for prompt in prompts],
        "prompts_digest": digest(prompts),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "warmups": warmups,
        "eos": "off",
        "do_sample": False,
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr with the time left; yields what moves it by one. Silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_errors, disable=not _errors.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield advance


def _show(lines: Sequence[Mapping[str, Any]]) -> None:
    console = Console()
    records = [dict(line) for line in lines]
    for table in tables(records):
        console.print(table.rich())
    console.print(headline(records), markup=False, highlight=False)


def _exit_if_outputs_differ(lines: Sequence[Mapping[str, Any]]) -> None:
    """Name every difference that is no near-tie, and end with status 1 if there is one."""
    faults = [line for line in lines if line["kind"] == "output" and line["near_tie"] is False]
    for line in faults:
        typer.echo(
            f"{line['engine']} differs from {line['reference']} on {line['prompt']} at new token "
            f"{line['first_difference']}, where the reference's top two logits are {line['reference_logit_gap']:.3g} apart",
            err=True,
        )
    if faults:
        raise typer.Exit(1)
