"""In which ways a server is asked for the same texts, and with which prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXAMPLE_PROMPTS = (
    "The three laws of motion are",
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n',
    "Translate German to English: Das Wetter ist heute sehr gut.\nEnglish:",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never told anyone about",
    "Question: Tom has 3 apples and buys 4. How many apples has he?\nAnswer:",
    "name,age,city\nAnna,31,Berlin\nBen,27,Hamburg\nClara,45,",
    "Copy this line: alpha beta gamma delta\nalpha beta gamma delta\nCopy it again:",
    "In 1969, the first man",
)
"""Prose, code, a table and a repetition, of different lengths, so that texts in company are at different positions."""
COMPANIES = (2, 8)
"""How many requests are sent at once, by default."""
Kind = Literal["greedy", "stop", "seed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to ask for every prompt.

    company: number of requests sent at once. seed: 0 for the seed of the first text, 1 for another one.
    """

    name: str
    kind: Kind = "greedy"
    company: int = 1
    streamed: bool = False
    logprobs: bool = False
    seed: int = 0

    def num_requests(self, num_prompts: int) -> int:
        """The last group is filled up, so that every text has as much company as the way says."""
        return -(-num_prompts // self.company) * self.company


ALONE = Way(name="alone")
ALONE_LOGPROBS = Way(name="alone, logprobs", logprobs=True)
SEEDED = Way(name="alone", kind="seed")
OTHER_SEED = Way(name="another seed", kind="seed", seed=1)


def ways(companies: Sequence[int]) -> tuple[Way, ...]:
    """The ways to ask a server that is checked. The first of each kind is what the others of that kind are compared with."""
    largest = max(companies)
    found = [ALONE, Way(name="alone, again"), Way(name="alone, streamed", streamed=True), ALONE_LOGPROBS]
    for size in companies:
        found.append(Way(name=f"{size} at once", company=size))
        found.append(Way(name=f"{size} at once, streamed", company=size, streamed=True))
    found.append(Way(name=f"{largest} at once, logprobs", company=largest, logprobs=True))
    found.append(Way(name="alone", kind="stop"))
    found.append(Way(name="alone, streamed", kind="stop", streamed=True))
    found.append(Way(name=f"{largest} at once, streamed", kind="stop", company=largest, streamed=True))
    found += [SEEDED, Way(name="alone, again", kind="seed"), Way(name="alone, streamed", kind="seed", streamed=True)]
    found += [Way(name=f"{size} at once", kind="seed", company=size) for size in companies]
    return (*found, OTHER_SEED)


def plain_ways(companies: Sequence[int]) -> tuple[Way, ...]:
    """The ways to ask the same model without speculation, to tell what company does there from what speculation does."""
    alone = [ALONE, Way(name="alone, again"), ALONE_LOGPROBS]
    return (*alone, *(Way(name=f"{size} at once", company=size) for size in companies))
