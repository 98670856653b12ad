"""`selfspec-bench sweep`: every exit layer and length by replay; the most promising are timed for real."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import typer

from bench.commands.bench_options import SweepCommand
from bench.commands.session import encoded, header, loaded, measure, progress, recording, show, write_engines
from bench.datasets import EncodedPrompt
from bench.engines.own import SelfSpecEngine
from bench.models import num_layers_of, open_tokenizer
from bench.provenance import provenance
from bench.record import PLAIN, Line, Record, matching
from bench.report.summary import Samples
from layerskip_models.text_files import write_text
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import replay, trace_agreement
from selfspec.cli.console import one_line_errors
from selfspec.defaults import SETTINGS_FILE
from selfspec.engine.expected_cost import expected_cost
from selfspec.engine.results import mean


def sweep(options: SweepCommand) -> None:
    with one_line_errors():
        if options.write and not Path(options.model).is_dir():
            raise ValueError(f"--write needs a local checkpoint folder, got {options.model!r}: download it first")
        num_layers = num_layers_of(options.model)
        layers = parse_range(options.exit_layers or f"1-{max(1, num_layers // 2)}", "--exit-layers")
        if layers[-1] >= num_layers:
            allowed = f"[1, {num_layers - 1}] for this {num_layers}-layer model"
            raise ValueError(f"--exit-layers must be in {allowed}, got {layers[-1]}")
        lengths = parse_range(options.num_speculations or "1-10", "--num-speculations")
        samples = encoded(options.prompts, options.num_samples, open_tokenizer(options.model), options.prompt_tokens)
        generator = SelfSpecGenerator(loaded(options), prefix_cache=0)
        where = provenance(generator.model.device, generator.model.dtype)
        asked: dict[str, Any] = {"warmups": options.warmups, "num_layers": num_layers, "num_timed": options.num_timed}
        asked["axes"] = [layers, lengths]
        first = header("sweep", where, options.model, samples, options.max_new_tokens, options.repeats, **asked)
    with recording(options.output, first) as record:
        cells = _cells(record, generator, product(layers, lengths), samples, options.max_new_tokens)
        names = ["ar", *(cell["policy"] for cell in cells[: options.num_timed])]
        engines = [SelfSpecEngine(generator, name) for name in names]
        write_engines(record, engines)
        measure(record, engines, samples)
        timed = Samples(record.lines)
        speedups = {name: timed.speedup(f"selfspec:{name}", PLAIN) for name in names[1:]}
        name, found = max(speedups.items(), key=lambda item: item[1].value)
        chosen = partial(dict[str, Any], policy=name, speedup=found.value, low=found.low, high=found.high)
        best = record.once("best", chosen)
    if options.write:
        setting = {
            "policy": best["policy"],
            "found_by": record.lines[0]["provenance"]["command"],
            "speedup_over_autoregressive": round(best["speedup"], 3),
            **{name: record.lines[0]["provenance"][name] for name in ("device", "cpu", "threads", "dtype")},
        }
        write_text(Path(options.model) / SETTINGS_FILE, json.dumps(setting, indent=2, ensure_ascii=False) + "\n")
        kept = f"{best['policy']} is now the best known fixed setting of this checkpoint"
        typer.echo(f"{kept} ({SETTINGS_FILE} beside its weights)")
    if best["policy"].endswith(f"-{lengths[-1]}"):
        longer = f"--num-speculations up to {2 * lengths[-1]}"
        typer.echo(f"the best setting is at the edge of the grid: try {longer}", err=True)
    if best["speedup"] < 1:
        typer.echo("no setting was faster than plain decoding (num_speculations=0)", err=True)
    show(record.lines)


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
    """Write a line for each setting, its rounds (means over prompts) and predicted speed-up; return them, the best first."""
    cost = expected_cost(generator.model, generator.runner)
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
                etpl=mean(run.etpl for run in runs),
                predicted_speedup=plain / sum(run.cost(cost) for run in runs),
            )
        record.write("traced")
    cells = {line["policy"]: line for line in matching(record.lines, "cell")}
    return sorted(cells.values(), key=lambda cell: -cell["predicted_speedup"])
