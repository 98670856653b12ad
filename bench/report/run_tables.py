"""The tables of a run over tasks and of engines side by side: speed, rounds, phases, tasks, eTPL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.machine import WeightBytes
from bench.record import PLAIN, Line, matching
from bench.report.interval_tables import interval_tables
from bench.report.summary import ALL, Samples
from bench.report.table import UNKNOWN, Table, cross_table, names, number, ratio

TRANSFORMERS = "transformers:generate"
_SOURCES = (
    "engine", "× plain", "tokens/round", "copied", "drafted", "model's own", "copies accepted", "drafts accepted",
)  # fmt: skip


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
    runs = first_runs(samples)
    if lines[0]["command"] == "run" and PLAIN in runs:
        made.append(_etpl_table(lines, samples, runs))
    made += interval_tables(samples, runs)
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
        return samples.speedup(name, baseline).text("{:.2f}", "×") if baseline in samples.engines else UNKNOWN

    def decode_speed(line: Line) -> float | None:
        return ratio(line["num_new_tokens"] - 1, line["decode_seconds"]) if line["decode_seconds"] else None

    rows = [
        {
            "engine": label,
            "tokens/s": samples.speed(name).text("{:.1f}"),
            "× plain": over(name, PLAIN),
            "× transformers": over(name, TRANSFORMERS),
            "decode tokens/s": number(samples.over_prompts(name, decode_speed), "{:.1f}"),
            "TTFT, ms": number(samples.over_prompts(name, lambda line: line["time_to_first_token"]), "{:.0f}", 1000),
            "of bandwidth": number(_bandwidth_share(lines, samples, name), "{:.0f} %", 100),
        }
        for name, label in samples.engines.items()
    ]
    model = lines[0]["configuration"]["model"]
    title = f"Speed on {model}, {decoding_text(lines)}; plain: selfspec without speculation"
    return Table.of("speed", title, rows, plotted="tokens/s").known()


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
    """Show drafts and passes of each engine, and how much of its texts is as in the first one's."""
    references = {line["engine"]: line["reference"] for line in samples.outputs}
    labels = samples.engines
    first = samples.outputs[0]["reference"]
    compared = first is not None  # sampled outputs are not
    rows = []
    for name, label in labels.items():
        drafts = samples.count(name, "num_drafted")
        passes = None if drafts is None else drafts - (samples.count(name, "num_copied") or 0)
        to = "" if references[name] == first else f" to {labels.get(references[name], references[name])}"
        rows.append(
            {
                "engine": label,
                "acceptance rate": number(samples.count(name, "acceptance_rate"), "{:.3f}"),
                "accepted/round": number(samples.count(name, "accepted_per_round") if drafts else None, "{:.2f}"),
                "tokens/round": number(samples.count(name, "tokens_per_round"), "{:.2f}"),
                "eTPL": number(samples.count(name, "etpl_charged"), "{:.4f}"),
                "draft passes": number(passes, "{:.1f}"),
                "verify passes": number(samples.count(name, "rounds"), "{:.1f}"),
                **({"outputs": samples.outputs_text(name) + to} if compared else {}),
            }
        )
    against = f", and outputs against {labels.get(first, first)}'s" if compared else ""
    return Table.of("rounds", f"Rounds, means over prompts{against}", rows, plotted="tokens/round")


def _phase_table(samples: Samples) -> Table:
    shares = {name: found for name in samples.engines if (found := samples.phase_shares(name)) is not None}
    return cross_table(
        "phases",
        "Share of time per phase, all runs",
        "engine",
        {name: samples.engines[name] for name in shares},
        names(samples.phases()),
        lambda name, phase: f"{100 * shares[name][phase]:.1f} %",
    )


def _by_task(name: str, title: str, samples: Samples, cell: Callable[[str, Sequence[str] | None], str]) -> Table:
    """cell: of an engine and the tasks that count, None for all."""
    tasks = names([*dict.fromkeys(samples.tasks.values()), ALL])

    def chosen(engine: str, task: str) -> str:
        return cell(engine, None if task == ALL else [task])

    return cross_table(name, title, "engine", samples.engines, tasks, chosen)


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
                rows.append((samples.engines[engine], number(over_plain, "{:.2f}×"), *_shares(own)))
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


def _etpl_table(lines: Sequence[Line], samples: Samples, runs: Mapping[str, Sequence[Line]]) -> Table:
    """Show policies in tokens per loaded layer over plain decoding's, best first; a pre-verifier's passes count as layers."""
    tasks = list(dict.fromkeys(samples.tasks.values()))

    def etpl(engine: str, task: str) -> float:
        own = [line for line in runs[engine] if task in (ALL, line["task"])]
        layers = sum(line["stats"]["loaded_layers"] + line["stats"]["preverifier_layers"] for line in own)
        return sum(line["num_new_tokens"] - 1 for line in own) / layers * lines[0]["configuration"]["num_layers"]

    best_first = sorted(runs, key=lambda engine: -etpl(engine, ALL))
    rows = {engine: f"`{engine.removeprefix('selfspec:')}`" for engine in best_first}
    title = "eTPL relative to plain decoding (1/L), a task's prompts pooled"
    return cross_table("etpl", title, "policy", rows, names([*tasks, ALL]), lambda row, task: f"{etpl(row, task):.3f}")


def first_runs(samples: Samples) -> dict[str, list[Line]]:
    """Return each prompt's first run, by engine, of those that tell their rounds."""
    found: dict[str, list[Line]] = {}
    for line in matching(samples.samples, "sample", repeat=0):
        found.setdefault(line["engine"], []).append(line)
    return {name: runs for name, runs in found.items() if all(line["stats"] for line in runs)}
