"""Fixed drafts of exits with adapters of several forms, really run: what of them is accepted, and what a token costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bench.experiments.exit_adapters.forms import adapter_layers
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.lean import lean_adapters
from policies import RoundRecord
from selfspec import SelfSpecGenerator

_TOGETHER = 8  # texts in a batch, which changes none of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Drafts of one length at one exit. temperature: 0 for greedy."""

    exit_layer: int
    num_speculations: int
    temperature: float


@dataclass(slots=True)
class SteeredRuns:
    """A model and the prompts that it continues, int64 [n] each. Greedy texts of all runs must be the same."""

    model: LayerSkipModel
    prompts: Sequence[Tensor]
    max_new_tokens: int
    _texts: list[list[int]] | None = field(default=None, init=False)

    def lines(self, adapters: ExitAdapters | None, settings: Sequence[Setting], seed: int) -> Iterator[dict[str, Any]]:
        """A line for each setting. adapters: None for bare exits. seed: of what is sampled.

        Raises ValueError if greedy text differs from an earlier run's.
        """
        leans = {} if adapters is None else lean_adapters(adapters, self.model)
        generator = SelfSpecGenerator(self.model.with_adapters(leans), prefix_cache=0)
        share = 0.0 if adapters is None else adapter_layers(adapters, self.model)
        for setting in settings:
            rounds = self._rounds(generator, setting, seed)
            yield {
                "kind": "rounds", "exit_layer": setting.exit_layer, "num_speculations": setting.num_speculations,
                "temperature": setting.temperature, "adapter_layers": share,
                **counted_rounds(rounds, setting.num_speculations),
            }  # fmt: skip

    def _rounds(self, generator: SelfSpecGenerator, setting: Setting, seed: int) -> list[RoundRecord]:
        sampled = setting.temperature > 0
        drawn: dict[str, Any] = {"temperature": setting.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
        first = 1000 * seed
        results = generator.generate_batch(
            [*self.prompts], max_new_tokens=self.max_new_tokens, do_sample=sampled, trace=True, batch_size=_TOGETHER,
            policy=f"ls:{setting.exit_layer}-{setting.num_speculations}",
            seed=[*range(first, first + len(self.prompts))], **drawn,
        )  # fmt: skip
        if not sampled:
            texts = [result.new_tokens for result in results]
            self._texts = self._texts or texts
            if texts != self._texts:
                raise ValueError("adapters changed a greedy text")
        return [record for result in results for record in result.trace or ()]


def counted_rounds(rounds: Sequence[RoundRecord], length: int) -> dict[str, Any]:
    """Counts over rounds that may draft. reached, held: by place in a draft, drafts that were verified and those accepted.

    Rounds at the end of a text, which have no room for a draft, are left out.
    """
    drafting = [one for one in rounds if one.num_drafted]
    places = range(length)
    return {
        "tokens": sum(len(one.tokens) for one in drafting),
        "rounds": len(drafting),
        "drafted": sum(one.num_drafted for one in drafting),
        "accepted": sum(one.num_accepted for one in drafting),
        "layers": sum(one.loaded_layers for one in drafting),
        "reached": [sum(one.num_accepted >= place and one.num_drafted > place for one in drafting) for place in places],
        "held": [sum(one.num_accepted > place for one in drafting) for place in places],
    }
