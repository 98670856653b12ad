"""What the traces in a record say beyond the runs that were timed; nothing is decoded for it.

A record's "grid" lines hold, for each prompt, the cost of every fixed setting and which layers agree with the last one at
every position of the model's own greedy text. Replay answers four questions from these lines (`selfspec.analysis.replay`):

- transfer: how much of the best speed a setting keeps that was tuned on another task (DEL, Fig. 1a);
- segments: whether one setting stays the best along a text (DEL, Fig. 1b);
- oracle: what the best length of every single round would have been (Pacer, Fig. 2);
- positions: how often a draft token is accepted, by its position in the draft (Pacer, Fig. 6).

Speeds are tokens per measured cost of decoding, prefill left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.grid import ALL, SECONDS, fixed_in_hindsight, grid_lines, with_setting
from bench.record import Line
from policies import CostModel, MeasuredCost
from selfspec.analysis.replay import GRID_LENGTHS, AgreementTrace, replay
from selfspec.engine.stats import ratio

SEGMENT = 64
"""New tokens in a segment, as in DEL's Fig. 1b."""
FEWEST_SEGMENTS = 3
"""Segments that each text must have: with two, the best setting of one of them says little of how it changes along a text."""
Setting = tuple[int, int]
"""Exit layer and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """A record's traces, by prompt, with the prompts' tasks and the measured cost."""

    by_prompt: Mapping[str, AgreementTrace]
    tasks: Mapping[str, str]
    cost: CostModel

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Traces | None:
        """From a record's lines; None where it holds no traces."""
        grid = [line for line in grid_lines(lines) if line.get("agrees")]
        costs = next((line for line in lines if line["kind"] == "costs"), None)
        if not grid or costs is None:
            return None
        num_layers = lines[0]["configuration"]["num_layers"]
        return cls(
            by_prompt={line["prompt"]: trace_of_bits(line["agrees"], num_layers) for line in grid},
            tasks={line["prompt"]: line["task"] for line in grid},
            cost=MeasuredCost.from_dict({name: value for name, value in costs.items() if name != "kind"}),
        )


def trace_of_bits(agrees: Mapping[str, str], num_layers: int) -> AgreementTrace:
    """From the grid line's "0110..." of each layer; which tokens they were does not matter to a replay."""
    rows = {int(layer): tuple(map(float, row)) for layer, row in agrees.items()}
    size = len(next(iter(rows.values())))
    return AgreementTrace(tokens=(0,) * (size + 1), agrees=rows, num_layers=num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """settings: the best one of each task, and under "all" of all together. kept: (tuned on, applied to) -> share of the
    speed that the task's own best setting has."""

    settings: Mapping[str, str]
    kept: Mapping[tuple[str, str], float]


def transfer(grid: Sequence[Line]) -> Transfer:
    """How much speed a setting that was tuned on one task keeps on another, by measured cost."""
    settings = fixed_in_hindsight(grid, SECONDS)
    own = with_setting(grid, settings, SECONDS)
    kept = {}
    for tuned, setting in settings.items():
        speeds = with_setting(grid, {ALL: setting}, SECONDS)
        kept.update({(tuned, task): speeds[task] / own[task] for task in settings if task != ALL})
    return Transfer(settings=settings, kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One stretch of one text: tokens and cost of every setting there."""

    prompt: str
    number: int
    cells: Mapping[Setting, tuple[int, float]]

    @property
    def best(self) -> Setting:
        """The setting with most tokens per cost; of equals the lowest layer and length."""
        return best_of([self])


def too_short(traces: Traces, length: int = SEGMENT) -> str | None:
    """Why these texts cannot be compared by segments, and what to measure; None if they can."""
    shortest = min(len(trace.tokens) for trace in traces.by_prompt.values())
    needed = FEWEST_SEGMENTS * length
    if shortest >= needed:
        return None
    return (
        f"{FEWEST_SEGMENTS} segments of {length} new tokens need texts of at least {needed}, and the shortest here has "
        f"{shortest}: measure with --max-new-tokens {needed} or more"
    )


def segments(traces: Traces, length: int = SEGMENT) -> list[Segment]:
    """Every text cut into stretches of `length` new tokens; a last one that is shorter is left out.

    Drafts end where a segment ends. Raises ValueError for a length below 2, and for texts of fewer than three segments.
    """
    if length < 2:
        raise ValueError(f"a segment must have at least 2 tokens, got {length}")
    reason = too_short(traces, length)
    if reason is not None:
        raise ValueError(reason)
    parts = []
    for prompt, trace in traces.by_prompt.items():
        for number in range(len(trace.tokens) // length):
            # The token before a segment is the one that its first round starts from; prefill makes the very first token.
            first, last = max(number * length - 1, 0), (number + 1) * length - 1
            part = AgreementTrace(
                tokens=trace.tokens[first : last + 1],
                agrees={layer: row[first:last] for layer, row in trace.agrees.items()},
                num_layers=trace.num_layers,
            )
            parts.append((prompt, number, part))
    layers = next(iter(traces.by_prompt.values())).agrees
    costs = {layer: fixed_costs([part for *_, part in parts], layer, traces.cost).tolist() for layer in layers}
    found = []
    for place, (prompt, number, part) in enumerate(parts):
        tokens = len(part.tokens) - 1
        cells = {
            (layer, drafts): (tokens, cost)
            for layer in layers
            for drafts, cost in zip(GRID_LENGTHS, costs[layer][place])
        }
        found.append(Segment(prompt=prompt, number=number, cells=cells))
    return found


def best_of(parts: Sequence[Segment]) -> Setting:
    """The one setting with most tokens per cost over several segments."""
    return max(parts[0].cells, key=lambda setting: segment_speed(parts, [setting] * len(parts)))


def segment_speed(parts: Sequence[Segment], settings: Sequence[Setting]) -> float:
    """Tokens per cost over segments, each with its setting."""
    counts = [part.cells[setting] for part, setting in zip(parts, settings)]
    return sum(tokens for tokens, _ in counts) / sum(cost for _, cost in counts)


class RoundPasses(NamedTuple):
    """Passes per 100 tokens."""

    draft: float
    verify: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleLengths:
    """What drafting at one exit layer would give if every round's length were known beforehand.

    fixed_length: the best one length. speeds are over plain decoding's: fixed of that length, longest of drafting exactly
    as many tokens as will be accepted (Pacer's gamma*), cheapest of the lengths with the lowest cost for the whole text,
    which may be shorter, since rows to verify cost time. lengths: gamma* of every round, text by text.
    """

    exit_layer: int
    fixed_length: int
    fixed: float
    longest: float
    cheapest: float
    lengths: tuple[tuple[int, ...], ...]
    fixed_passes: RoundPasses
    longest_passes: RoundPasses


def oracle_lengths(traces: Traces, exit_layer: int) -> OracleLengths:
    """The oracle's length per round at one exit layer, over all texts.

    Source: Pacer (Zhang et al. 2025), section 3.1 and Fig. 2: gamma* of a round is the longest draft that is accepted whole.
    """
    texts = list(traces.by_prompt.values())
    cost = traces.cost
    tokens = sum(len(text.tokens) - 1 for text in texts)
    plain = tokens * cost.autoregressive()
    best, fixed = best_length(traces, exit_layer)
    rounds = [replay(text, exit_layer, best) for text in texts]
    runs = [accepted_ahead(text, exit_layer) for text in texts]
    lengths = tuple(tuple(longest_drafts(run)) for run in runs)
    prices = _prices(cost, exit_layer, max((length for text in lengths for length in text), default=0))
    longest = sum(prices[length] for text in lengths for length in text)
    drafted = sum(map(sum, lengths))
    return OracleLengths(
        exit_layer=exit_layer,
        fixed_length=best,
        fixed=fixed,
        longest=plain / longest,
        cheapest=plain / sum(cheapest_cost(run, cost, exit_layer) for run in runs),
        lengths=lengths,
        fixed_passes=RoundPasses(
            draft=100 * sum(sum(r.drafted) for r in rounds) / tokens,
            verify=100 * sum(r.rounds for r in rounds) / tokens,
        ),
        longest_passes=RoundPasses(draft=100 * drafted / tokens, verify=100 * sum(map(len, lengths)) / tokens),
    )


def best_length(traces: Traces, exit_layer: int) -> tuple[int, float]:
    """The best one length at an exit layer, over all texts, and its speed over plain decoding's."""
    texts = list(traces.by_prompt.values())
    costs = dict(zip(GRID_LENGTHS, fixed_costs(texts, exit_layer, traces.cost).sum(0).tolist()))
    best = min(costs, key=lambda length: costs[length])
    return best, sum(len(text.tokens) - 1 for text in texts) * traces.cost.autoregressive() / costs[best]


def fixed_costs(texts: Sequence[AgreementTrace], exit_layer: int, cost: CostModel) -> NDArray[np.float64]:
    """What each text costs with each of GRID_LENGTHS, [texts, lengths]: as `replay` of complete traces, all side by side."""
    prices = np.array(_prices(cost, exit_layer, max(GRID_LENGTHS)))
    sizes = np.array([[len(text.tokens) - 1] for text in texts])
    runs = np.zeros((len(texts), sizes.max() + 1), np.int64)
    for row, text in zip(runs, texts):
        row[: len(text.tokens) - 1] = text.runs[exit_layer]
    places, spent = np.zeros((len(texts), len(GRID_LENGTHS)), np.int64), np.zeros((len(texts), len(GRID_LENGTHS)))
    while (going := places < sizes).any():
        drafted = np.minimum(GRID_LENGTHS, sizes - places - 1).clip(0)
        spent += np.where(going, prices[drafted], 0.0)
        accepted = np.minimum(np.take_along_axis(runs, places, 1), drafted)
        places = np.where(going, places + accepted + 1, places)
    return spent


def accepted_ahead(trace: AgreementTrace, exit_layer: int) -> list[int]:
    """For each new token but the last: how many drafts behind it would be accepted, the target's own last token left out.

    Entry i counts from token i; at most the tokens that are left, less the one that verification adds.
    """
    runs = trace.runs[exit_layer]
    return [min(run, len(runs) - place - 1) for place, run in enumerate(runs)]


def longest_drafts(ahead: Sequence[int]) -> Iterator[int]:
    """Each round's gamma*: rounds follow each other, every one drafts all that will be accepted."""
    place = 0
    while place < len(ahead):
        yield ahead[place]
        place += ahead[place] + 1


def cheapest_cost(ahead: Sequence[int], cost: CostModel, exit_layer: int) -> float:
    """The lowest cost of a text whose rounds draft any number of tokens that will be accepted: a shortest path."""
    prices = _prices(cost, exit_layer, max(ahead, default=0))
    rest = [0.0] * (len(ahead) + 1)
    for place in reversed(range(len(ahead))):
        rest[place] = min(map(add, prices, rest[place + 1 : place + ahead[place] + 2]))
    return rest[0]


@cache  # every text and every length asks for them
def _prices(cost: CostModel, exit_layer: int, longest: int) -> tuple[float, ...]:
    """What rounds of 0 to `longest` drafts cost."""
    return (cost.autoregressive(), *(cost.round(exit_layer, length) for length in range(1, longest + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of drafts that start at every position of the texts, at one exit layer; entry j-1 is about the j-th draft token.

    accepted: share of drafts whose first j tokens are all right, so that the j-th is accepted. conditional: the same among
    those whose earlier tokens are right. None where there are no such drafts.
    """

    exit_layer: int
    accepted: tuple[float | None, ...]
    conditional: tuple[float | None, ...]


def acceptance_by_position(traces: Traces, exit_layer: int, num_positions: int) -> Acceptance:
    """Acceptance over the position in the draft. Drafts that the end of the text would cut short are left out.

    Source: Pacer, section 3.1.3 and Fig. 6, with drafts from every position of the response, as its labels are made.
    """
    counts: Counter[tuple[int, int]] = (
        Counter()
    )  # of drafts by how long they can be and how many of their tokens are right
    for trace in traces.by_prompt.values():
        runs = trace.runs[exit_layer]
        longest = (min(num_positions, len(runs) - place) for place in range(len(runs)))
        counts.update((length, min(run, length)) for length, run in zip(longest, runs))

    def at(position: int, fewest_right: int) -> int:
        return sum(count for (length, right), count in counts.items() if length >= position and right >= fewest_right)

    positions = range(1, num_positions + 1)
    return Acceptance(
        exit_layer=exit_layer,
        accepted=tuple(ratio(at(position, position), at(position, 0)) for position in positions),
        conditional=tuple(ratio(at(position, position), at(position, position - 1)) for position in positions),
    )
