"""A record as text: Markdown for README and docs, tables for the terminal. No number in a table is typed by hand.

`fill_markers` puts them into a document between `<!-- report:NAME -->` and `<!-- /report:NAME -->`, where NAME is the
record's file name without its ending; `report:NAME:PART` takes one part of it: headline, machine, or a table by its name
(speed, rounds, phases, speedups, tasks, etpl, figures; of a run's traces transfer, segments, oracle, positions,
conditional, which only come by name; of a sweep etpl, speedup or cells, agreement; of a roofline calls,
phases; of contexts contexts, memory; of a busy machine speed, cost). `report:headline` is short for
`report:peers:headline`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from bench.record import KEPT, Line
from bench.report.batch_tables import batch_headline, batch_tables
from bench.report.busy_tables import busy_headline, busy_tables
from bench.report.context_tables import context_headline, context_tables
from bench.report.reading_tables import reading_tables
from bench.report.roofline_tables import roofline_headline, roofline_tables
from bench.report.run_tables import decoding_text, run_tables
from bench.report.summary import Samples, Spread
from bench.report.sweep_tables import sweep_tables
from bench.report.table import Table, counted, times

_MARKER = re.compile(r"<!-- report:(?P<name>[^\s>]+) -->\n.*?<!-- /report:(?P=name) -->", re.DOTALL)


_TABLES: Mapping[str, Callable[[Sequence[Line]], list[Table]]] = {
    "sweep": sweep_tables,
    "roofline": roofline_tables,
    "context": context_tables,
    "busy": busy_tables,
    "batch": batch_tables,
}
_HEADLINES: Mapping[str, Callable[[Sequence[Line]], str]] = {
    "roofline": roofline_headline,
    "context": context_headline,
    "busy": busy_headline,
    "batch": batch_headline,
}
"""Of the commands whose records are not of engines over prompts."""


def tables(lines: Sequence[Line]) -> list[Table]:
    """All tables of a record but those of `readings`."""
    return _TABLES.get(lines[0]["command"], run_tables)(lines)


def readings(lines: Sequence[Line]) -> list[Table]:
    """What the traces in a record say (`bench.traces.readings`); none where it holds no traces."""
    return reading_tables(lines) if lines[0]["command"] == "run" else []


def markdown(lines: Sequence[Line]) -> str:
    """The whole record as Markdown, its readings left out: those are parts of their own."""
    left_out = {table.name for table in readings(lines)}
    return "\n\n".join(text for name, text in sections(lines).items() if name not in left_out) + "\n"


def sections(lines: Sequence[Line]) -> dict[str, str]:
    """The parts of a record by name."""
    made = {table.name: table.markdown() for table in [*tables(lines), *readings(lines)]}
    return {"headline": headline(lines), **made, "machine": machine_sentence(lines)}


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
    samples = Samples(lines)
    if lines[0]["command"] == "run":
        return _run_headline(lines, samples)
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    ours = f"selfspec:{configuration['policy']}"
    against = [
        f"{times(samples.speedup(ours, name))} {'its own autoregressive mode' if name == 'selfspec:ar' else label}"
        for name, label in samples.labels.items()
        if name in samples.engines and name != ours
    ]
    return (
        f"{model[0].upper()}{model[1:]} with `{configuration['policy']}` on {_device(lines)}, "
        f"{counted(where['threads'], 'thread')}, {where['dtype']}, greedy, "
        f"{counted(len(samples.prompts), 'prompt')} of about {_mean_prompt(samples)} tokens, "
        f"{configuration['max_new_tokens']} new tokens: {samples.speed(ours).value:.0f} tokens/s, prefill included; "
        f"{'; '.join(against)}."
    )


def machine_sentence(lines: Sequence[Line]) -> str:
    """Machine, versions and command."""
    where = lines[0]["provenance"]
    configuration = lines[0]["configuration"]
    device = "" if where["device"] == "cpu" else f"{where['device']}; "
    llama_cpp = f", llama-cpp-python {where['llama_cpp']}" if where.get("llama_cpp") else ""
    return (
        f"{device}{where['cpu']}, {counted(where['cores'], 'core')}, {counted(where['threads'], 'thread')}, "
        f"{where['ram_gib']} GiB; {where['dtype']}; Python {where['python']}, torch {where['torch']}, "
        f"transformers {where['transformers']}{llama_cpp}; {where['os']}; commit {where['commit']}; "
        f"weights {configuration['weights_digest']}, prompts {configuration['prompts_digest']}; "
        f"load average before the run {where['load_average']}; {where['time']}. "
        f"{_repeats(lines)}"
        f"`{where['command']}`"
    )


def _repeats(lines: Sequence[Line]) -> str:
    spread = "" if lines[0]["command"] in _HEADLINES else "; in brackets the lowest and highest repeat"
    what = "seed" if lines[0]["configuration"].get("do_sample") else "repeat"
    spread = spread.replace("repeat", what)
    return f"Medians of {counted(lines[0]['configuration']['repeats'], what)}, engines alternated{spread}. "


def fill_markers(document: str, records: Mapping[str, Sequence[Line]]) -> str:
    """The document with every marked place for which there is a record filled in; the others stay as they are.

    Raises ValueError if there is no such place.
    """
    filled = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal filled
        full_name = "peers:headline" if match["name"] == "headline" else match["name"]
        name, _, part = full_name.partition(":")
        if name not in records:
            return match[0]
        parts = sections(records[name])
        if part and part not in parts:
            raise ValueError(f'unknown marker "report:{full_name}": the parts of {name} are {", ".join(parts)}')
        filled += 1
        text = parts[part] if part else markdown(records[name]).rstrip("\n")
        return f"<!-- report:{match['name']} -->\n{text}\n<!-- /report:{match['name']} -->"

    result = _MARKER.sub(fill, document)
    if not filled:
        raise ValueError(f"no marker for any of {', '.join(f'report:{name}' for name in records)} in the document")
    return result


def _run_headline(lines: Sequence[Line], samples: Samples) -> str:
    configuration = lines[0]["configuration"]
    tasks = list(dict.fromkeys(samples.tasks.values()))
    model = configuration["model"]
    differing = sum(line["first_difference"] is not None for line in samples.outputs)
    near = sum(bool(line["near_tie"]) for line in samples.outputs)
    outputs = f"Outputs that differ from plain decoding's: {differing}, of which near-ties: {near}."
    if configuration.get("do_sample"):
        seeds = counted(configuration["repeats"], "seed")
        outputs = f"Every prompt was run with {seeds} by each engine; sampled outputs are not compared."
    has_kept = any(name.endswith(KEPT) for name in samples.engines)
    kept = "; rows marked kept keep what they learned between prompts" if has_kept else ""
    return (
        f"{model[0].upper()}{model[1:]} on {_device(lines)}, {lines[0]['provenance']['dtype']}, {decoding_text(lines)}: "
        f"{counted(len(samples.engines), 'engine')} on {counted(len(samples.prompts), 'prompt')} of "
        f"{counted(len(tasks), 'task')} ({', '.join(tasks)}), about {_mean_prompt(samples)} tokens each, "
        f"{configuration['max_new_tokens']} new tokens, EOS ignored. Policies are reset before every prompt{kept}. "
        f"{outputs}"
    )


def _device(lines: Sequence[Line]) -> str:
    where = lines[0]["provenance"]
    return where["cpu"] if where["device"] == "cpu" else where["device"]


def _mean_prompt(samples: Samples) -> int:
    lengths = {line["prompt"]: line["num_prompt_tokens"] for line in samples.samples}
    return round(sum(lengths.values()) / len(lengths))
