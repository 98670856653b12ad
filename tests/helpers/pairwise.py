"""Covering arrays: few cells of a large table in which any two values of two columns meet at least once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, islice, product
from random import Random

Cell = tuple[Hashable, ...]
_TRIES = 150  # at finding rows that may be
_ATTEMPTS = 10  # completions of a pair, of which the one with most new pairs is taken


def all_cells(columns: Mapping[str, Sequence[Hashable]], possible: Callable[[Cell], bool]) -> list[Cell]:
    """Every row of the full table that may be."""
    return [*filter(possible, product(*columns.values()))]


def pairwise(columns: Mapping[str, Sequence[Hashable]], possible: Callable[[Cell], bool], seed: int) -> list[Cell]:
    """Rows in which every two values of two columns that can meet do so; the same for the same seed.

    possible: whether a whole row may be. A pair that no completion was found for is left out, so a rule about few columns
    is best: `test_matrix` compares what is covered with the full table.
    """
    random, values = Random(seed), [*columns.values()]
    wanted = {
        ((left, a), (right, b)): None  # in this order
        for left, right in combinations(range(len(values)), 2)
        for a, b in product(values[left], values[right])
    }
    cells: list[Cell] = []
    while wanted:
        pair = next(iter(wanted))
        fixed = dict(pair)
        options = [[fixed[i]] if i in fixed else column for i, column in enumerate(values)]
        tried = (tuple(column[int(random.random() * len(column))] for column in options) for _ in range(_TRIES))
        found = [*islice(filter(possible, tried), _ATTEMPTS)]
        if not found:
            del wanted[pair]
            continue
        best = max(found, key=lambda cell: sum(one in wanted for one in _pairs(cell)))
        for one in _pairs(best):
            wanted.pop(one, None)
        cells.append(best)
    return cells


def _pairs(cell: Cell) -> list[tuple[tuple[int, Hashable], tuple[int, Hashable]]]:
    return [*combinations(enumerate(cell), 2)]
