"""A record as text: a sentence or two and its tables, as Markdown, as HTML with plots, for the terminal, and in documents."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import KEPT, Line, matching, read_record, showing
from bench.report.machine_tables import context_tables, kernels_tables, roofline_tables
from bench.report.peer_tables import peer_tables
from bench.report.plots import plot
from bench.report.run_tables import decoding_text, run_tables
from bench.report.summary import Samples
from bench.report.sweep_tables import sweep_headline, sweep_tables
from bench.report.table import Table, counted
from bench.report.throughput_tables import batch_tables, load_tables

_WITH_SPREAD = ("run", "peers", "sweep")
"""Commands whose tables show the lowest and highest repeat."""
_MARKED = re.compile(r"<!-- table: (\S+) (.+?) -->\n.*?<!-- /table -->", re.S)
_STYLE = (
    "body{font:16px/1.5 system-ui;margin:2rem auto;max-width:75rem;padding:0 1rem}table{border-collapse:collapse}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
)


def markdown(lines: Sequence[Line]) -> str:
    """Write the whole record: tables, and where the numbers come from."""
    made = [*tables(lines), machine_table(lines)]
    return "\n\n".join([headline(lines), *(table.markdown() for table in made)]) + "\n"


def terminal_text(lines: Sequence[Line]) -> str:
    """Write tables whose columns look aligned in a terminal, and what came out."""
    return "\n\n".join([*(table.markdown(aligned=True) for table in tables(lines)), headline(lines)])


def html_page(records: Mapping[str, Sequence[Line]]) -> str:
    """Write records, by their names, as one page that needs no other file, with a plot beside tables that have one."""
    parts = [f"<!doctype html><meta charset=utf-8><title>selfspec-bench</title><style>{_STYLE}</style>"]
    for name, lines in records.items():
        parts += [f"<h2>{html.escape(name)}</h2>", f"<p>{_inline(headline(lines))}</p>"]
        for table in [*tables(lines), machine_table(lines)]:
            parts += [f"<h3>{_inline(table.title)}</h3>", plot(table) or "", _html_table(table)]
    return "\n".join(parts) + "\n"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.columns)
    rows = ("".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in table.rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _inline(text: str) -> str:
    """Turn the Markdown of a cell or sentence into HTML."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\*([^*]+)\*", r"<i>\1</i>", text)


def update(text: str, folder: Path) -> str:
    """Fill a document's tables between "<!-- table: RECORD NAME -->" and "<!-- /table -->". folder: of the records' paths.

    Raises ValueError for a record that is missing or broken, and for one without such a table.
    """

    def filled(match: re.Match[str]) -> str:
        path, name = folder / match[1], match[2]
        lines = read_record(path)
        with showing(path):
            found = {table.name: table for table in tables(lines)}
        if name not in found:
            raise ValueError(f"{match[1]} has no table {name!r}, but {', '.join(found)}")
        source = source_line(lines[0]["provenance"])
        return f"<!-- table: {match[1]} {name} -->\n{found[name].markdown()}\n\n{source}\n<!-- /table -->"

    return _MARKED.sub(filled, text)


def source_line(where: Mapping[str, Any]) -> str:
    """Say in one line where and when a record was made."""
    device = (
        where["device"]
        if where["device"] != "cpu"
        else " ".join(filter(None, (where["cpu"], where["microarchitecture"])))
    )
    kernels = f", {where['kernels'].upper()} kernels" if where["kernels"] else ""
    return f"Commit {str(where['commit'])[:7]}, {where['time'][:10]}, {device}{kernels}."


def tables(lines: Sequence[Line]) -> list[Table]:
    """Make the tables of what the record measured. Raises ValueError for a command that has no tables."""
    return _shown(lines)[1](lines)


def headline(lines: Sequence[Line]) -> str:
    """Say what came out, in a sentence or two."""
    return _shown(lines)[0](lines)


def subject(lines: Sequence[Line]) -> str:
    """Say what a record measured, and where."""
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    model = configuration["model"]
    device = where["cpu"] if where["device"] == "cpu" else where["device"]
    return f"{model[0].upper()}{model[1:]} in {where['dtype']} on {device}, {counted(where['threads'], 'thread')}."


def run_headline(lines: Sequence[Line]) -> str:
    """Say how many engines were measured on what, and whether their outputs are the same."""
    samples, configuration = Samples(lines), lines[0]["configuration"]
    tasks = list(dict.fromkeys(samples.tasks.values()))
    differing = [line for line in samples.outputs if line["first_difference"] is not None]
    near = sum(bool(line["near_tie"]) for line in differing)
    outputs = f"Outputs that differ from the first engine's: {len(differing)}, of which near-ties: {near}."
    if configuration.get("do_sample"):
        seeds = counted(configuration["repeats"], "seed")
        outputs = f"Every prompt was run with {seeds} by each engine; sampled outputs are not compared."
    has_kept = any(name.endswith(KEPT) for name in samples.engines)
    kept = "; rows marked kept keep what they learned between prompts" if has_kept else ""
    ends = "answers end where the model ends them" if configuration.get("chat") else "EOS ignored"
    return (
        f"{subject(lines)} {counted(len(samples.engines), 'engine')}, {decoding_text(lines)}, on "
        f"{counted(len(samples.prompts), 'prompt')} of {counted(len(tasks), 'task')} ({', '.join(tasks)}), "
        f"{configuration['max_new_tokens']} new tokens, {ends}. Policies are reset before every prompt{kept}. {outputs}"
    )


def machine_table(lines: Sequence[Line]) -> Table:
    """List command, machine, versions."""
    where, configuration = lines[0]["provenance"], lines[0]["configuration"]
    what = "seed" if configuration.get("do_sample") else "repeat"
    spread = f"; in brackets the lowest and highest {what}" if lines[0]["command"] in _WITH_SPREAD else ""
    versions = {"Python": where["python"], "torch": where["torch"], "transformers": where["transformers"]}
    rows = {
        "command": f"`{where['command']}`",
        "machine": f"{where['device']}; {where['cpu']} ({where['microarchitecture'] or 'generation unknown'}), "
        f"{counted(where['cores'], 'core')}, {counted(where['threads'], 'thread')}, {where['ram_gib']} GiB",
        "kernels": str(where["kernels"] or "none, PyTorch's operators"),
        "dtype": where["dtype"],
        "numbers": f"Medians of {counted(configuration['repeats'], what)}, engines alternated{spread}",
        "date, commit": f"{where['time']}, {where['commit']}",
        "versions": ", ".join(
            f"{name} {version}" for name, version in {**versions, **where.get("versions", {})}.items()
        ),
        "system": f"{where['os']}, load average before {where['load_average']}",
        "weights, prompts": f"{configuration.get('weights_digest')}, {configuration.get('prompts_digest')}",
    }
    lost = matching(lines, "lost")
    if lost:
        rows["left out"] = "; ".join(f"{line['label']} ({line['reason']})" for line in lost)
    return Table(name="machine", title="", columns=("", ""), rows=tuple(rows.items()), prose=True)


_SHOWN: dict[str, tuple[Callable[[Sequence[Line]], str], Callable[[Sequence[Line]], list[Table]]]] = {
    "run": (run_headline, run_tables),
    "peers": (run_headline, peer_tables),
    "sweep": (sweep_headline, sweep_tables),
    "roofline": (subject, roofline_tables),
    "context": (subject, context_tables),
    "batch": (subject, batch_tables),
    "load": (subject, load_tables),
    "kernels": (subject, kernels_tables),
}
"""What makes the headline and the tables of a record, by the command that wrote it."""


def _shown(lines: Sequence[Line]) -> tuple[Callable[[Sequence[Line]], str], Callable[[Sequence[Line]], list[Table]]]:
    command = lines[0]["command"]
    if command not in _SHOWN:
        raise ValueError(f"this version makes no tables of records of {command!r}: measure again")
    return _SHOWN[command]
