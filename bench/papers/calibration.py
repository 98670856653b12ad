"""The fixed settings that a paper's baselines are given: a search by replay on a few texts, as the papers searched theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from selfspec.analysis.replay import AgreementTrace, replay

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
Etpl = Callable[[AgreementTrace, int, int], float]


def fixed_etpl(trace: AgreementTrace, exit_layer: int, length: int) -> float:
    """Return the tokens per loaded layer of drafts of a fixed length, the prompt's pass included."""
    rounds = replay(trace, exit_layer, length)
    return len(trace.tokens) / (rounds.loaded_layers + trace.num_layers)


def finite_state_etpl(trace: AgreementTrace, exit_layer: int, length: int) -> float:
    """Return the same of a length that grows by one after a round that was all accepted, and shrinks by one otherwise."""
    runs, total = trace.runs[exit_layer], len(trace.tokens)
    committed, layers = 1, trace.num_layers
    while committed < total:
        drafted = min(length, total - committed - 1)
        accepted = min(runs[committed - 1], drafted)
        layers += drafted * exit_layer + trace.num_layers
        committed += accepted + 1
        length = max(0, length + (1 if accepted == drafted else -1))
    return total / layers


def best_setting(traces: Sequence[AgreementTrace], etpl: Etpl, lengths: Iterable[int] = LENGTHS) -> tuple[int, int]:
    """Return the exit layer, of the first half, and the length with the highest mean over texts."""
    layers = range(1, traces[0].num_layers // 2 + 1)
    settings = [(layer, length) for layer in layers for length in lengths]
    return max(settings, key=lambda setting: fmean(etpl(trace, *setting) for trace in traces))


def packed(agrees: Sequence[float | None]) -> str:
    """Write a complete trace's row as a number in base 16, its first entry being the highest bit after a 1."""
    return f"{int('1' + ''.join(str(int(value or 0)) for value in agrees), 2):x}"


def unpacked(text: str) -> tuple[float, ...]:
    return tuple(float(bit) for bit in f"{int(text, 16):b}"[1:])
