"""Words and sentences that copying texts are made of, each in training texts or in held-out prompts, never in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _listed("""
Ada Albert Alice Amir Anna Arthur Astrid Beatrice Ben Bruno Carla Cedric Clara Daniel Deborah Edgar Elena Emil
Erica Esther Felix Flora Frank Freya George Gina Grace Hanna Harold Hugo Ida Ines Iris Ivan Jack Jane Joel Julia Karim
Kate Lars Laura Leon Lily Louis Lucy Magnus Maria Martin Maya Mona Nadia Nils Nora Oliver Olga Oscar Paula Peter Petra
Quentin Rachel Ralph Rita Robert Rosa Samir Sara Simon Sofia Stefan Susan Theo Thomas Ulla Vera Victor Walter Wanda Yusuf
Zoe""")
PLACES = _listed("""
airport bakery bank barn bridge camp castle cellar church cinema clinic college court dock factory farm ferry
forest garage garden hall harbour hospital hotel island kitchen laboratory library lighthouse market meadow mill mine
museum office orchard palace park pharmacy port quarry river school shop stable stadium station studio theatre tower town
valley village warehouse workshop""")
THINGS = _listed("""
anchor apple bag basket bell bicycle blanket book bottle box bread broom bucket cable candle carpet chair clock
coat coin cup desk door drum envelope fence flag flute fork glass glove hammer hat honey key kettle knife ladder lamp
lantern letter lock map mirror needle oil paint paper pen pencil piano picture pillow plate pot radio ring rope ruler
sack scarf shelf shoe soap spoon stamp stone table tent ticket towel umbrella vase violin wagon watch wheel window
wood""")
ADJECTIVES = _listed("""
black blue broken brown cheap clean cold dark dry dusty early empty fresh green grey heavy large light long
narrow new old open pale quiet red round sharp short silver small soft square strong thin warm wet white wide
yellow""")
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SENTENCES = """{name} works in the {place} and comes home late.
On {day} {name} carried the {adjective} {thing} to the {place}.
{name} has kept a {adjective} {thing} since the {place} was closed.
The {thing} belongs to {name}, who bought it for {number} coins.
When the {place} opened, {name} was the first to bring a {thing}.
Nobody in the {place} knew that {name} had hidden the {adjective} {thing}.
{name} wrote a long letter about the {thing} and sent it on {day}.
"Where is the {thing}?" asked {name}, and looked under the {adjective} {other}.
There were {number} people in the {place} when {name} arrived.
Every {day} {name} walks from the {place} to the {elsewhere}.
The {adjective} {thing} was sold, but {name} kept the {other}.
{name} counted the {thing} and the {other} and wrote down {number}.
In the morning the {place} is cold, and {name} puts on a {adjective} coat.
The {place} lies behind the {elsewhere}, a walk of {number} minutes.
It rained on {day}, so the {thing} stayed in the {place}.
A {adjective} {thing} stood beside the {other} in the {place}.
The {elsewhere} was built {number} years before the {place}.
Visitors of the {place} may use the {thing}, but not the {adjective} {other}.
For {number} days the {place} had no {thing}.
{name} mended the {other} with a {thing} and {number} nails.""".splitlines()
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


def invented_word(random: Random, syllables: int) -> str:
    """A word that is in no dictionary, such as "tolvari": the tokens around it do not tell how it goes on."""
    return "".join(
        random.choice(CONSONANTS) + random.choice(VOWELS) + (random.choice("lnrst") if random.random() < 0.3 else "")
        for _ in range(syllables)
    )


def is_for_held_out(text: str) -> bool:
    """Whether a name, a word or a passage occurs in held-out prompts only: one in three, by a hash of its text."""
    return crc32(text.encode()) % 3 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What one text is made of. held_out: which of the two sides its names, words and passages come from."""

    random: Random
    held_out: bool
    passages: Sequence[str] = ()

    def one_of(self, items: Sequence[str]) -> str:
        """One of the items of this side."""
        while is_for_held_out(item := self.random.choice(items)) is not self.held_out:
            pass
        return item

    def invented(self) -> str:
        """An invented word in lower case."""
        while is_for_held_out(word := invented_word(self.random, self.random.randint(2, 4))) is not self.held_out:
            pass
        return word

    def name(self) -> str:
        """A first name, or an invented one."""
        return self.one_of(NAMES) if self.random.random() < 0.4 else self.invented().capitalize()

    def names(self, count: int) -> list[str]:
        """Names that differ, and of which none is a part of another."""
        chosen: list[str] = []
        while len(chosen) < count:
            name = self.name()
            if not any(name in other or other in name for other in chosen):
                chosen.append(name)
        return chosen

    def number(self) -> int:
        """From 2 to 9999, small ones more often."""
        return self.random.randrange(2, 10 ** self.random.randint(1, 4))

    def sentence(self, name: str) -> str:
        """A sentence about somebody or, now and then, about nobody."""
        return self.random.choice(SENTENCES).format(
            name=name,
            place=self.one_of(PLACES),
            elsewhere=self.one_of(PLACES),
            thing=self.one_of(THINGS),
            other=self.one_of(THINGS),
            adjective=self.one_of(ADJECTIVES),
            day=self.random.choice(DAYS),
            number=self.number(),
        )

    def story(self, name: str, shortest: int, longest: int) -> str:
        """So many sentences about somebody, the name at least once, in one paragraph or two."""
        sentences = [self.sentence(name) for _ in range(self.random.randint(shortest, longest))]
        if not any(name in sentence for sentence in sentences):
            sentences[0] = f"{name} lives near the {self.one_of(PLACES)}."
        middle = self.random.randrange(1, len(sentences)) if len(sentences) > 4 and self.random.random() < 0.5 else 0
        return " ".join(sentences[:middle]) + ("\n\n" if middle else "") + " ".join(sentences[middle:])

    def piece(self, shortest: int, longest: int) -> str | None:
        """So many words of a passage as they stand, on one line; None where there are no passages."""
        if not self.passages:
            return None
        words = self.random.choice(self.passages).split()
        length = self.random.randint(shortest, longest)
        start = self.random.randrange(max(len(words) - length, 1))
        return " ".join(words[start : start + length])
