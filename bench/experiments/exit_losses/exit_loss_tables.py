"""The tables of the study of exit losses: drafts and losses by arm, medians over the seeds, and differences from uniform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from bench.experiments.readings.readings import Traces, best_length, oracle_lengths, trace_of_bits
from bench.record import Line
from bench.report.table import UNKNOWN, Table, counted
from policies import LayerCost

_UNIFORM = "uniform"
Measure = Callable[[Line], float | None]


def exit_loss_headline(lines: Sequence[Line]) -> str:
    """What was run, in two sentences."""
    about = lines[0]["configuration"]
    model = about["model"]
    tokens = about["steps"] * about["batch_tokens"]
    return (
        f"{model[0].upper()}{model[1:]}, continued for {about['steps']} steps ({tokens:,} tokens) with each of "
        f"{len(about['arms'])} losses for exits 1 to {about['exits']} and "
        f"{counted(about['repeats'], 'seed')}. Medians over the seeds, in brackets the lowest and highest. "
        f"The {len(_of_kind(lines)[0]['loops'])} greedy texts of {about['max_new_tokens']} tokens are each model's own."
    )


def exit_loss_tables(lines: Sequence[Line]) -> list[Table]:
    """Replayed tokens per layer with the best length and with an oracle, agreement, losses, and differences."""
    num_layers = lines[0]["configuration"]["num_layers"]
    exits = range(1, lines[0]["configuration"]["exits"] + 1)
    replays = {id(line): _replays(line, num_layers, exits) for line in _of_kind(lines)}

    def replayed(kind: str, layer: int) -> Measure:
        return lambda line: replays[id(line)][kind].get(layer)

    def by_exit(make: Callable[[int], Measure]) -> dict[str, Measure]:
        return {f"E = {layer}": make(layer) for layer in exits}

    def at(field: str, place: int) -> Measure:
        return lambda line: float(line[field][place])

    last: dict[str, Measure] = {
        "loss, last layer": at("loss", -1),
        "loop rate": lambda line: sum(line["loops"]) / len(line["loops"]),
    }
    replay = by_exit(lambda layer: replayed("fixed", layer))
    oracle = by_exit(lambda layer: replayed("oracle", layer))
    free = by_exit(lambda layer: replayed("free", layer))
    agreement = by_exit(lambda layer: replayed("agreement", layer))
    losses = by_exit(lambda layer: at("loss", layer - 1))
    fixed = "tokens per loaded layer over plain decoding's, own greedy text, best single length of each exit"
    main = {**replay, **last}
    return [
        _table("exit_losses", f"{fixed[0].upper()}{fixed[1:]}; loss on held-out text", lines, main),
        _table("exit_losses_paired", f"Difference from uniform, same seed: {fixed}", lines, main, paired=True),
        _table(
            "exit_losses_oracle", "The same with an oracle that drafts exactly what will be accepted", lines, oracle
        ),
        _table("exit_losses_free", "The same, best single length, on the texts that do not loop", lines, free),
        _table("exit_losses_agreement", "Agreement with the last layer, own greedy text", lines, agreement),
        _table("exit_losses_loss", "Loss of the exits on held-out text, nats per token", lines, losses),
    ]


def _of_kind(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "exits"]


def _replays(line: Line, num_layers: int, exits: Sequence[int]) -> dict[str, dict[int, float]]:
    """By what is replayed and exit layer, from one run's bits."""
    traces = {str(index): trace_of_bits(bits, num_layers) for index, bits in enumerate(line["agrees"])}
    free = {name: trace for name, trace in traces.items() if not line["loops"][int(name)]}
    all_texts, free_texts = (
        Traces(by_prompt=part, tasks={}, cost=LayerCost(num_layers)) if part else None for part in (traces, free)
    )
    assert all_texts is not None
    found = {layer: oracle_lengths(all_texts, layer) for layer in exits}
    bits = {layer: "".join(text[str(layer)] for text in line["agrees"]) for layer in exits}
    return {
        "fixed": {layer: oracle.fixed for layer, oracle in found.items()},
        "oracle": {layer: oracle.longest for layer, oracle in found.items()},
        "free": {} if free_texts is None else {layer: best_length(free_texts, layer)[1] for layer in exits},
        "agreement": {layer: row.count("1") / len(row) for layer, row in bits.items()},
    }


def _table(
    name: str, title: str, lines: Sequence[Line], measures: Mapping[str, Measure], *, paired: bool = False
) -> Table:
    found = _of_kind(lines)
    arms = list(dict.fromkeys(line["arm"] for line in found))
    base = {line["seed"]: line for line in found if line["arm"] == _UNIFORM}
    rows = []
    for arm in arms:
        runs = [line for line in found if line["arm"] == arm]
        if paired and (arm == _UNIFORM or not all(line["seed"] in base for line in runs)):
            continue
        cells = []
        for measure in measures.values():
            values = [measure(line) for line in runs]
            if paired:
                others = [measure(base[line["seed"]]) for line in runs]
                values = [
                    None if mine is None or other is None else mine - other
                    for mine, other in zip(values, others, strict=True)
                ]
            cells.append(_spread(values, "{:+.3f}" if paired else "{:.3f}"))
        rows.append((arm, *cells))
    return Table(name=name, title=title, columns=("loss of the exits", *measures), rows=tuple(rows))


def _spread(values: Sequence[float | None], pattern: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return UNKNOWN
    middle, low, high = (pattern.format(value) for value in (median(known), min(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"
