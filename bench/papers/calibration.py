"""The fixed settings that a paper's baselines are given: a search by replay on a few texts, as the papers searched theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from selfspec.analysis.replay import AgreementTrace, replay

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
Etpl = Callable[[AgreementTrace, int, int], float]


def fixed_etpl(trace: AgreementTrace, exit_layer: int, length: int) -> float:
    """Return the tokens per loaded layer of drafts of a fixed length, the prompt's pass included."""
    return len(trace.tokens) / (replay(trace, exit_layer, length).loaded_layers + trace.num_layers)


def finite_state_etpl(trace: AgreementTrace, exit_layer: int, length: int) -> float:
    """Return the same of a length that grows by one after a round that was all accepted, and shrinks by one otherwise."""
    committed, layers, total = 1, trace.num_layers, len(trace.tokens)
    while committed < total:
        drafted = min(length, total - committed - 1)
        accepted = min(trace.runs[exit_layer][committed - 1], drafted)
        layers += drafted * exit_layer + trace.num_layers
        committed += accepted + 1
        length = max(0, length + (1 if accepted == drafted else -1))
    return total / layers


def best_setting(traces: Sequence[AgreementTrace], etpl: Etpl) -> str:
    """Return the exit layer, of the first half, and the length with the highest mean over texts, as "E-G"."""
    settings = [(layer, length) for layer in range(1, traces[0].num_layers // 2 + 1) for length in _LENGTHS]
    exit_layer, length = max(settings, key=lambda setting: fmean(etpl(trace, *setting) for trace in traces))
    return f"{exit_layer}-{length}"
