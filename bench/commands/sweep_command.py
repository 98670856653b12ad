"""`selfspec-bench sweep`: every exit layer and length by replay; the most promising are timed for real."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands import bench_options as options
from bench.commands.session import configuration, encoded, header, progress, recording, show, write_engines
from bench.datasets import EncodedPrompt
from bench.engines.own import SelfSpecEngine
from bench.machine import calibrated
from bench.measure import Measurement
from bench.models import num_layers_of, open_model, open_tokenizer
from bench.provenance import provenance
from bench.record import Line, Record, matching
from bench.report.summary import Samples
from bench.report.table import mean
from layerskip_models import DEMO_PATH
from layerskip_models.text_files import write_text
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import replay, trace_agreement
from selfspec.cli.console import one_line_errors
from selfspec.defaults import SETTINGS_FILE


def sweep(
    model: options.ModelOption = None,
    exit_layers: Annotated[str | None, typer.Option(help='As "1-8" or "2,4,6"; default: the first half.')] = None,
    num_speculations: Annotated[
        str | None, typer.Option(help='Drafts a round, as "1-8" or "2,4,6"; default: 1-10.')
    ] = None,
    prompts: options.PromptsOption = None,
    num_samples: options.NumSamplesOption = 8,
    prompt_tokens: options.PromptTokensOption = 320,
    max_new_tokens: options.NewTokensOption = 128,
    num_timed: Annotated[int, typer.Option(min=1, help="Number of settings to time, best predictions first.")] = 6,
    repeats: options.RepeatsOption = 5,
    warmups: options.WarmupsOption = 2,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    output: options.OutputOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the best setting next to the checkpoint's weights.")
    ] = False,
) -> None:
    """Find the best exit layer and length; greedy.

    Settings are ranked by replay of traced runs, and the most promising are timed. Ends with status 1 if an output differs
    from autoregressive decoding by more than a near-tie.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        if write and not Path(checkpoint).is_dir():
            raise ValueError(f"--write needs a local checkpoint folder, got {checkpoint!r}: download it first")
        num_layers = num_layers_of(checkpoint)
        layers, lengths = _ranges(exit_layers, num_speculations, num_layers)
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, device), prefix_cache=0)
        about = configuration(
            checkpoint,
            samples,
            max_new_tokens,
            repeats,
            warmups=warmups,
            axes=[layers, lengths],
            num_layers=num_layers,
            num_timed=num_timed,
        )
        first = header("sweep", about, provenance(generator.model.device, generator.model.dtype))
    with recording(output, first) as record:
        cells = _cells(record, generator, product(layers, lengths), samples, max_new_tokens)
        names = ["ar", *(cell["policy"] for cell in cells[:num_timed])]
        engines = [SelfSpecEngine(generator, name) for name in names]
        write_engines(record, engines)
        measurement = Measurement(
            engines=engines,
            prompts=samples,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            warmups=warmups,
            dtype=generator.model.weights_dtype,
            record=record,
        )
        with progress(measurement.num_runs()) as measurement.advance:
            measurement.run()
        best = record.once("best", lambda: best_setting(record.lines, names[1:]))
    if write:
        path = write_setting(Path(checkpoint), best, record.lines[0])
        typer.echo(
            f"{best['policy']} is now the best known fixed setting of this checkpoint ({path.name} beside its weights)"
        )
    if best["policy"].endswith(f"-{lengths[-1]}"):
        typer.echo(
            f"the best setting is at the edge of the grid: try --num-speculations up to {2 * lengths[-1]}", err=True
        )
    if best["speedup"] < 1:
        typer.echo("no setting was faster than autoregressive decoding (num_speculations=0)", err=True)
    show(record.lines)


def _ranges(exit_layers: str | None, num_speculations: str | None, num_layers: int) -> tuple[list[int], list[int]]:
    """Return the exit layers and lengths of the options, checked."""
    last = num_layers - 1
    layers = parse_range(exit_layers or f"1-{max(1, num_layers // 2)}", "--exit-layers")
    if layers[-1] > last:
        raise ValueError(f"--exit-layers must be in [1, {last}] for this {num_layers}-layer model, got {layers[-1]}")
    return layers, parse_range(num_speculations or "1-10", "--num-speculations")


def parse_range(text: str, what: str) -> list[int]:
    """Read "1-4,8" as [1, 2, 3, 4, 8]. Raises ValueError that names `what` for anything else, and for numbers below 1."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f'{what} must look like "1-8" or "2,4,6", got {text!r}')
        numbers.update(range(int(first), int(last if dash else first) + 1))
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{what} must be numbers from 1 on, in rising ranges, got {text!r}")
    return sorted(numbers)


def _cells(
    record: Record,
    generator: SelfSpecGenerator,
    settings: Iterable[tuple[int, int]],
    samples: Sequence[EncodedPrompt],
    max_new_tokens: int,
) -> list[Line]:
    """Write a line for each setting: its rounds, and the speed-up over plain decoding that measured costs predict.

    Returns the lines, the best prediction first. Rates are means over prompts; tokens are those committed in rounds.
    """
    cost = calibrated(generator, record)
    if record.find("traced") is None:
        traces = []
        with progress(len(samples)) as advance:
            for sample in samples:
                traces.append(trace_agreement(generator, sample.ids, max_new_tokens))
                advance("tracing every layer")
        for exit_layer, length in settings:
            runs = [replay(trace, exit_layer, length) for trace in traces]
            plain = sum(run.num_tokens for run in runs) * cost.autoregressive()
            record.write(
                "cell",
                policy=f"ls:{exit_layer}-{length}",
                rounds=sum(run.rounds for run in runs),
                loaded_layers=sum(run.loaded_layers for run in runs),
                acceptance_rate=mean(run.acceptance_rate for run in runs),
                tokens_per_round=mean(run.tokens_per_round for run in runs),
                etpl=mean(run.etpl for run in runs),
                predicted_speedup=plain / sum(run.cost(cost) for run in runs),
            )
        record.write("traced")
    cells = {line["policy"]: line for line in matching(record.lines, "cell")}
    return sorted(cells.values(), key=lambda cell: -cell["predicted_speedup"])


def best_setting(lines: Sequence[Line], policies: Sequence[str]) -> dict[str, Any]:
    """Return which measured policy was fastest, and its speed-up over plain decoding."""
    samples = Samples(lines)
    measured = {policy: samples.speedup(f"selfspec:{policy}", "selfspec:ar") for policy in policies}
    policy, speedup = max(measured.items(), key=lambda item: item[1].value)
    return {"policy": policy, "speedup": speedup.value, "low": speedup.low, "high": speedup.high}


def write_setting(folder: Path, best: Mapping[str, Any], run: Mapping[str, Any]) -> Path:
    """Put the best setting beside the checkpoint, where `selfspec.defaults` finds it. Returns the file's path."""
    path = folder / SETTINGS_FILE
    machine = run["provenance"]
    setting = {
        "policy": best["policy"],
        "found_by": "selfspec-bench sweep",
        "speedup_over_autoregressive": round(best["speedup"], 3),
        "prompts": run["configuration"]["prompts_digest"],
        "max_new_tokens": run["configuration"]["max_new_tokens"],
        "device": machine["cpu"] if machine["device"] == "cpu" else machine["device"],
        "threads": machine["threads"],
        "dtype": machine["dtype"],
    }
    write_text(path, json.dumps(setting, indent=2, ensure_ascii=False) + "\n")
    return path
