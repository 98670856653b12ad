"""A grid of policies: fixed settings by replay, others by one run each, the most promising ones timed for real."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.datasets import EncodedPrompt
from bench.engines.own import run_afresh
from bench.record import Line
from bench.report.summary import Samples
from layerskip_models.text_files import write_text
from policies import CostModel, cost_of_round
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import AgreementTrace, replay
from selfspec.defaults import SETTINGS_FILE
from selfspec.engine.results import mean, ratio

Grid = Mapping[str, Mapping[str, str]]
"""Policies, and the place of each on the grid's axes."""


class Counts(NamedTuple):
    """Rounds on one prompt, and what they cost in measured seconds; tokens: committed in rounds."""

    rounds: int
    drafted: int
    accepted: int
    loaded_layers: int
    cost: float

    @property
    def tokens(self) -> int:
        """All but the one from prefill."""
        return self.rounds + self.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy of the grid: its counts, one per prompt, and the speed-up over plain decoding that measured costs predict.

    replayed: the counts are of a replay, not of a run.
    """

    policy: str
    values: Mapping[str, str]
    replayed: bool
    counts: tuple[Counts, ...]
    predicted_speedup: float

    def as_line(self) -> dict[str, Any]:
        """Make the record's line. Rates are means over prompts, counts sums."""
        return {
            "kind": "cell",
            "policy": self.policy,
            "values": dict(self.values),
            "replayed": self.replayed,
            "rounds": sum(c.rounds for c in self.counts),
            "num_drafted": sum(c.drafted for c in self.counts),
            "num_accepted": sum(c.accepted for c in self.counts),
            "loaded_layers": sum(c.loaded_layers for c in self.counts),
            "acceptance_rate": mean(ratio(c.accepted, c.drafted) for c in self.counts),
            "tokens_per_round": mean(ratio(c.tokens, c.rounds) for c in self.counts),
            "etpl": mean(ratio(c.tokens, c.loaded_layers) for c in self.counts),
            "predicted_speedup": self.predicted_speedup,
        }


def fixed_setting_of(policy: str) -> tuple[int, int] | None:
    """(exit layer, length) of "ls:E-G", None for any other policy, whose rounds no replay decides."""
    match = re.fullmatch(r"\s*ls:(\d+)-(\d+)\s*", policy)
    return None if match is None else (int(match[1]), int(match[2]))


def fixed_grid(exit_layers: Sequence[int], lengths: Sequence[int]) -> Grid:
    """Every fixed setting of these exit layers and drafts a round, the length varying fastest."""
    return {
        f"ls:{layer}-{length}": {"exit layer": str(layer), "drafts a round": str(length)}
        for layer in exit_layers
        for length in lengths
    }


def parse_range(text: str, what: str) -> list[int]:
    """ "1-4,8" -> [1, 2, 3, 4, 8]. Raises ValueError that names `what` for anything else, and for numbers below 1."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f'{what} must look like "1-8" or "2,4,6", got {text!r}')
        numbers.update(range(int(first), int(last if dash else first) + 1))
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{what} must be numbers from 1 on, in rising ranges, got {text!r}")
    return sorted(numbers)


def replay_grid(traces: Sequence[AgreementTrace], grid: Grid, cost: CostModel) -> list[Cell]:
    """Every cell of a grid of fixed settings, by replay."""
    cells = []
    for policy, values in grid.items():
        setting = fixed_setting_of(policy)
        assert setting is not None
        replays = [replay(trace, *setting) for trace in traces]
        counts = [Counts(r.rounds, sum(r.drafted), sum(r.accepted), r.loaded_layers, r.cost(cost)) for r in replays]
        cells.append(_cell(policy, values, counts, cost, replayed=True))
    return cells


def run_grid(
    generator: SelfSpecGenerator,
    grid: Grid,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    cost: CostModel,
    advance: Callable[[str], None],
) -> list[Cell]:
    """Every cell of a grid of any policies by one run per prompt.

    Its rounds are charged what measured costs say, which a busy moment cannot change, and learning the time that it took.
    """
    cells = []
    for policy, values in grid.items():
        counts = []
        for prompt in prompts:
            result = run_afresh(generator, policy, prompt.ids, max_new_tokens, trace=True)
            stats = result.stats
            assert result.trace is not None
            spent = sum(cost_of_round(record, cost) for record in result.trace) + stats.learn_seconds
            counts.append(Counts(stats.rounds, stats.num_drafted, stats.num_accepted, stats.loaded_layers, spent))
            advance(f"first run of {policy}")
        cells.append(_cell(policy, values, counts, cost, replayed=False))
    return cells


def _cell(policy: str, values: Mapping[str, str], counts: Sequence[Counts], cost: CostModel, *, replayed: bool) -> Cell:
    plain = sum(c.tokens for c in counts) * cost.autoregressive()
    predicted = plain / sum(c.cost for c in counts)
    return Cell(policy=policy, values=values, replayed=replayed, counts=tuple(counts), predicted_speedup=predicted)


def best_line(lines: Sequence[Line], cells: Sequence[Cell]) -> dict[str, Any]:
    """Make the record's line on the fastest measured cell."""
    samples = Samples(lines)
    measured = {cell.policy: samples.speedup(f"selfspec:{cell.policy}", "selfspec:ar") for cell in cells}
    policy, speedup = max(measured.items(), key=lambda item: item[1].value)
    return {"kind": "best", "policy": policy, "speedup": speedup.value, "low": speedup.low, "high": speedup.high}


def write_setting(folder: Path, best: Mapping[str, Any], run: Mapping[str, Any]) -> Path:
    """Put the best setting beside the checkpoint, where `selfspec.defaults` finds it. Returns the file's path."""
    path = folder / SETTINGS_FILE
    machine = run["provenance"]
    setting = {
        "policy": best["policy"],
        "found_by": "selfspec-bench sweep",
        "speedup_over_autoregressive": round(best["speedup"], 3),
        "prompts": run["configuration"]["prompts_digest"],
        "max_new_tokens": run["configuration"]["max_new_tokens"],
        "device": machine["cpu"] if machine["device"] == "cpu" else machine["device"],
        "threads": machine["threads"],
        "dtype": machine["dtype"],
    }
    write_text(path, json.dumps(setting, indent=2, ensure_ascii=False) + "\n")
    return path
