"""The grid over exit layer and speculation length: every cell by replay, the most promising ones for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.datasets import EncodedPrompt
from bench.engines import SelfSpecEngine
from bench.record import Line
from bench.summary import Samples
from layerskip_models.checkpoints import write_text
from policies import CostModel
from selfspec import SelfSpecGenerator
from selfspec.defaults import SETTINGS_FILE
from selfspec.replay import AgreementTrace, Replay, replay, trace_agreement
from selfspec.stats import mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting: its replays, one per prompt, and the speed-up over plain decoding that measured costs predict."""

    exit_layer: int
    num_speculations: int
    replays: tuple[Replay, ...]
    predicted_speedup: float

    @property
    def policy(self) -> str:
        """The setting's name."""
        return f"ls:{self.exit_layer}-{self.num_speculations}"

    def as_line(self) -> dict[str, Any]:
        """The record's line. Rates are means over prompts, counts sums."""
        return {
            "kind": "cell",
            "policy": self.policy,
            "exit_layer": self.exit_layer,
            "num_speculations": self.num_speculations,
            "rounds": sum(r.rounds for r in self.replays),
            "num_drafted": sum(sum(r.drafted) for r in self.replays),
            "num_accepted": sum(sum(r.accepted) for r in self.replays),
            "loaded_layers": sum(r.loaded_layers for r in self.replays),
            "acceptance_rate": mean(r.acceptance_rate for r in self.replays),
            "tokens_per_round": mean(r.tokens_per_round for r in self.replays),
            "etpl": mean(r.etpl for r in self.replays),
            "predicted_speedup": self.predicted_speedup,
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


def trace_prompts(
    generator: SelfSpecGenerator,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    advance: Callable[[str], None] = lambda label: None,
) -> list[AgreementTrace]:
    """One traced run per prompt."""
    traces = []
    for prompt in prompts:
        traces.append(trace_agreement(generator, prompt.ids, max_new_tokens))
        advance("tracing every layer")
    return traces


def replay_grid(
    traces: Sequence[AgreementTrace], exit_layers: Sequence[int], lengths: Sequence[int], cost: CostModel
) -> list[Cell]:
    """Every cell of the grid by replay, best predicted speed-up first."""
    cells = []
    for exit_layer in exit_layers:
        for length in lengths:
            replays = tuple(replay(trace, exit_layer, length) for trace in traces)
            plain = sum(r.num_tokens for r in replays) * cost.autoregressive()
            cells.append(
                Cell(
                    exit_layer=exit_layer,
                    num_speculations=length,
                    replays=replays,
                    predicted_speedup=plain / sum(r.cost(cost) for r in replays),
                )
            )
    return sorted(cells, key=lambda cell: -cell.predicted_speedup)


def agreement_line(traces: Sequence[AgreementTrace]) -> dict[str, Any]:
    """The record's line on how often each layer 1 .. L-1 agrees with the last one along the model's own greedy text."""
    layers = range(1, traces[0].num_layers)
    return {"kind": "agreement", "by_layer": [mean(trace.agreement(layer) for trace in traces) for layer in layers]}


def sweep_engines(generator: SelfSpecGenerator, cells: Sequence[Cell]) -> list[SelfSpecEngine]:
    """Plain decoding first, as the reference, then the cells."""
    return [SelfSpecEngine(generator, "ar"), *(SelfSpecEngine(generator, cell.policy) for cell in cells)]


def replay_line(lines: Sequence[Line], cells: Sequence[Cell], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """The record's line on whether the real runs had the replayed rounds: (cell, prompt) pairs that did not.

    Where greedy outputs are equal and arithmetic has no near-tie there are none.
    """
    order = {prompt.id: index for index, prompt in enumerate(prompts)}
    by_engine = {f"selfspec:{cell.policy}": cell for cell in cells}
    differing = set()
    for line in lines:
        if line["kind"] == "sample" and line["engine"] in by_engine:
            expected = by_engine[line["engine"]].replays[order[line["prompt"]]]
            counts = (expected.rounds, sum(expected.drafted), sum(expected.accepted), expected.loaded_layers)
            stats = line["stats"]
            real = (stats["rounds"], stats["num_drafted"], stats["num_accepted"], stats["loaded_layers"])
            if counts != real:
                differing.add((line["engine"], line["prompt"]))
    return {
        "kind": "replay",
        "compared": len(cells) * len(prompts),
        "differing": sorted(map(list, differing)),
    }


def best_line(lines: Sequence[Line], cells: Sequence[Cell]) -> dict[str, Any]:
    """The record's line on the fastest measured cell."""
    samples = Samples(lines)
    measured = {cell.policy: samples.speedup(f"selfspec:{cell.policy}", "selfspec:ar") for cell in cells}
    policy, speedup = max(measured.items(), key=lambda item: item[1].value)
    return {
        "kind": "best",
        "policy": policy,
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
    }


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
