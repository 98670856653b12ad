"""A record as text: a sentence or two and its tables, as Markdown, for the terminal, and in documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.record import WARMED_UP, Line, matching, read_record, showing
from bench.report.cold_table import cold_tables
from bench.report.machine_tables import context_tables, kernels_tables, roofline_tables
from bench.report.paper_tables import paper_tables
from bench.report.peer_tables import peer_tables
from bench.report.run_tables import decoding_text, run_tables, sweep_headline, sweep_tables
from bench.report.summary import Samples
from bench.report.table import Table, counted
from bench.report.throughput_tables import batch_tables, load_tables
from selfspec.analysis.comparison import load_warning

_TABLES: dict[str, Callable[[Sequence[Line]], list[Table]]] = {
    "run": run_tables,
    "cold": cold_tables,
    "peers": peer_tables,
    "sweep": sweep_tables,
    "roofline": roofline_tables,
    "context": context_tables,
    "batch": batch_tables,
    "load": load_tables,
    "kernels": kernels_tables,
    "paper": paper_tables,
}
"""What makes the tables of a record, by the command that wrote it."""
_WITH_SPREAD = ("run", "peers", "sweep")
"""Commands whose tables show the lowest and highest repeat."""
_MARKED = re.compile(r"<!-- table: (\S+) (.+?) -->\n.*?<!-- /table -->", re.S)


def markdown(lines: Sequence[Line]) -> str:
    """Write the whole record: tables, and where the numbers come from."""
    made = [*tables(lines), machine_table(lines)]
    return "\n\n".join([headline(lines), *(table.markdown() for table in made)]) + "\n"


def terminal_text(lines: Sequence[Line]) -> str:
    """Write tables whose columns look aligned in a terminal, and what came out."""
    return "\n\n".join([*(table.markdown(aligned=True) for table in tables(lines)), headline(lines)])


def update(text: str, folder: Path) -> str:
    """Fill a document's tables between their marks. folder: of the records' paths. Raises ValueError for one without it."""

    def filled(match: re.Match[str]) -> str:
        path, name = folder / match[1], match[2]
        lines = [line for one in match[1].split(",") for line in read_record(folder / one)]  # several of a paper
        with showing(path):
            found = {table.name: table for table in tables(lines)}
        if name not in found:
            raise ValueError(f"{match[1]} has no table {name!r}, but {', '.join(found)}")
        where = lines[0]["provenance"]
        device = where["device"]
        if device == "cpu":
            device = " ".join(filter(None, (where["cpu"], where["microarchitecture"])))
        kernels = f", {where['kernels'].upper()} kernels" if where["kernels"] else ""
        source = f"Commit {str(where['commit'])[:7]}, {where['time'][:10]}, {device}{kernels}.{busy_note(lines)}"
        return f"<!-- table: {match[1]} {name} -->\n{found[name].markdown()}\n\n{source}\n<!-- /table -->"

    return _MARKED.sub(filled, text)


def tables(lines: Sequence[Line]) -> list[Table]:
    """Make the tables of what the record measured. Raises ValueError for a command that has no tables."""
    command = lines[0]["command"]
    if command not in _TABLES:
        raise ValueError(f"this version makes no tables of records of {command!r}: measure again")
    return _TABLES[command](lines)


def headline(lines: Sequence[Line]) -> str:
    """Say what came out, in a sentence or two."""
    known = {"run": run_headline, "peers": run_headline, "sweep": sweep_headline}
    return known.get(lines[0]["command"], subject)(lines) + busy_note(lines)


def busy_note(lines: Sequence[Line]) -> str:
    """Return a sentence after a blank if the machine was busy with other things, before the run or at its end; else ""."""
    warning = load_warning(*loads(lines), cores=lines[0]["provenance"]["cores"])
    return "" if warning is None else f" {warning}"


def loads(lines: Sequence[Line]) -> list[float]:
    """Return the load averages before the run and at its end, which records of earlier versions lack."""
    return [line["load_average"] for line in (lines[0]["provenance"], *matching(lines, "load_average"))]


def subject(lines: Sequence[Line]) -> str:
    """Say what a record measured, and where."""
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    model = configuration["model"]
    device = where["cpu"] if where["device"] == "cpu" else where["device"]
    return f"{model[0].upper()}{model[1:]} in {where['dtype']} on {device}, {counted(where['threads'], 'thread')}."


def run_headline(lines: Sequence[Line]) -> str:
    """Say how many engines were measured on what, and whether their outputs are the same."""
    samples, configuration = Samples(lines), lines[0]["configuration"]
    differing = [line for line in samples.outputs if line["first_difference"] is not None]
    near = sum(bool(line["near_tie"]) for line in differing)
    outputs = f"Outputs that differ from the first engine's: {len(differing)}, of which near-ties: {near}."
    if configuration.get("do_sample"):
        seeds = counted(configuration["repeats"], "seed")
        outputs = f"Every prompt was run with {seeds} by each engine; sampled outputs are not compared."
    has_warmed_up = any(name.endswith(WARMED_UP) for name in samples.engines)
    warmed_up = "; rows marked warmed up keep what they learned between prompts" if has_warmed_up else ""
    ends = "answers end where the model ends them" if configuration.get("chat") else "EOS ignored"
    return (
        f"{subject(lines)} {counted(len(samples.engines), 'engine')}, {decoding_text(lines)}, on "
        f"{counted(len(samples.prompts), 'prompt')} of {counted(len(samples.tasks), 'task')} ({', '.join(samples.tasks)}), "
        f"{configuration['max_new_tokens']} new tokens, {ends}. Policies are reset before every prompt{warmed_up}. {outputs}"
    )


def machine_table(lines: Sequence[Line]) -> Table:
    """List command, machine, versions."""
    where, configuration = lines[0]["provenance"], lines[0]["configuration"]
    what = "seed" if configuration.get("do_sample") else "repeat"
    spread = f"; in brackets the lowest and highest {what}" if lines[0]["command"] in _WITH_SPREAD else ""
    versions = {"Python": where["python"], "torch": where["torch"], "transformers": where["transformers"]}
    versions |= where.get("versions", {})
    rows = {
        "command": f"`{where['command']}`",
        "machine": f"{where['device']}; {where['cpu']} ({where['microarchitecture'] or 'generation unknown'}), "
        f"{counted(where['cores'], 'core')}, {counted(where['threads'], 'thread')}, {where['ram_gib']} GiB",
        "kernels": str(where["kernels"] or "none, PyTorch's operators"),
        "dtype": where["dtype"],
        "numbers": f"Medians of {counted(configuration['repeats'], what)}, engines alternated{spread}",
        "date, commit": f"{where['time']}, {where['commit']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "system": f"{where['os']}, load average before {', after '.join(map(str, loads(lines)))}",
        "weights, prompts": f"{configuration.get('weights_digest')}, {configuration.get('prompts_digest')}",
    }
    lost = matching(lines, "lost")
    if lost:
        rows["left out"] = "; ".join(f"{line['label']} ({line['reason']})" for line in lost)
    return Table(name="machine", title="", columns=("", ""), rows=tuple(rows.items()), prose=True)
