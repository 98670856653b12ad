"""Exits whose adapters change with every round, and whose rows are kept: the most that learning could do to an engine."""

from __future__ import annotations

from itertools import count

from layerskip_models.exits.lean import LeanAdapter
from random_adapters import random_adapters
from selfspec import SelfSpecGenerator
from selfspec.engine.online_exits import OnlineExits

ROWS_BYTES = 1 << 16


class RestlessExits(OnlineExits):
    """Two sets of random adapters take turns. rounds: how often they were changed."""

    def __init__(self, generator: SelfSpecGenerator, seed: int) -> None:
        model = generator.model
        adapters = {layer: one for layer, one in model.adapters.items() if isinstance(one, LeanAdapter)}
        super().__init__(model, adapters, num_bytes=ROWS_BYTES, rows_per_text=30)
        others = [random_adapters(model, sorted(adapters), seed + 100 * number) for number in (1, 2)]
        self._sets = [{layer: adapters[layer].laid_out(set_.at(layer)) for layer in adapters} for set_ in others]
        self._turns = count()
        self.rounds = 0

    def adopt(self) -> None:
        self.offer(self._sets[next(self._turns) % 2])
        super().adopt()
        self.rounds += 1


def let_exits_change(generator: SelfSpecGenerator, seed: int = 0) -> RestlessExits:
    """From the next call on."""
    restless = RestlessExits(generator, seed)
    generator._models.learn_exits(generator.model, restless)
    return restless
