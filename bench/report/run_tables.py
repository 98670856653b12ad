"""The tables of a run over tasks and of a comparison with transformers: speed, rounds, phases, tasks, eTPL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

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
from bench.record import BEST_FIXED, PLAIN, Line, matching
from bench.report.interval_tables import interval_tables
from bench.report.summary import Samples
from bench.report.table import UNKNOWN, Table, cross_table, names, number, outputs_text, spread_text, times
from selfspec.engine.results import mean, ratio

TRANSFORMERS = "transformers:generate"
_SOURCES = (
    "engine", "× plain", "tokens/round", "copied", "drafted", "model's own", "copies accepted", "drafts accepted",
)  # fmt: skip
Scores = dict[str, dict[str, dict[str, list[float]]]]
"""By "task, metric", engine and prompt: a score in [0, 1] for each run."""


def run_tables(lines: Sequence[Line]) -> list[Table]:
    """All that the record has lines for."""
    samples = Samples(lines)

    def speed(engine: str, tasks: Sequence[str] | None) -> str:
        return f"{samples.speed(engine, tasks).value:.1f}"

    def speedup(engine: str, tasks: Sequence[str] | None) -> str:
        return f"{samples.speedup(engine, PLAIN, tasks).value:.2f}"

    made = [_speed_table(lines, samples), round_table(samples), _phase_table(samples)]
    if PLAIN in samples.engines:
        made.append(_by_task("speedups", "Speed-up over plain decoding by task, prefill included", samples, speedup))
    made.append(_by_task("tasks", "tokens/s by task", samples, speed))
    made += source_tables(samples)
    scores = scores_by_run(samples)
    made += _score_table(samples, scores)
    grid = grid_lines(lines)
    if grid:
        made.append(_etpl_table(lines, grid))
    elif lines[0]["configuration"].get("do_sample"):
        made += sampled_etpl_table(lines, samples)
    made += interval_tables(lines, first_runs(lines))
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
    """Make the table of speeds, without columns that no engine has a figure for."""

    def over(name: str, baseline: str) -> str:
        return times(samples.speedup(name, baseline)) if baseline in samples.engines else UNKNOWN

    rows = []
    for name, label in samples.engines.items():
        own = samples.summary(name)
        rows.append(
            {
                "engine": label,
                "tokens/s": spread_text(own.tokens_per_second),
                "× plain": over(name, PLAIN),
                "× transformers": over(name, TRANSFORMERS),
                "pooled tokens/s": number(own.total_tokens_per_second, "{:.1f}"),
                "decode tokens/s": number(own.decode_tokens_per_second, "{:.1f}"),
                "TTFT, ms": number(own.time_to_first_token, "{:.0f}", 1000),
                "of bandwidth": number(_bandwidth_share(lines, samples, name), "{:.0f} %", 100),
            }
        )
    model = lines[0]["configuration"]["model"]
    title = f"Speed on {model}, {decoding_text(lines)}; plain: selfspec without speculation"
    return Table.of("speed", title, rows).known()


def _bandwidth_share(lines: Sequence[Line], samples: Samples, engine: str) -> float | None:
    """Bytes per second that an engine's rounds read, over the device's bandwidth; None for what was not measured."""
    limits = matching(lines, "limits")
    runs = matching(samples.samples, "sample", engine=engine)
    if not limits or not all(line["stats"] for line in runs):
        return None
    weights = WeightBytes.from_line(limits[0])
    moved = sum(weights.moved(line["stats"]) for line in runs)
    return float(moved / sum(line["decode_seconds"] for line in runs) / limits[0]["bytes_per_second"])


def round_table(samples: Samples) -> Table:
    """Drafts and passes of each engine, and how much of its texts is as in the first one's."""
    references = {line["engine"]: line["reference"] for line in samples.outputs}
    first = samples.outputs[0]["reference"]
    compared = first is not None  # sampled outputs are not
    rows = []
    for name, label in samples.engines.items():
        row = samples.summary(name)
        to = "" if references[name] == first else f" to {samples.labels[references[name]]}"
        rows.append(
            {
                "engine": label,
                "acceptance rate": number(row.acceptance_rate, "{:.3f}"),
                "accepted/round": number(row.accepted_per_round, "{:.2f}"),
                "tokens/round": number(row.tokens_per_round, "{:.2f}"),
                "eTPL": number(row.etpl, "{:.4f}"),
                "draft passes": number(row.draft_passes, "{:.1f}"),
                "verify passes": number(row.verify_passes, "{:.1f}"),
                **({"outputs": outputs_text(row) + to} if compared else {}),
            }
        )
    against = f", and outputs against {samples.labels[first]}'s" if compared else ""
    return Table.of("rounds", f"Rounds, means over prompts{against}", rows)


def _phase_table(samples: Samples) -> Table:
    shares = {name: found for name in samples.engines if (found := samples.phase_shares(name)) is not None}
    return cross_table(
        "phases",
        "Share of time per phase, all runs",
        "engine",
        {name: samples.labels[name] for name in shares},
        names(samples.phases()),
        lambda name, phase: f"{100 * shares[name][phase]:.1f} %",
    )


def _by_task(name: str, title: str, samples: Samples, cell: Callable[[str, Sequence[str] | None], str]) -> Table:
    """cell: of an engine and the tasks that count, None for all."""
    tasks = names([*dict.fromkeys(samples.tasks.values()), ALL])

    def chosen(engine: str, task: str) -> str:
        return cell(engine, None if task == ALL else [task])

    return cross_table(name, title, "engine", samples.engines, tasks, chosen)


def scores_by_run(samples: Samples) -> Scores:
    """Collect the scores of a record's outputs."""
    found: Scores = {}
    for line in samples.samples:
        for metric, value in (line.get("scores") or {}).items():
            column = found.setdefault(f"{line['task']}, {metric}", {})
            column.setdefault(line["engine"], {}).setdefault(line["prompt"], []).append(value)
    return found


def _score_table(samples: Samples, found: Scores) -> list[Table]:
    """Scores by task, for prompts with references; one row where all engines wrote the same."""
    if not found:
        return []

    def cell(engine: str, column: str) -> str:
        return number(mean(mean(runs) for runs in found[column].get(engine, {}).values()), "{:.1f}", 100)

    title = (
        "Scores in %, means over prompts: exact match of the final answer, F1 of ROUGE; generated code is not scored"
    )
    table = cross_table("scores", title, "engine", samples.engines, names(found), cell)
    if len({row[1:] for row in table.rows}) == 1:
        table = replace(table, rows=(("all engines", *table.rows[0][1:]),))
    return [table]


def source_tables(samples: Samples) -> list[Table]:
    """Every engine that tells its rounds, task by task; no table where nothing was copied.

    Shares are of all new tokens, over all runs on the task's prompts. Records that were made before drafts could be copied
    have no counts of copies, which stands for 0.
    """
    runs = [line for line in samples.samples if line["stats"]]
    if not any(line["stats"].get("num_copied") for line in runs):
        return []
    tasks = list(dict.fromkeys(samples.tasks.values()))
    rows: list[tuple[str, ...]] = []
    for task in [*tasks, ALL] if len(tasks) > 1 else tasks:
        chosen = tasks if task == ALL else [task]
        rows.append((f"**{task}**", *[""] * (len(_SOURCES) - 1)))
        for engine in samples.engines:
            own = [line["stats"] for line in runs if line["engine"] == engine and line["task"] in chosen]
            if own:
                over_plain = samples.speedup(engine, PLAIN, chosen).value if PLAIN in samples.engines else None
                rows.append((samples.labels[engine], number(over_plain, "{:.2f}×"), *_shares(own)))
    title = "New tokens by source, task by task: copied and accepted, drafted by an exit and accepted, the model's own"
    return [Table(name="sources", title=title, columns=_SOURCES, rows=tuple(rows))]


def _shares(stats: Sequence[Line]) -> tuple[str, ...]:
    """Make the cells after the speed-up, of these runs together."""

    def total(name: str) -> int:
        return sum(each.get(name, 0) for each in stats)

    new, accepted, drafted = total("num_new_tokens"), total("num_accepted"), total("num_drafted")
    copied, copied_accepted = total("num_copied"), total("num_copied_accepted")
    shares = (copied_accepted / new, (accepted - copied_accepted) / new, 1 - accepted / new)
    rates = ratio(copied_accepted, copied), ratio(accepted - copied_accepted, drafted - copied)
    return (
        number(ratio(new - len(stats), total("rounds")), "{:.2f}"),
        *(number(share, "{:.1f} %", 100) for share in (*shares, *rates)),
    )


def _etpl_table(lines: Sequence[Line], grid: Sequence[Line]) -> Table:
    """Policies and the fixed settings of the whole grid, in eTPL over plain decoding's."""
    hindsight = fixed_in_hindsight(grid, LAYERS)
    one = hindsight[ALL]
    yardsticks: dict[str, Mapping[str, float]] = {
        "*oracle per task*": with_setting(grid, hindsight),
        "best fixed per task, chosen on the other half": fixed_from_other_half(grid),
        f"*oracle for all tasks, `{one}`*": with_setting(grid, {ALL: one}),
    }
    policies = tokens_per_layer(first_runs(lines))
    return ratio_table(
        "etpl",
        "eTPL relative to plain decoding (1/L), a task's prompts pooled; in italics: settings chosen with hindsight",
        {**yardsticks, **policies},
        [line["task"] for line in grid],
        lines[0]["configuration"]["num_layers"],
    )


def sampled_etpl_table(lines: Sequence[Line], samples: Samples) -> list[Table]:
    """Policies in eTPL over plain decoding's. Sampled texts are not replayed, so no fixed setting stands beside them."""
    runs = first_runs(lines)
    if "num_layers" not in lines[0]["configuration"] or PLAIN not in runs:
        return []
    title = "eTPL relative to plain decoding (1/L), a task's prompts pooled"
    num_layers = lines[0]["configuration"]["num_layers"]
    return [ratio_table("etpl", title, tokens_per_layer(runs), list(samples.tasks.values()), num_layers)]


def first_runs(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Each prompt's first run, by engine, of those that tell their rounds; the oracle is not one of them."""
    found: dict[str, list[Line]] = {}
    for line in matching(lines, "sample", repeat=0):
        found.setdefault(line["engine"], []).append(line)
    return {name: runs for name, runs in found.items() if name != BEST_FIXED and all(line["stats"] for line in runs)}


def tokens_per_layer(runs: Mapping[str, Sequence[Line]]) -> dict[str, dict[str, float]]:
    """By policy, best first: tokens per loaded layer, per task and "all"; a pre-verifier's passes count as loaded layers."""
    found = {
        f"`{engine.removeprefix('selfspec:')}`": pooled(
            (
                line["task"],
                line["num_new_tokens"] - 1,
                line["stats"]["loaded_layers"] + line["stats"]["preverifier_layers"],
            )
            for line in own
        )
        for engine, own in runs.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1][ALL]))


def ratio_table(
    name: str, title: str, rows: Mapping[str, Mapping[str, float]], tasks: Iterable[str], num_layers: int
) -> Table:
    """Tokens per layer by row and task, over those of plain decoding. tasks: of the prompts, each as often as it comes."""
    return cross_table(
        name,
        title,
        "policy",
        names(rows),
        names([*dict.fromkeys(tasks), ALL]),
        lambda row, task: number(rows[row].get(task), "{:.3f}", num_layers),
    )
