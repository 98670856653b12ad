"""A record as text: Markdown for README and docs, tables for the terminal. No number in a table is typed by hand.

`fill_markers` puts them into a document between `<!-- report:NAME -->` and `<!-- /report:NAME -->`, where NAME is the
record's file name without its ending. `report:NAME` is the whole record under headings, each table with its plots;
`report:NAME:PART` is one part of it: headline, glance, machine, or a table by its name (HEADINGS has them all).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.experiments.copying.copying_tables import copying_headline, copying_tables
from bench.experiments.exit_adapters.exit_tables import exit_tables, exits_headline
from bench.experiments.exit_losses.exit_loss_tables import exit_loss_headline, exit_loss_tables
from bench.experiments.readings.reading_tables import reading_tables
from bench.record import KEPT, Line
from bench.report.at_exit_layer import exit_layer_tables
from bench.report.attention_tables import attention_headline, attention_tables
from bench.report.batch_tables import batch_headline, batch_tables
from bench.report.busy_tables import busy_headline, busy_tables
from bench.report.context_tables import context_headline, context_tables
from bench.report.glance import by_precision, glance
from bench.report.roofline_tables import roofline_headline, roofline_tables
from bench.report.run_tables import decoding_text, run_tables
from bench.report.serving_tables import serving_headline, serving_tables
from bench.report.summary import Samples, Spread
from bench.report.sweep_tables import sweep_tables
from bench.report.table import Table, counted, times

_MARKER = re.compile(r"<!-- report:(?P<name>[^\s>]+) -->\n.*?<!-- /report:(?P=name) -->", re.DOTALL)

HEADINGS = {
    "glance": "At a glance",
    "precision": "By precision of the weights",
    "speed": "Speed",
    "speedups": "Speed-up by task",
    "tasks": "Speed by task",
    "sources": "Where each source of drafts pays",
    "rounds": "Rounds",
    "phases": "Where the time goes",
    "scores": "Scores",
    "etpl": "Tokens per loaded layer",
    "exit-layer": "At one exit layer",
    "speedup": "Speed-up of every setting",
    "cells": "Every setting",
    "agreement": "Agreement of early layers with the last",
    "calls": "Single calls",
    "contexts": "Speed over the length of the context",
    "turns": "The next turn of a conversation",
    "memory": "Memory",
    "attention": "Attention",
    "decoding": "Throughput while all texts decode",
    "batch": "Throughput with prompts",
    "joining": "A long prompt that joins",
    "serving": "Throughput of a server",
    "waiting": "Time to first token",
    "overhead": "What the server adds",
    "cost": "Processor time",
    "transfer": "Transfer of a setting between tasks",
    "segments": "Segments of a text",
    "oracle": "Oracle lengths",
    "positions": "Acceptance by position in the draft",
    "conditional": "Acceptance behind accepted tokens",
    "gain_estimated_seconds": "At a larger shape's costs",
    "gain_seconds": "Measured",
    "copy_sources": "Where tokens come from",
    "exits_gain": "Tokens per layer",
    "exits_agreement": "Agreement",
    "exits_speed": "Speed",
    "exit_losses": "Tokens per layer, losses, loops",
    "exit_losses_paired": "Against uniform weights",
    "exit_losses_oracle": "With oracle lengths",
    "exit_losses_free": "Without loops",
    "exit_losses_agreement": "Agreement of the exits",
    "exit_losses_loss": "Loss of the exits",
    "machine": "Where the numbers come from",
}
"""The parts of a record by name, with their headings, in the order of a page."""

Plots = Mapping[str, Mapping[str, str]]
"""Of one record: name of a part -> title of a plot -> what shows it (its path, or the picture itself)."""

_TABLES: Mapping[str, Callable[[Sequence[Line]], list[Table]]] = {
    "sweep": sweep_tables,
    "roofline": roofline_tables,
    "context": context_tables,
    "attention": attention_tables,
    "busy": busy_tables,
    "batch": batch_tables,
    "serving": serving_tables,
    "copying-gain": copying_tables,
    "exit-adapters": exit_tables,
    "exit-losses": exit_loss_tables,
}
_HEADLINES: Mapping[str, Callable[[Sequence[Line]], str]] = {
    "roofline": roofline_headline,
    "context": context_headline,
    "attention": attention_headline,
    "busy": busy_headline,
    "batch": batch_headline,
    "serving": serving_headline,
    "copying-gain": copying_headline,
    "exit-adapters": exits_headline,
    "exit-losses": exit_loss_headline,
}
"""Of the commands whose records are not of engines over prompts."""


def tables(lines: Sequence[Line]) -> list[Table]:
    """All tables of a record but those of its traces."""
    return _TABLES.get(lines[0]["command"], run_tables)(lines)


def page_tables(lines: Sequence[Line]) -> list[Table]:
    """All tables of a record in the order of its page: the glance first, the machine last."""
    made = [*glance(lines), *tables(lines), machine_table(lines)]
    if lines[0]["command"] == "peers":
        made += by_precision(lines)
    if lines[0]["command"] == "run":
        made += [*exit_layer_tables(lines), *reading_tables(lines)]
    order = list(HEADINGS)
    return sorted(made, key=lambda table: order.index(table.name))


def markdown(lines: Sequence[Line], plots: Plots | None = None) -> str:
    """The whole record as Markdown, each table behind its heading and its plots."""
    parts = [headline(lines)]
    for table in page_tables(lines):
        parts.append(f"## {HEADINGS[table.name]}")
        parts += [f"![{title}]({path})" for title, path in (plots or {}).get(table.name, {}).items()]
        parts.append(table.markdown())
    return "\n\n".join(parts) + "\n"


def sections(lines: Sequence[Line]) -> dict[str, str]:
    """The parts of a record by name."""
    return {"headline": headline(lines), **{table.name: table.markdown() for table in page_tables(lines)}}


def headline(lines: Sequence[Line]) -> str:
    """What came out, in a sentence or two."""
    if lines[0]["command"] in _HEADLINES:
        return _HEADLINES[lines[0]["command"]](lines)
    model = lines[0]["configuration"]["model"]
    if lines[0]["command"] == "sweep":
        best = next(line for line in lines if line["kind"] == "best")
        spread = times(Spread(value=best["speedup"], low=best["low"], high=best["high"]))
        replayed = next(line for line in lines if line["kind"] == "replay")
        source = "the replay" if replayed["replayed"] else "the first one"
        pairs = f"{replayed['compared'] - len(replayed['differing'])} of {replayed['compared']}"
        return (
            f"Best measured setting for {model}: `{best['policy']}`, {spread} its own autoregressive mode. "
            f"The timed runs had exactly the rounds of {source} for {pairs} pairs of setting and prompt."
        )
    return _run_headline(lines, Samples(lines))


def machine_table(lines: Sequence[Line]) -> Table:
    """Command, machine, versions."""
    where, configuration = lines[0]["provenance"], lines[0]["configuration"]
    device = "" if where["device"] == "cpu" else f"{where['device']}; "
    trains = lines[0]["command"] == "exit-losses"
    what = "seed" if trains or configuration.get("do_sample") else "repeat"
    repeats = counted(configuration["repeats"], what) + ("" if trains else ", engines alternated")
    spread = "" if lines[0]["command"] in _HEADLINES else f"; in brackets the lowest and highest {what}"
    llama_cpp = f", llama-cpp-python {where['llama_cpp']}" if where.get("llama_cpp") else ""
    rows = {
        "command": f"`{where['command']}`",
        "machine": f"{device}{where['cpu']}, {counted(where['cores'], 'core')}, "
        f"{counted(where['threads'], 'thread')}, {where['ram_gib']} GiB",
        **_processor(where),
        "dtype": where["dtype"],
        "numbers": "one run each" if configuration["repeats"] == 1 else f"Medians of {repeats}{spread}",
        "date": where["time"],
        "commit": str(where["commit"]),
        "versions": f"Python {where['python']}, torch {where['torch']}, transformers {where['transformers']}{llama_cpp}",
        "system": where["os"],
        "load average before": str(where["load_average"]),
        "weights, prompts": f"{configuration['weights_digest'] or 'made from a seed'}, {configuration['prompts_digest']}",
    }
    lost = [line for line in lines if line["kind"] == "lost"]
    if lost:
        rows["left out"] = "; ".join(f"{line['label']} ({line['reason']})" for line in lost)
    return Table(name="machine", title="", columns=("", ""), rows=tuple(rows.items()), prose=True)


def _processor(where: Mapping[str, Any]) -> dict[str, str]:
    """What newer records say of the processor's generation and of the kernels for it."""
    if where.get("cpu_family") is None:
        return {}
    name, kernels = where["microarchitecture"], where["kernels"] or "none"
    numbers = f"family {where['cpu_family']}, model {where['cpu_model']}"
    return {"processor": f"{f'{name} ({numbers})' if name else numbers}; kernels: {kernels}"}


def fill_markers(document: str, records: Mapping[str, Sequence[Line]], plots: Mapping[str, Plots] | None = None) -> str:
    """The document with every marked place for which there is a record filled in; the others stay as they are.

    plots: by record, for the places that show a whole one. Raises ValueError if there is no such place.
    """
    filled = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal filled
        name, _, part = match["name"].partition(":")
        if name not in records:
            return match[0]
        if not part:
            text = markdown(records[name], (plots or {}).get(name)).rstrip("\n")
        else:
            parts = sections(records[name])
            if part not in parts:
                raise ValueError(f'unknown marker "report:{name}:{part}": the parts of {name} are {", ".join(parts)}')
            text = parts[part]
        filled += 1
        return f"<!-- report:{match['name']} -->\n{text}\n<!-- /report:{match['name']} -->"

    result = _MARKER.sub(fill, document)
    if not filled:
        raise ValueError(f"no marker for any of {', '.join(f'report:{name}' for name in records)} in the document")
    return result


def _run_headline(lines: Sequence[Line], samples: Samples) -> str:
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    tasks = list(dict.fromkeys(samples.tasks.values()))
    model = configuration["model"]
    lengths = {line["prompt"]: line["num_prompt_tokens"] for line in samples.samples}
    differing = sum(line["first_difference"] is not None for line in samples.outputs)
    near = sum(bool(line["near_tie"]) for line in samples.outputs)
    outputs = f"Outputs that differ from the first engine's: {differing}, of which near-ties: {near}."
    if configuration.get("do_sample"):
        seeds = counted(configuration["repeats"], "seed")
        outputs = f"Every prompt was run with {seeds} by each engine; sampled outputs are not compared."
    has_kept = any(name.endswith(KEPT) for name in samples.engines)
    kept = "; rows marked kept keep what they learned between prompts" if has_kept else ""
    return (
        f"{model[0].upper()}{model[1:]} on {where['cpu'] if where['device'] == 'cpu' else where['device']}, "
        f"{counted(where['threads'], 'thread')}, {where['dtype']}, {decoding_text(lines)}: "
        f"{counted(len(samples.engines), 'engine')} on {counted(len(samples.prompts), 'prompt')} of "
        f"{counted(len(tasks), 'task')} ({', '.join(tasks)}), about {round(sum(lengths.values()) / len(lengths))} tokens "
        f"each, {configuration['max_new_tokens']} new tokens, EOS ignored. "
        f"Policies are reset before every prompt{kept}. {outputs}"
    )
