"""The tables of a run over tasks and of a comparison with transformers: speed, rounds, phases, tasks, eTPL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.grid import (
    ALL,
    LAYERS,
    fixed_from_other_half,
    fixed_in_hindsight,
    grid_lines,
    pooled,
    with_setting,
)
from bench.machine.bandwidth import WeightBytes
from bench.record import BEST_FIXED, PLAIN, Line
from bench.report.source_tables import source_tables
from bench.report.summary import Samples
from bench.report.table import UNKNOWN, Table, number, outputs_text, spread_text, times
from selfspec.engine.stats import mean

TRANSFORMERS = "transformers:generate"


def run_tables(lines: Sequence[Line]) -> list[Table]:
    """All that the record has lines for."""
    samples = Samples(lines)
    made = [_speed_table(lines, samples), _round_table(lines, samples), _phase_table(samples)]
    if PLAIN in samples.engines:
        made.append(_speedup_by_task(samples))
    made.append(_speed_by_task(samples))
    made += source_tables(samples)
    made += _score_table(samples)
    grid = grid_lines(lines)
    if grid:
        made.append(_etpl_table(lines, samples, grid))
    return made


def decoding_text(lines: Sequence[Line]) -> str:
    """ "greedy", or how a run sampled."""
    configuration = lines[0]["configuration"]
    if not configuration.get("do_sample"):
        return "greedy"
    top_p = f", top-p {configuration['top_p']:g}" if configuration["top_p"] < 1 else ""
    top_k = f", top-k {configuration['top_k']}" if configuration["top_k"] else ""
    return f"sampled at temperature {configuration['temperature']:g}{top_p}{top_k}"


def _speed_table(lines: Sequence[Line], samples: Samples) -> Table:
    """A column that no engine has a figure for is left out."""
    memory = {line["engine"]: line["peak_bytes"] for line in lines if line["kind"] == "memory"}
    summaries = {name: samples.summary(name) for name in samples.engines}

    def over(baseline: str) -> Callable[[str], str]:
        return lambda name: times(samples.speedup(name, baseline)) if baseline in samples.engines else UNKNOWN

    columns: dict[str, Callable[[str], str]] = {
        "tokens/s": lambda name: spread_text(summaries[name].tokens_per_second),
        "× plain": over(PLAIN),
        "× transformers": over(TRANSFORMERS),
        "pooled tokens/s": lambda name: number(summaries[name].total_tokens_per_second, "{:.1f}"),
        "decode tokens/s": lambda name: number(summaries[name].decode_tokens_per_second, "{:.1f}"),
        "TTFT, ms": lambda name: number(summaries[name].time_to_first_token, "{:.0f}", 1000),
        "of bandwidth": lambda name: number(_bandwidth_share(lines, samples, name), "{:.0f} %", 100),
        "memory, MiB": lambda name: number(memory.get(name), "{:.1f}", 1 / 2**20),
        "over plain's": lambda name: (
            number(memory[name] - memory[PLAIN], "{:+.1f}", 1 / 2**20) if {name, PLAIN} <= memory.keys() else UNKNOWN
        ),
    }
    cells = {title: [figure(name) for name in samples.engines] for title, figure in columns.items()}
    known = {title: column for title, column in cells.items() if set(column) != {UNKNOWN}}
    return Table(
        name="speed",
        title=f"Speed on {lines[0]['configuration']['model']}, {decoding_text(lines)}; plain: selfspec without speculation",
        columns=("engine", *known),
        rows=tuple(
            (summaries[name].label, *(column[row] for column in known.values()))
            for row, name in enumerate(samples.engines)
        ),
    )


def _bandwidth_share(lines: Sequence[Line], samples: Samples, engine: str) -> float | None:
    """Bytes per second that an engine's rounds read, over the device's bandwidth; None for what was not measured."""
    limits = next((line for line in lines if line["kind"] == "limits"), None)
    runs = [line for line in samples.samples if line["engine"] == engine]
    if limits is None or not all(line["stats"] for line in runs):
        return None
    weights = WeightBytes.from_line(limits)
    moved = sum(weights.moved(line["stats"]) for line in runs)
    return float(moved / sum(line["decode_seconds"] for line in runs) / limits["bytes_per_second"])


def _round_table(lines: Sequence[Line], samples: Samples) -> Table:
    references = {line["engine"]: line["reference"] for line in samples.outputs}
    first = samples.outputs[0]["reference"]
    compared = first is not None  # sampled outputs are not
    rows = []
    for name in samples.engines:
        row = samples.summary(name)
        to = "" if references[name] == first else f" to {samples.labels[references[name]]}"
        rows.append(
            (
                row.label,
                number(row.acceptance_rate, "{:.3f}"),
                number(row.accepted_per_round, "{:.2f}"),
                number(row.tokens_per_round, "{:.2f}"),
                number(row.etpl, "{:.4f}"),
                number(row.draft_passes, "{:.1f}"),
                number(row.verify_passes, "{:.1f}"),
                *([outputs_text(row) + to] if compared else []),
            )
        )
    return Table(
        name="rounds",
        title="Rounds, means over prompts" + (f", and outputs against {samples.labels[first]}'s" if compared else ""),
        columns=(
            "engine",
            "acceptance rate",
            "accepted/round",
            "tokens/round",
            "eTPL",
            "draft passes",
            "verify passes",
            *(["outputs"] if compared else []),
        ),
        rows=tuple(rows),
    )


def _phase_table(samples: Samples) -> Table:
    shares = {name: samples.phase_shares(name) for name in samples.engines}
    rows = tuple(
        (samples.labels[name], *(f"{100 * by_phase[phase]:.1f} %" for phase in samples.phases()))
        for name, by_phase in shares.items()
        if by_phase is not None
    )
    return Table(
        name="phases", title="Share of time per phase, all runs", columns=("engine", *samples.phases()), rows=rows
    )


def _speed_by_task(samples: Samples) -> Table:
    return _by_task("tasks", "tokens/s by task", samples, lambda name, tasks: f"{samples.speed(name, tasks).value:.1f}")


def _speedup_by_task(samples: Samples) -> Table:
    return _by_task(
        "speedups",
        "Speed-up over plain decoding by task, prefill included",
        samples,
        lambda name, tasks: f"{samples.speedup(name, PLAIN, tasks).value:.2f}",
    )


def _score_table(samples: Samples) -> list[Table]:
    """Scores by task, for prompts with references; one row where all engines wrote the same."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}  # column, engine, prompt -> a score for each run
    for line in samples.samples:
        for metric, value in (line.get("scores") or {}).items():
            column = found.setdefault(f"{line['task']}, {metric}", {})
            column.setdefault(line["engine"], {}).setdefault(line["prompt"], []).append(value)
    if not found:
        return []

    def cell(column: Mapping[str, Mapping[str, Sequence[float]]], engine: str) -> str:
        return number(mean(mean(runs) for runs in column.get(engine, {}).values()), "{:.1f}", 100)

    rows = [(samples.labels[name], *(cell(column, name) for column in found.values())) for name in samples.engines]
    if len({row[1:] for row in rows}) == 1:
        rows = [("all engines", *rows[0][1:])]
    title = (
        "Scores in %, means over prompts: exact match of the final answer, F1 of ROUGE; generated code is not scored"
    )
    return [Table(name="scores", title=title, columns=("engine", *found), rows=tuple(rows))]


def _by_task(name: str, title: str, samples: Samples, cell: Callable[[str, Sequence[str] | None], str]) -> Table:
    tasks = list(dict.fromkeys(samples.tasks.values()))
    return Table(
        name=name,
        title=title,
        columns=("engine", *tasks, ALL),
        rows=tuple(
            (samples.labels[engine], *(cell(engine, [task]) for task in tasks), cell(engine, None))
            for engine in samples.engines
        ),
    )


def _etpl_table(lines: Sequence[Line], samples: Samples, grid: Sequence[Line]) -> Table:
    """Policies and the fixed settings of the whole grid, in eTPL over plain decoding's."""
    hindsight = fixed_in_hindsight(grid, LAYERS)
    one = hindsight[ALL]
    yardsticks: dict[str, Mapping[str, float]] = {
        "*oracle per task*": with_setting(grid, hindsight),
        "best fixed per task, chosen on the other half": fixed_from_other_half(grid),
        f"*oracle for all tasks, `{one}`*": with_setting(grid, {ALL: one}),
    }
    policies: dict[str, Mapping[str, float]] = {}
    for engine in samples.engines:
        runs = [line for line in samples.samples if line["engine"] == engine and line["repeat"] == 0]
        if engine != BEST_FIXED and all(line["stats"] for line in runs):
            counts = ((line["task"], line["num_new_tokens"] - 1, all_layers(line["stats"])) for line in runs)
            policies[f"`{engine.removeprefix('selfspec:')}`"] = pooled(counts)
    policies = dict(sorted(policies.items(), key=lambda item: -item[1][ALL]))
    tasks = [*dict.fromkeys(line["task"] for line in grid), ALL]
    layers = lines[0]["configuration"]["num_layers"]
    return Table(
        name="etpl",
        title="eTPL relative to plain decoding (1/L), a task's prompts pooled; in italics: settings chosen with hindsight",
        columns=("policy", *tasks),
        rows=tuple(
            (name, *(number(values.get(task), "{:.3f}", layers) for task in tasks))
            for name, values in {**yardsticks, **policies}.items()
        ),
    )


def all_layers(stats: Mapping[str, int]) -> int:
    """Layers that a run's rounds loaded, a pre-verifier's passes included."""
    return stats["loaded_layers"] + stats["preverifier_layers"]
