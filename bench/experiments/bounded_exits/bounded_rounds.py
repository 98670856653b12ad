"""SpecBound's rounds, played over a text: where each token leaves, when a draft ends, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.experiments.bounded_exits.exit_rows import ExitRow
from selfspec.pacer.drafts import num_matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """SpecBound's parameters.

    alpha: of the temperature 1 + alpha (1 - l / L) at exit l. threshold: a token is drafted at the first exit that is so
    sure. depth: layers a token may take; one that no exit up to there is sure of ends the draft. width: drafted tokens.
    """

    alpha: float
    threshold: float
    depth: int
    width: int

    @property
    def name(self) -> str:
        """As tables write it."""
        return f"specbound:alpha={self.alpha:g},threshold={self.threshold:g},depth={self.depth},width={self.width}"


@dataclass(slots=True, kw_only=True)
class Played:
    """Counts of a text. tokens: committed in rounds. layers: loaded ones. heads: read, for exits and for verification."""

    tokens: int = 0
    layers: int = 0
    heads: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Rows(Protocol):
    """`ExitRows`, or made-up ones."""

    def row(self, committed: int, drafted: tuple[int, ...]) -> ExitRow: ...


def leaves_at(row: ExitRow, bounds: Bounds) -> int | None:
    """The first exit layer that is sure enough; None if none up to the greatest depth is."""
    confidences = row.confidences[bounds.alpha][: bounds.depth]
    return next((layer for layer, sure in enumerate(confidences, start=1) if sure >= bounds.threshold), None)


def play(rows: Rows, text: list[int], num_prompt_tokens: int, num_layers: int, bounds: Bounds) -> Played:
    """Decode the text, prompt and new tokens, in rounds; the first new token comes from reading the prompt.

    A row that goes deeper takes the earlier rows of its draft along, in the same pass of the weights, so that their keys and
    values are there. So a drafted token costs the layers up to its exit. What is left of the rows, and of the one that ended
    the draft, is run in one pass: together with what that row has taken already, all layers once.
    """
    counts = Played()
    committed = num_prompt_tokens + 1
    while committed < len(text):
        drafted: tuple[int, ...] = ()
        while len(drafted) < min(bounds.width, len(text) - committed - 1):
            row = rows.row(committed, drafted)
            layer = leaves_at(row, bounds)
            counts.heads += layer or bounds.depth
            if layer is None:
                break
            drafted += (row.tokens[layer - 1],)
            counts.layers += layer
        accepted = num_matching(drafted, text[committed:])
        committed += accepted + 1  # a draft leaves room for the model's own token
        counts.tokens += accepted + 1
        counts.layers += num_layers
        counts.heads += 1
        counts.rounds += 1
        counts.drafted += len(drafted)
        counts.accepted += accepted
    return counts
