"""The fixed settings that a paper's baselines are given: a search by replay on a few texts, as the papers searched theirs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from selfspec.analysis.replay import AgreementTrace, replay

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)


def etpl(trace: AgreementTrace, exit_layer: int, length: int, *, adapts: bool = False) -> float:
    """Return the tokens per loaded layer of `ls:E-G`, or `fs:E-G`, whose length adapts; the prompt's pass included."""
    return len(trace.tokens) / (replay(trace, exit_layer, length, adapts=adapts).loaded_layers + trace.num_layers)


def best_setting(traces: Sequence[AgreementTrace], *, adapts: bool = False) -> str:
    """Return the exit layer, of the first half, and the length with the highest mean over texts, as "E-G"."""
    settings = [(layer, length) for layer in range(1, traces[0].num_layers // 2 + 1) for length in _LENGTHS]
    exit_layer, length = max(settings, key=lambda one: fmean(etpl(trace, *one, adapts=adapts) for trace in traces))
    return f"{exit_layer}-{length}"
