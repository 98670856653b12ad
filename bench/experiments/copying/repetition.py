"""Plain repetition: a run of words said several times over. It is what makes a small model learn to copy at all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.experiments.copying.words import Material, invented_word

SHORTEST = 6
"""Words in a run."""


def vocabulary(passages: Sequence[str]) -> list[str]:
    """The words of the passages, each once, in the order of the alphabet."""
    return sorted({word for passage in passages for word in re.findall(r"[A-Za-z]+", passage)})


def repetition(material: Material, words: Sequence[str], longest: int) -> str:
    """A run of words, two to six times in a row; about `longest` words in all, as a document.

    words: drawn from in any order; empty for invented words.
    """
    random = material.random
    times = random.choice((2, 2, 2, 3, 4, 6))
    length = random.randint(SHORTEST, max(longest // times, SHORTEST))
    kind = random.random()
    piece = material.piece(length, length) if kind < 0.3 else None
    if piece is not None:
        run = piece.split()
    elif words and kind < 0.8:
        run = [random.choice(words) for _ in range(length)]
    elif kind < 0.9:
        run = [invented_word(random, random.randint(1, 4)) for _ in range(length)]
    else:
        run = [str(random.randrange(10 ** random.randint(1, 5))) for _ in range(length)]
    between = random.choice((" ", " ", "\n", " | ", "\n\n", ". "))
    return between.join([" ".join(run)] * times)
