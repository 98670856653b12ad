"""What `auto` knows of copied tokens: how often they are right, and how many are worth their rows.

The index says of every committed token what it would have copied, so acceptance by match length is learned for nothing, also
where nothing is copied. A copy of c tokens is worth

    1 + sum of (chance that the first i are right), i = 1 .. c,  -  r * (cost of the round)

at a rate r of tokens per cost, and is made where that is more than what drafting, or a plain step, is worth. Run through the
first E layers, it can be cut before the other layers see it: the exit's own choice and confidence say by Bayes' rule how
likely the copied token still is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from policies.auto.constants import TUNING
from policies.copying import MOST
from policies.cost import CostModel
from policies.records import RoundRecord

_LENGTHS = (2, 3, 4, 5, 6, 8, 12, 16, 32)
"""Match lengths from which on another chance holds."""
_PRIOR = (0.25, 0.35, 0.45, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)


class CopyChoice(NamedTuple):
    """How many tokens to copy, cut at which exit layer (None: verified at once), and what the round is worth."""

    copied: int
    exit_layer: int | None
    value: float


class CopyTable:
    """How often a copied token was right, by how many tokens before it were alike."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to what is usual."""
        self._right = [TUNING.copy_prior * chance for chance in _PRIOR]
        self._seen = [TUNING.copy_prior] * len(_PRIOR)

    def observe(self, copies: Sequence[tuple[int, bool]]) -> None:
        """(Match length, whether what followed it was right) of committed tokens. The latest ones count most."""
        for length, right in copies:
            index = bisect_right(_LENGTHS, length) - 1
            if self._seen[index] >= TUNING.copy_memory:
                self._seen[index] /= 2
                self._right[index] /= 2
            self._seen[index] += 1
            self._right[index] += right

    def chance(self, match_length: int) -> float:
        """That the next token is what followed so many tokens before."""
        index = bisect_right(_LENGTHS, match_length) - 1
        return self._right[index] / self._seen[index]

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {"right": [*self._right], "seen": [*self._seen]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError for another version's."""
        if not len(state["right"]) == len(state["seen"]) == len(_PRIOR):
            raise ValueError(f"the saved state has {len(state['right'])} match lengths, this version {len(_PRIOR)}")
        self._right = [float(count) for count in state["right"]]
        self._seen = [float(count) for count in state["seen"]]


class CopyCosts:
    """What rounds that copy cost, made into lists once, since a plan has microseconds."""

    def __init__(self, cost: CostModel, exit_layer: int | None) -> None:
        self.exit_layer = exit_layer
        self.straight = [cost.copying(0, kept, kept) for kept in range(MOST + 1)]
        if exit_layer is not None:
            nothing = cost.copying(exit_layer, 0, 0)
            self.first = [cost.copying(exit_layer, tried, 0) for tried in range(MOST + 1)]
            self._behind = [cost.copying(exit_layer, 0, kept) - nothing for kept in range(MOST + 2)]

    def cut(self, tried: int, kept: float) -> float:
        """Of `tried` copied tokens of which the exit keeps so many, on average."""
        below = int(kept)
        low, high = self._behind[below], self._behind[below + 1]
        return self.first[tried] + low + (kept - below) * (high - low)

    def row(self, kept: int) -> float:
        """What the layers behind the exit cost more with this copied token than without it."""
        return self._behind[min(kept, MOST)] - self._behind[min(kept, MOST) - 1]


class Detection(NamedTuple):
    """How often an exit cuts a copied token that is wrong, and one that is right."""

    wrong: float
    right: float


class CutTable:
    """How often each exit cut copied tokens that were wrong, and right ones, as rounds have shown.

    Where a copy is wrong, the text takes a turn that the exit seldom foresees either: it detects fewer of them than its
    confidences say (`detection`), which is only what is believed before anything was seen.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing was seen."""
        self._seen: dict[int, list[list[float]]] = {}  # by exit layer: for wrong and for right tokens, [kept, cut]

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round whose copy went through an exit."""
        layer, kept = record.exit_layer, record.num_copied
        if layer is None or record.num_tried == 0:
            return
        wrong, right = self._seen.setdefault(layer, [[0.0, 0.0], [0.0, 0.0]])
        right[0] += min(kept, record.num_accepted)
        if record.num_accepted < kept:
            wrong[0] += 1
        elif kept < record.num_tried and kept < len(record.copies):
            (right if record.copies[kept][1] else wrong)[1] += 1

    def detection(self, layer: int, expected: Detection) -> Detection:
        """Of this exit. expected: what its confidences say."""
        wrong, right = self._seen.get(layer, ((0.0, 0.0), (0.0, 0.0)))
        usual = TUNING.cut_prior
        return Detection(
            (usual * TUNING.cut_usual * expected.wrong + wrong[1]) / (usual + sum(wrong)),
            (usual * expected.right + right[1]) / (usual + sum(right)),
        )

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {str(layer): [[*counts] for counts in seen] for layer, seen in self._seen.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        self._seen = {int(layer): [[*map(float, counts)] for counts in seen] for layer, seen in state.items()}


def copied_chance(chance: float, agrees: bool, exit_chance: float) -> float:
    """That a copied token is right, when the exit's own choice, right with `exit_chance`, is the same or another token.

    Bayes' rule. A wrong copy and a wrong exit agree with each other now and then (TUNING.wrong_alike).
    """
    if agrees:
        right, wrong = chance * exit_chance, (1 - chance) * (1 - exit_chance) * TUNING.wrong_alike
    else:
        right = chance * (1 - exit_chance)
        wrong = (1 - chance) * (exit_chance + (1 - exit_chance) * (1 - TUNING.wrong_alike))
    return right / (right + wrong) if right + wrong > 0 else 0.0


def detection(frequency: Sequence[float], acceptance: Sequence[float], needed: float) -> Detection:
    """Of an exit whose confidences come with this frequency and are right with this acceptance.

    needed: the chance below which a copied token is not worth its row.
    """
    wrong = right = 0.0
    for share, chance in zip(frequency, acceptance):
        if copied_chance(TUNING.copy_usual, agrees=False, exit_chance=chance) < needed:
            wrong += share * (chance + (1 - chance) * (1 - TUNING.wrong_alike))
            right += share * (1 - chance)
    return Detection(wrong, right)


def best_copy(
    table: CopyTable,
    costs: CopyCosts,
    match_length: int,
    rate: float,
    most: int,
    detected: Detection,
    drafting: Callable[[float], float],
) -> CopyChoice:
    """How many tokens to copy behind a match of this length, at this rate of tokens per cost; `most` at most.

    drafting: what drafting at the exit behind a cut is worth, when all before it is right with this chance.
    """
    best = CopyChoice(0, None, float("-inf"))
    reliability, tokens = 1.0, 1.0  # of a copy that goes straight to verification
    # Of one that an exit cuts: passed, that nothing was cut so far; through, that it was right as well.
    through, passed, cut_tokens, kept, behind = 1.0, 1.0, 1.0, 0.0, 0.0
    for copied in range(1, most + 1):
        chance = table.chance(match_length + copied - 1)
        reliability *= chance
        if reliability < TUNING.copy_least:
            break
        tokens += reliability
        value = tokens - rate * costs.straight[copied]
        if value > best.value:
            best = CopyChoice(copied, None, value)
        if costs.exit_layer is None:
            continue
        passes = chance * (1 - detected.right) + (1 - chance) * (1 - detected.wrong)
        behind += passed * (1 - passes) * drafting(through / passed)
        through *= chance * (1 - detected.right)
        passed *= passes
        if passed <= 0:
            break
        cut_tokens += through
        kept += passed
        value = cut_tokens + behind - rate * costs.cut(copied, kept)
        if value > best.value:
            best = CopyChoice(copied, costs.exit_layer, value)
    return best
