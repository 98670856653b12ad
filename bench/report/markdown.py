"""A record as text: a sentence or two and its tables, as Markdown and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.record import KEPT, Line
from bench.report.chat_tables import chat_tables
from bench.report.context_tables import context_tables
from bench.report.machine_tables import kernels_tables, load_tables, roofline_tables
from bench.report.run_tables import decoding_text, run_tables
from bench.report.summary import Samples
from bench.report.sweep_tables import sweep_headline, sweep_tables
from bench.report.table import Table, counted, subject
from bench.report.throughput_tables import batch_tables, serving_tables

_PEERS = {"llama_cpp": "llama-cpp-python", "ik_llama_cpp": "ik-llama-cpp-python", "openvino": "OpenVINO"}
"""Versions of other engines in a record, by what they are of."""
_WITH_SPREAD = ("run", "peers", "sweep")
"""Commands whose tables show the lowest and highest repeat."""


def tables(lines: Sequence[Line]) -> list[Table]:
    """Make the tables of what the record measured. Raises ValueError for a command that has no tables."""
    return _shown(lines)[1](lines)


def headline(lines: Sequence[Line]) -> str:
    """Say what came out, in a sentence or two."""
    return _shown(lines)[0](lines)


def markdown(lines: Sequence[Line]) -> str:
    """Write the whole record: tables, and where the numbers come from."""
    made = [*tables(lines), machine_table(lines)]
    return "\n\n".join([headline(lines), *(table.markdown() for table in made)]) + "\n"


def machine_table(lines: Sequence[Line]) -> Table:
    """Command, machine, versions."""
    where, configuration = lines[0]["provenance"], lines[0]["configuration"]
    device = "" if where["device"] == "cpu" else f"{where['device']}; "
    what = "seed" if configuration.get("do_sample") else "repeat"
    spread = f"; in brackets the lowest and highest {what}" if lines[0]["command"] in _WITH_SPREAD else ""
    repeats = f"Medians of {counted(configuration['repeats'], what)}, engines alternated{spread}"
    peers = "".join(f", {title} {where[name]}" for name, title in _PEERS.items() if where.get(name))
    rows = {
        "command": f"`{where['command']}`",
        "machine": f"{device}{where['cpu']}, {counted(where['cores'], 'core')}, "
        f"{counted(where['threads'], 'thread')}, {where['ram_gib']} GiB",
        "processor": _processor(where),
        "kernels": str(where["kernels"] or "none, PyTorch's operators"),
        **({"host": where["host"]} if where["host"] else {}),
        "dtype": where["dtype"],
        "numbers": "one run each" if configuration["repeats"] == 1 else repeats,
        "date": where["time"],
        "commit": str(where["commit"]),
        "versions": f"Python {where['python']}, torch {where['torch']}, transformers {where['transformers']}{peers}",
        "system": where["os"],
        "load average before": str(where["load_average"]),
        "weights, prompts": f"{_weights(configuration)}, {configuration['prompts_digest']}",
    }
    lost = [line for line in lines if line["kind"] == "lost"]
    if lost:
        rows["left out"] = "; ".join(f"{line['label']} ({line['reason']})" for line in lost)
    return Table(name="machine", title="", columns=("", ""), rows=tuple(rows.items()), prose=True)


def _weights(configuration: Mapping[str, Any]) -> str:
    model = str(configuration["model"])
    return str(configuration["weights_digest"] or ("made from a seed" if model.startswith("synthetic") else model))


def _processor(where: Mapping[str, Any]) -> str:
    """Name the processor's generation, which its name does not tell on a virtual machine."""
    if where.get("cpu_family") is None:
        return "generation not recorded"
    name, numbers = where["microarchitecture"], f"family {where['cpu_family']}, model {where['cpu_model']}"
    return f"{name} ({numbers})" if name else numbers


def run_headline(lines: Sequence[Line]) -> str:
    """How many engines on what, and whether their outputs are the same."""
    samples = Samples(lines)
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


_SHOWN: dict[str, tuple[Callable[[Sequence[Line]], str], Callable[[Sequence[Line]], list[Table]]]] = {
    "run": (run_headline, run_tables),
    "peers": (run_headline, run_tables),
    "chat": (subject, chat_tables),
    "sweep": (sweep_headline, sweep_tables),
    "roofline": (subject, roofline_tables),
    "context": (subject, context_tables),
    "batch": (subject, batch_tables),
    "serving": (subject, serving_tables),
    "load": (subject, load_tables),
    "kernels": (subject, kernels_tables),
}
"""What makes the headline and the tables of a record, by the command that wrote it."""


def _shown(lines: Sequence[Line]) -> tuple[Callable[[Sequence[Line]], str], Callable[[Sequence[Line]], list[Table]]]:
    command = lines[0]["command"]
    if command not in _SHOWN:
        raise ValueError(f"this version makes no tables of records of {command!r}: measure again")
    return _SHOWN[command]
