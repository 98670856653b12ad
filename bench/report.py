"""A record as tables: Markdown for README and docs, rich for the terminal. No number in a table is typed by hand.

`fill_markers` puts them into a document between `<!-- report:NAME -->` and `<!-- /report:NAME -->`, where NAME is the
record's file name without its ending; `report:NAME:PART` takes one part of it: headline, machine, or a table by its name
(speed, rounds, phases, tasks, bars; of a sweep etpl, speedup, agreement; of policies etpl, speed). `report:headline` is
short for `report:peers:headline`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable

from bench.policy_table import (
    etpl_by_task,
    fixed_from_other_half,
    fixed_in_hindsight,
    learn_share,
    policy_names,
    speed_by_task,
)
from bench.record import Line
from bench.summary import PHASES, Samples, Spread

_MARKER = re.compile(r"<!-- report:(?P<name>[^\s>]+) -->\n.*?<!-- /report:(?P=name) -->", re.DOTALL)
_UNKNOWN = "–"
_BASELINES = ("transformers:generate", "selfspec:ar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text cells. heat: per row and column a number in [0, 1] that colours the cell in a terminal, or None."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heat: tuple[tuple[float | None, ...], ...] | None = None

    def markdown(self) -> str:
        """The table in Markdown, the first column left, the others right."""
        rule = " | ".join([":--", *["--:"] * (len(self.columns) - 1)])
        lines = [" | ".join(self.columns), rule, *(" | ".join(row) for row in self.rows)]
        return "\n".join([f"**{self.title}**", "", *(f"| {line} |" for line in lines)])

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            heat = self.heat[number] if self.heat is not None else (None,) * len(row)
            table.add_row(*(_coloured(text, value) for text, value in zip(row, heat)))
        return table


def _coloured(text: str, heat: float | None) -> str:
    """Text on a background from dark blue (0) over green to yellow (1)."""
    if heat is None:
        return text.replace("**", "")
    red, green, blue = int(40 + 200 * heat**2), int(60 + 150 * heat), int(120 * (1 - heat) + 20)
    ink = "black" if heat > 0.55 else "white"
    bold = "bold " if text.startswith("**") else ""
    return f"[{bold}{ink} on rgb({red},{green},{blue})]{text.strip('*')}[/]"


def tables(lines: Sequence[Line]) -> list[Table]:
    """All tables of a record."""
    if lines[0]["command"] == "sweep":
        return [_etpl_table(lines), _speedup_table(lines), _agreement_table(lines)]
    if lines[0]["command"] == "policies":
        return [_policy_etpl_table(lines), _policy_speed_table(lines)]
    return [_speed_table(lines), _round_table(lines), _phase_table(lines), _task_table(lines), *_bar_table(lines)]


def markdown(lines: Sequence[Line]) -> str:
    """The whole record as Markdown."""
    return "\n\n".join(sections(lines).values()) + "\n"


def sections(lines: Sequence[Line]) -> dict[str, str]:
    """The parts of `markdown` by name."""
    made = {table.name: table.markdown() for table in tables(lines)}
    return {"headline": headline(lines), **made, "machine": machine_sentence(lines)}


def headline(lines: Sequence[Line]) -> str:
    """What came out, in a sentence or two."""
    model = lines[0]["configuration"]["model"]
    if lines[0]["command"] == "sweep":
        best = next(line for line in lines if line["kind"] == "best")
        spread = _times(Spread(value=best["speedup"], low=best["low"], high=best["high"]))
        replayed = next(line for line in lines if line["kind"] == "replay")
        pairs = f"{replayed['compared'] - len(replayed['differing'])} of {replayed['compared']}"
        return (
            f"Best measured setting for {model}: `{best['policy']}`, {spread} its own autoregressive mode. "
            f"The real runs had exactly the replayed rounds for {pairs} pairs of setting and prompt."
        )
    if lines[0]["command"] == "policies":
        return _policy_headline(lines)
    samples = Samples(lines)
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    ours = f"selfspec:{configuration['policy']}"
    against = [
        f"{_times(samples.speedup(ours, name))} {'its own autoregressive mode' if name == 'selfspec:ar' else label}"
        for name, label in samples.labels.items()
        if name in samples.engines and name != ours
    ]
    return (
        f"{model[0].upper()}{model[1:]} with `{configuration['policy']}` on {_device(lines)}, {where['threads']} threads, "
        f"{where['dtype']}, greedy, {len(samples.prompts)} prompts of about {_mean_prompt(samples)} tokens, "
        f"{configuration['max_new_tokens']} new ones: {samples.speed(ours).value:.0f} tokens/s, prefill included; "
        f"{'; '.join(against)}."
    )


def machine_sentence(lines: Sequence[Line]) -> str:
    """Machine, versions and command."""
    where = lines[0]["provenance"]
    configuration = lines[0]["configuration"]
    device = "" if where["device"] == "cpu" else f"{where['device']}; "
    return (
        f"{device}{where['cpu']}, {where['cores']} cores, {where['threads']} threads, {where['ram_gib']} GiB; "
        f"{where['dtype']}; Python {where['python']}, torch {where['torch']}, transformers {where['transformers']}; "
        f"{where['os']}; commit {where['commit']}; weights {configuration['weights_digest']}, "
        f"prompts {configuration['prompts_digest']}; load average before the run {where['load_average']}; {where['time']}. "
        f"Medians of {configuration['repeats']} repeats, engines alternated; in brackets the lowest and highest repeat. "
        f"`{where['command']}`"
    )


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


def _speed_table(lines: Sequence[Line]) -> Table:
    samples = Samples(lines)
    baseline = _baseline(samples)
    rows = []
    for name in samples.engines:
        row = samples.summary(name)
        rows.append(
            (
                row.label,
                _range(row.tokens_per_second),
                _times(samples.speedup(name, baseline)),
                _number(row.total_tokens_per_second, "{:.1f}"),
                _number(row.decode_tokens_per_second, "{:.1f}"),
                _number(row.time_to_first_token, "{:.0f}", 1000),
            )
        )
    return Table(
        name="speed",
        title=f"Speed on {lines[0]['configuration']['model']}, greedy; × is over {samples.labels[baseline]}",
        columns=("engine", "tokens/s", "×", "pooled tokens/s", "decode tokens/s", "TTFT, ms"),
        rows=tuple(rows),
    )


def _round_table(lines: Sequence[Line]) -> Table:
    samples = Samples(lines)
    rows = []
    for name in samples.engines:
        row = samples.summary(name)
        rows.append(
            (
                row.label,
                _number(row.acceptance_rate, "{:.3f}"),
                _number(row.accepted_per_round, "{:.2f}"),
                _number(row.tokens_per_round, "{:.2f}"),
                _number(row.etpl, "{:.4f}"),
                _equal(row.num_mismatches, row.num_near_ties),
            )
        )
    first = samples.outputs[0]["reference"]
    return Table(
        name="rounds",
        title=f"Rounds, and outputs against {samples.labels[first]}'s",
        columns=("engine", "acceptance rate", "accepted/round", "tokens/round", "eTPL", "outputs"),
        rows=tuple(rows),
    )


def _phase_table(lines: Sequence[Line]) -> Table:
    samples = Samples(lines)
    shares = {name: samples.phase_shares(name) for name in samples.engines}
    rows = tuple(
        (samples.labels[name], *(f"{100 * share:.0f} %" for share in by_phase.values()))
        for name, by_phase in shares.items()
        if by_phase is not None
    )
    return Table(name="phases", title="Share of time per phase, all runs", columns=("engine", *PHASES), rows=rows)


def _baseline(samples: Samples) -> str:
    """The engine that the speed-up column is over."""
    return next(name for name in (*_BASELINES, *samples.engines) if name in samples.engines)


def _task_table(lines: Sequence[Line]) -> Table:
    samples = Samples(lines)
    tasks = list(dict.fromkeys(samples.tasks.values()))
    rows = tuple(
        (samples.labels[name], *(f"{samples.speed(name, [task]).value:.1f}" for task in tasks))
        for name in samples.engines
    )
    return Table(name="tasks", title="tokens/s by task", columns=("engine", *tasks), rows=rows)


def _bar_table(lines: Sequence[Line]) -> list[Table]:
    labels = lines[0]["engines"]
    rows = tuple(
        (
            f"{labels[line['engine']]} over {labels[line['baseline']]}",
            _times(Spread(value=line["speedup"], low=line["low"], high=line["high"])),
            f"{line['at_least']:.1f}×",
            "met" if line["met"] else "not met",
        )
        for line in lines
        if line["kind"] == "bar"
    )
    return [Table(name="bars", title="Bars", columns=("ratio", "measured", "at least", ""), rows=rows)] if rows else []


def _grid(lines: Sequence[Line]) -> tuple[list[int], list[int], dict[tuple[int, int], Line]]:
    cells = {(line["exit_layer"], line["num_speculations"]): line for line in lines if line["kind"] == "cell"}
    return sorted({key[0] for key in cells}), sorted({key[1] for key in cells}), cells


def _etpl_table(lines: Sequence[Line]) -> Table:
    layers, lengths, cells = _grid(lines)
    num_layers = lines[0]["configuration"]["num_layers"]
    values = {key: line["etpl"] for key, line in cells.items()}
    return _heat_table(
        "etpl",
        f"eTPL by replay (autoregressive: {1 / num_layers:.4f}); rows: exit layer, columns: drafts a round",
        layers,
        lengths,
        {key: f"{value:.3f}" for key, value in values.items()},
        values,
    )


def _speedup_table(lines: Sequence[Line]) -> Table:
    layers, lengths, cells = _grid(lines)
    samples = Samples(lines)
    texts, values = {}, {}
    for key, line in cells.items():
        engine = f"selfspec:{line['policy']}"
        if engine in samples.engines:
            values[key] = samples.speedup(engine, "selfspec:ar").value
            texts[key] = f"**{values[key]:.2f}**"
        else:
            values[key] = line["predicted_speedup"]
            texts[key] = f"{values[key]:.2f}"
    return _heat_table(
        "speedup",
        "Speed-up over autoregressive; rows: exit layer, columns: drafts a round; bold is measured (prefill included), the "
        "rest predicted (decoding only) from replayed rounds and timed layers",
        layers,
        lengths,
        texts,
        values,
    )


def _heat_table(
    name: str,
    title: str,
    layers: Sequence[int],
    lengths: Sequence[int],
    texts: Mapping[tuple[int, int], str],
    values: Mapping[tuple[int, int], float],
) -> Table:
    low, high = min(values.values()), max(values.values())
    span = (high - low) or 1.0
    return Table(
        name=name,
        title=title,
        columns=("E", *map(str, lengths)),
        rows=tuple((str(layer), *(texts[layer, length] for length in lengths)) for layer in layers),
        heat=tuple((None, *((values[layer, length] - low) / span for length in lengths)) for layer in layers),
    )


def _agreement_table(lines: Sequence[Line]) -> Table:
    by_layer = next(line["by_layer"] for line in lines if line["kind"] == "agreement")
    return Table(
        name="agreement",
        title="Agreement of each exit layer with the last, along the model's own greedy text",
        columns=("after", *(str(layer) for layer in range(1, len(by_layer) + 1))),
        rows=(("agrees", *(_number(value, "{:.2f}").removeprefix("0") for value in by_layer)),),
    )


def _tasks(lines: Sequence[Line]) -> list[str]:
    return [*dict.fromkeys(line["task"] for line in lines if line["kind"] == "policy"), "all"]


def _policy_headline(lines: Sequence[Line]) -> str:
    prompts = len({line["prompt"] for line in lines if line["kind"] == "policy"})
    changed = [line for line in lines if line["kind"] == "policy" and line["first_difference"] is not None]
    configuration = lines[0]["configuration"]
    return (
        f"{len(policy_names(lines))} policies on {configuration['model']}, {prompts} prompts, greedy, "
        f"{configuration['max_new_tokens']} new tokens, EOS off, every policy reset before every prompt; "
        f"outputs that differ from plain decoding's: {len(changed)}."
    )


def _policy_etpl_table(lines: Sequence[Line]) -> Table:
    tasks = _tasks(lines)
    hindsight, careful = fixed_in_hindsight(lines), fixed_from_other_half(lines)
    one = hindsight["all"][0]
    grid = [line for line in lines if line["kind"] == "grid"]
    single = {
        task: sum(line["cells"][one][0] for line in grid if task in ("all", line["task"]))
        / sum(line["cells"][one][1] for line in grid if task in ("all", line["task"]))
        for task in tasks
    }
    per_kind = {task: value for task, (_, value) in hindsight.items()}
    per_kind["all"] = _pooled(grid, {task: hindsight[task][0] for task in tasks if task != "all"})
    found = {f"`{name}`": etpl_by_task(lines, name) for name in policy_names(lines)}
    rows = {
        "*best fixed per kind, in hindsight*": per_kind,
        "best fixed per kind, chosen on the other half": careful,
        f"*best one fixed in hindsight, `{one}`*": single,
        **dict(sorted(found.items(), key=lambda item: -item[1]["all"])),
    }
    return Table(
        name="etpl",
        title="eTPL over eTPL of plain decoding (1/L), per kind of prompt; in italics what needs hindsight",
        columns=("policy", *tasks),
        rows=tuple(
            (name, *(f"{values[task] * lines[0]['configuration']['num_layers']:.3f}" for task in tasks))
            for name, values in rows.items()
        ),
    )


def _pooled(grid: Sequence[Line], settings: Mapping[str, str]) -> float:
    """eTPL of all prompts, each kind with its own setting."""
    tokens = sum(line["cells"][settings[line["task"]]][0] for line in grid)
    return float(tokens / sum(line["cells"][settings[line["task"]]][1] for line in grid))


def _policy_speed_table(lines: Sequence[Line]) -> Table:
    tasks = _tasks(lines)
    found = {name: speed_by_task(lines, name) for name in policy_names(lines)}
    rows = sorted(found.items(), key=lambda item: -item[1]["all"])
    return Table(
        name="speed",
        title="Decoding speed over plain decoding, median over prompts, one run each in turn; learning's share of the time",
        columns=("policy", *tasks, "learning"),
        rows=tuple(
            (f"`{name}`", *(f"{values[task]:.2f}" for task in tasks), f"{learn_share(lines, name):.1%}")
            for name, values in rows
        ),
    )


def _number(value: float | None, pattern: str, factor: float = 1) -> str:
    return _UNKNOWN if value is None else pattern.format(value * factor)


def _range(spread: Spread) -> str:
    return f"{spread.value:.1f} ({spread.low:.1f}–{spread.high:.1f})"


def _times(spread: Spread) -> str:
    return f"{spread.value:.2f}× ({spread.low:.2f}–{spread.high:.2f})"


def _equal(mismatches: int, near_ties: int) -> str:
    if not mismatches:
        return "equal"
    faults = mismatches - near_ties
    found = [f"near-ties: {near_ties}"] if near_ties else []
    return ", ".join([*found, *([f"DIFFERENT: {faults}"] if faults else [])])


def _device(lines: Sequence[Line]) -> str:
    where = lines[0]["provenance"]
    return where["cpu"] if where["device"] == "cpu" else where["device"]


def _mean_prompt(samples: Samples) -> int:
    lengths = {line["prompt"]: line["num_prompt_tokens"] for line in samples.samples}
    return round(sum(lengths.values()) / len(lengths))
