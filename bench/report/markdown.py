"""A record as text: Markdown for README and docs, tables for the terminal. No number in a table is typed by hand.

`fill_markers` puts them into a document between `<!-- report:NAME -->` and `<!-- /report:NAME -->`, where NAME is the
record's file name without its ending. `report:NAME` is the whole record under headings, each table with its plots;
`report:NAME:PART` is one part of it: headline, glance, machine, age, or a table by its name (`record_kinds` has them all).
`report:NAME+NAME+..:PART` is a table of several runs side by side (`decoding_tables`).
Numbers in sentences have markers of their own (`prose_figures`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from bench.record import KEPT, Line, is_quick
from bench.report.decoding_tables import decoding_tables
from bench.report.prose_figures import FIGURE, figure
from bench.report.record_kinds import HEADINGS, kind_of
from bench.report.run_tables import decoding_text
from bench.report.summary import Samples
from bench.report.table import Table, counted
from bench.sources import age

BESIDE = "+"
"""Between the names of records that one table shows."""
_MARKER = re.compile(r"<!-- report:(?P<name>[^\s>]+) -->\n.*?<!-- /report:(?P=name) -->", re.DOTALL)

_PEERS = {
    "llama_cpp": "llama-cpp-python",
    "ik_llama_cpp": "ik-llama-cpp-python",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime GenAI",
    "ctranslate2": "CTranslate2",
}
"""Versions of other engines in a record, by what they are of."""
Plots = Mapping[str, Mapping[str, str]]
"""A record's plots: name of a part -> title -> path of the picture, or the picture itself."""


def headings(lines: Sequence[Line]) -> dict[str, str]:
    """The heading of each possible part of this record, in the order of its page."""
    return {**HEADINGS, **kind_of(lines).headings, "machine": "Where the numbers come from"}


def page_tables(lines: Sequence[Line]) -> list[Table]:
    """All tables of a record in the order of its page: the glance first, the machine last."""
    kind = kind_of(lines)
    order = list(headings(lines))
    made = [*kind.glance(lines), *kind.tables(lines), *kind.page_tables(lines), machine_table(lines)]
    return sorted(made, key=lambda table: order.index(table.name))


def markdown(lines: Sequence[Line], plots: Plots | None = None) -> str:
    """The whole record as Markdown: each table after its heading and its plots."""
    parts, names = [headline(lines)], headings(lines)
    for table in page_tables(lines):
        parts.append(f"## {names[table.name]}")
        parts += [f"![{title}]({path})" for title, path in (plots or {}).get(table.name, {}).items()]
        parts.append(table.markdown())
    return "\n\n".join(parts) + "\n"


def sections(lines: Sequence[Line]) -> dict[str, str]:
    """The parts of a record by name."""
    return {**_own_sentences(lines), **{table.name: table.markdown() for table in page_tables(lines)}}


def _own_sentences(lines: Sequence[Line]) -> dict[str, str]:
    return {"headline": headline(lines), "age": age_sentence(lines)}


def headline(lines: Sequence[Line]) -> str:
    """What came out, in a sentence or two."""
    written = kind_of(lines).headline
    said = _run_headline(lines, Samples(lines)) if written is None else written(lines)
    return f"A quick run, whose numbers mean nothing. {said}" if is_quick(lines) else said


def age_sentence(lines: Sequence[Line]) -> str:
    """For a page with a table but not the machine's: when and where it was measured, and whether the code is the same."""
    where = lines[0]["provenance"]
    return (
        f"Measured on {where['time'][:10]} at commit {where['commit']}: {where['cpu']}, {_processor(where)}, kernels: "
        f"{_kernels(where)}. Code: {age(lines)}."
    )


def machine_table(lines: Sequence[Line]) -> Table:
    """Command, machine, versions."""
    where, configuration = lines[0]["provenance"], lines[0]["configuration"]
    device = "" if where["device"] == "cpu" else f"{where['device']}; "
    kind = kind_of(lines)
    what = "seed" if kind.trains or configuration.get("do_sample") else "repeat"
    repeats = counted(configuration["repeats"], what) + ("" if kind.trains else ", engines alternated")
    spread = f"; in brackets the lowest and highest {what}" if kind.spread else ""
    peers = "".join(f", {title} {where[name]}" for name, title in _PEERS.items() if where.get(name))
    rows = {
        "command": f"`{where['command']}`",
        "machine": f"{device}{where['cpu']}, {counted(where['cores'], 'core')}, "
        f"{counted(where['threads'], 'thread')}, {where['ram_gib']} GiB",
        "processor": _processor(where),
        "kernels": _kernels(where),
        **({"host": where["host"]} if where.get("host") else {}),
        "dtype": where["dtype"],
        "numbers": "one run each" if configuration["repeats"] == 1 else f"Medians of {repeats}{spread}",
        "date": where["time"],
        "commit": str(where["commit"]),
        "code": age(lines),
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
    """The processor's generation, which its name does not tell on a virtual machine."""
    if where.get("cpu_family") is None:
        return "generation not recorded"
    name, numbers = where["microarchitecture"], f"family {where['cpu_family']}, model {where['cpu_model']}"
    return f"{name} ({numbers})" if name else numbers


def _kernels(where: Mapping[str, Any]) -> str:
    """The variant of our kernels. A record of weights in 16 bits on a CPU may have none, although they ran."""
    known = "kernels" in where and (where["kernels"] or where["dtype"] not in ("bfloat16", "float16"))
    return str(where["kernels"] or "none, PyTorch's operators") if known else "variant not recorded"


def fill_markers(document: str, records: Mapping[str, Sequence[Line]], plots: Mapping[str, Plots] | None = None) -> str:
    """The document with every marked place for which there is a record filled in; the others stay as they are.

    plots: by record, for the places that show a whole one. Raises ValueError if there is no such place, and for the record
    of a quick run.
    """
    quick = [name for name, lines in records.items() if is_quick(lines)]
    if quick:
        raise ValueError(
            f"{', '.join(quick)}: records of a quick run show only that a command works, and documents show none of their "
            "numbers; make full ones with python -m bench.experiments records"
        )
    filled = 0

    @cache  # each record's tables are computed once, however many places show one
    def tables(name: str) -> list[Table]:
        several = [records[one] for one in name.split(BESIDE)]
        return page_tables(several[0]) if len(several) == 1 else decoding_tables(several)

    @cache
    def written(name: str) -> dict[str, str]:
        found = {table.name: table.markdown() for table in tables(name)}
        return found if BESIDE in name else {**_own_sentences(records[name]), **found}

    def fill_figure(match: re.Match[str]) -> str:
        nonlocal filled
        name, _, place = match["place"].partition(" > ")
        if not set(name.split(BESIDE)) <= records.keys():
            return match[0]
        filled += 1
        text = figure(place, {table.name: table for table in tables(name)})
        return f"<!-- figure: {match['place']} -->{text}<!-- /figure -->"

    def fill(match: re.Match[str]) -> str:
        nonlocal filled
        name, _, part = match["name"].partition(":")
        if not set(name.split(BESIDE)) <= records.keys():
            return match[0]
        if not part:
            text = markdown(records[name], (plots or {}).get(name)).rstrip("\n")
        else:
            parts = written(name)
            if part not in parts:
                raise ValueError(f'unknown marker "report:{name}:{part}": the parts of {name} are {", ".join(parts)}')
            text = parts[part]
        filled += 1
        return f"<!-- report:{match['name']} -->\n{text}\n<!-- /report:{match['name']} -->"

    result = FIGURE.sub(fill_figure, _MARKER.sub(fill, document))
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
