"""The tables of a run over tasks and of a sweep: speed, rounds, phases, tasks, eTPL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from bench.machine import WeightBytes
from bench.record import PLAIN, Line, by_value, matching
from bench.report.interval_tables import interval_tables
from bench.report.summary import ALL, Figure, Samples, decode_speed, fastest_memory
from bench.report.table import UNKNOWN, Spread, Table, cross_table, names, number

TRANSFORMERS = "transformers:generate"
PHASES = ("prefill", "draft", "preverify", "verify", "accept", "learn", "other")
"""The phases that selfspec times, `*_seconds` of its statistics."""


def run_tables(lines: Sequence[Line]) -> list[Table]:
    """Make all tables that the record has lines for."""
    samples = Samples(lines)
    first = by_value(matching(samples.samples, "sample", repeat=0), "engine")
    runs = {name: own for name, own in first.items() if all(line["stats"] for line in own)}
    made = [_speed_table(lines, samples), _round_table(samples), _phase_table(samples), _task_table(samples)]
    return [*made, *interval_tables(samples, runs)]


def decoding_text(lines: Sequence[Line]) -> str:
    """Say whether a run was greedy, or how it sampled."""
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

    def typical(engine: str, figure: Figure) -> float | None:
        found = samples.per_prompt(engine, figure)
        return fmean(found) if found else None

    rows = [
        {
            "engine": label,
            "tokens/s": samples.speed(name).text("{:.1f}"),
            "× plain": over(name, PLAIN),
            "× transformers": over(name, TRANSFORMERS),
            "decode tokens/s": number(typical(name, decode_speed), "{:.1f}"),
            "TTFT, ms": number(typical(name, lambda line: line["time_to_first_token"]), "{:.0f}", 1000),
            "of bandwidth": number(_bandwidth_share(lines, samples, name), "{:.0f} %", 100),
        }
        for name, label in samples.engines.items()
    ]
    model = lines[0]["configuration"]["model"]
    title = f"Speed on {model}, {decoding_text(lines)}; plain: selfspec without speculation"
    return Table.of("speed", title, rows).known()


def _bandwidth_share(lines: Sequence[Line], samples: Samples, engine: str) -> float | None:
    """Divide the bytes per second that an engine's rounds read by the device's bandwidth; None if that is not known."""
    limits = matching(lines, "limits")
    runs = samples.of_engine(engine)
    if not limits or not all(line["stats"] for line in runs):
        return None
    weights = WeightBytes.from_line(limits[0])
    moved = sum(weights.moved(line["stats"]) for line in runs)
    return float(moved / sum(line["decode_seconds"] for line in runs) / fastest_memory(lines))


def _round_table(samples: Samples) -> Table:
    """Show the rounds of each engine, and how much of its texts is as in the first one's."""
    references = {line["engine"]: line["reference"] for line in samples.outputs}
    labels = samples.engines
    first = samples.outputs[0]["reference"]
    compared = first is not None  # sampled outputs are not
    rows = []
    for name, label in labels.items():
        to = "" if references[name] == first else f" to {labels.get(references[name], references[name])}"
        rows.append(
            {
                "engine": label,
                "acceptance rate": number(samples.count(name, "acceptance_rate"), "{:.3f}"),
                "tokens/round": number(samples.count(name, "tokens_per_round"), "{:.2f}"),
                "eTPL": number(samples.count(name, "etpl_charged"), "{:.4f}"),
                **({"outputs": _outputs_text(samples, name) + to} if compared else {}),
            }
        )
    against = f", and outputs against {labels.get(first, first)}'s" if compared else ""
    return Table.of("rounds", f"Rounds, means over prompts{against}", rows)


def _outputs_text(samples: Samples, engine: str) -> str:
    """Say how an engine's outputs compare with the reference's, and how much comes before a first difference."""
    own = matching(samples.outputs, "output", engine=engine)
    differing = [line for line in own if line["first_difference"] is not None]
    if not differing:
        return "equal"
    near, faults = (sum(line["near_tie"] is tie for line in differing) for tie in (True, False))
    found = [f"near-ties: {near}"] if near else []
    found += [f"DIFFERENT: {faults}"] if faults else []
    tokens = {line["prompt"]: line["num_new_tokens"] for line in samples.of_engine(engine)}
    places = [(line["first_difference"], tokens[line["prompt"]]) for line in own]
    share = fmean(1.0 if place is None else place / size for place, size in places)
    return f"{', '.join(found) or 'other weights'} ({100 * share:.0f} % equal)"


def _phase_table(samples: Samples) -> Table:
    """Show the engines that tell their phases; pre-verification only where one does it."""
    shares: dict[str, dict[str, float]] = {}
    for name in samples.engines:
        stats = [line["stats"] for line in samples.of_engine(name)]
        if all(stats):
            total = sum(each["seconds"] for each in stats)
            shares[name] = {phase: sum(each[f"{phase}_seconds"] for each in stats) / total for phase in PHASES}
    engines = {name: samples.engines[name] for name in shares}
    shown = names(phase for phase in PHASES if phase != "preverify" or any(own[phase] for own in shares.values()))

    def cell(name: str, phase: str) -> str:
        return f"{100 * shares[name][phase]:.1f} %"

    return cross_table("phases", "Share of time per phase, all runs", "engine", engines, shown, cell)


def _task_table(samples: Samples) -> Table:
    def cell(engine: str, task: str) -> str:
        over_plain = f" ({samples.speedup(engine, PLAIN, task).value:.2f}×)" if PLAIN in samples.engines else ""
        return f"{samples.speed(engine, task).value:.1f}{over_plain}"

    title = "tokens/s by task (times plain decoding's), prefill included"
    return cross_table("tasks", title, "engine", samples.engines, names([*samples.tasks, ALL]), cell)


def sweep_headline(lines: Sequence[Line]) -> str:
    """Name the best measured setting."""
    model, best = lines[0]["configuration"]["model"], matching(lines, "best")[0]
    spread = Spread(value=best["speedup"], low=best["low"], high=best["high"]).text("{:.2f}", "×")
    return f"Best measured setting for {model}: `{best['policy']}`, {spread} its own plain decoding."


def sweep_tables(lines: Sequence[Line]) -> list[Table]:
    """Make two grids of settings: eTPL, and speed-ups predicted or measured."""
    samples, configuration = Samples(lines), lines[0]["configuration"]
    cells = {line["policy"]: line for line in matching(lines, "cell")}

    def etpl(policy: str) -> str:
        return f"{cells[policy]['etpl']:.3f}"

    def speedup(policy: str) -> str:
        if f"selfspec:{policy}" in samples.engines:
            return f"**{samples.speedup(f'selfspec:{policy}', PLAIN).value:.2f}**"
        return f"{cells[policy]['predicted_speedup']:.2f}"

    def grid(name: str, title: str, cell: Callable[[str], str]) -> Table:
        rows, columns = ({number: str(number) for number in axis} for axis in configuration["axes"])
        title += "; rows: exit layer, columns: drafts a round"
        return cross_table(name, title, "exit layer", rows, columns, lambda row, column: cell(f"ls:{row}-{column}"))

    by_replay = f"eTPL by replay (plain decoding: {1 / configuration['num_layers']:.4f})"
    both = "Speed-up over plain decoding; bold is measured (with prefill), the rest predicted from rounds and expected costs"
    return [grid("etpl", by_replay, etpl), grid("speedup", both, speedup)]
