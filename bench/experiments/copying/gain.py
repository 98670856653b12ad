"""What copied drafts gain: measured on the model at hand, and estimated at the costs of a larger shape.

A small model's passes are so short that rows of a draft cost nearly as much as passes do. So its rounds are also charged what
they would cost at another shape on the same machine, timed in the same process: the same acceptances, that shape's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from bench.datasets import EncodedPrompt
from bench.engines.own import run_afresh
from bench.engines.peers import TransformersEngine
from bench.record import Line
from layerskip_models import LayerSkipModel
from layerskip_models.transformers_names import with_cache
from policies import MeasuredCost, cost_of_round
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import calibrate

_ROWS = (1, 2, 4, 8, 11, 16, 24, 33)
_CONTEXT = 128


@dataclass(slots=True, kw_only=True)
class Gain:
    """Of one engine on one prompt. estimated_seconds: of its rounds, at the other shape's costs; None if not known.

    copied, drafted: tokens that were committed from a copy and from an exit. seconds: of decoding, without the prompt's.
    """

    engine: str
    task: str
    prompt: str
    tokens: int
    rounds: int
    seconds: float
    estimated_seconds: float | None = None
    copied: int = 0
    drafted: int = 0
    text: list[int] = field(default_factory=list)

    def line(self) -> Line:
        """For a record, without the text."""
        fields: dict[str, Any] = asdict(self)
        del fields["text"]
        return {"kind": "gain", **fields}


def steady_cost(model: LayerSkipModel, times: int = 5) -> MeasuredCost:
    """The median of several calibrations: one takes each number of rows of a large shape twice only."""
    costs = [calibrate(model) for _ in range(times)]

    def middle(name: str) -> tuple[float, ...]:
        return tuple(median(values) for values in zip(*(getattr(cost, name) for cost in costs)))

    return replace(
        costs[0],
        layer_seconds=middle("layer_seconds"),
        head_seconds=middle("head_seconds"),
        draft_seconds=median(cost.draft_seconds for cost in costs),
    )


def borrowed_cost(cost: MeasuredCost, num_layers: int) -> MeasuredCost:
    """The cost of another shape for a model of so many layers: each of them stands for its part of that shape's."""
    share = cost.num_layers / num_layers
    return replace(
        cost,
        num_layers=num_layers,
        layer_seconds=tuple(share * seconds for seconds in cost.layer_seconds),
        description=f"{cost.description}; {cost.num_layers} layers as {num_layers}",
        fixed=True,
    )


def own_gain(
    generator: SelfSpecGenerator, policy: str, prompt: EncodedPrompt, max_new_tokens: int, cost: MeasuredCost
) -> Gain:
    """Decode with a policy, which has forgotten what it knew of other prompts, greedily and without EOS."""
    result = run_afresh(generator, policy, prompt.ids, max_new_tokens, trace=True)
    assert result.trace is not None
    stats = result.stats
    return Gain(
        engine=policy,
        task=prompt.task,
        prompt=prompt.id,
        tokens=stats.num_new_tokens - 1,
        rounds=stats.rounds,
        seconds=stats.seconds - stats.time_to_first_token,
        estimated_seconds=sum(cost_of_round(record, cost) for record in result.trace),
        copied=stats.num_copied_accepted,
        drafted=stats.num_accepted - stats.num_copied_accepted,
        text=result.new_tokens,
    )


class PeerTimes:
    """Seconds of transformers' forward pass at the other shape, over numbers of rows behind a context of 128 positions."""

    def __init__(self, network: LlamaForCausalLM, repeats: int = 3) -> None:
        ids = torch.zeros(1, _CONTEXT, dtype=torch.long, device=network.device)
        self.seconds: dict[int, float] = {}
        with torch.inference_mode():
            cache = DynamicCache(config=network.config)
            named = with_cache(network, cache)
            network(input_ids=ids, use_cache=True, logits_to_keep=1, **named)
            for rows in _ROWS:
                taken = []
                for _ in range(repeats + 1):
                    start = perf_counter()
                    network(input_ids=ids[:, :rows], use_cache=True, **named)
                    taken.append(perf_counter() - start)
                    cache.crop(-rows)
                self.seconds[rows] = median(taken[1:])

    def of(self, rows: int) -> float:
        """Of a pass over so many rows: on the line between the next ones that were timed."""
        return float(np.interp(rows, [*self.seconds], [*self.seconds.values()]))


def peer_gain(
    engine: TransformersEngine,
    network: LlamaForCausalLM,
    prompt: EncodedPrompt,
    max_new_tokens: int,
    times: PeerTimes | None,
) -> Gain:
    """Decode with transformers, counting the rows of every forward pass behind the prompt's."""
    rows: list[int] = []

    def count(module: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = keywords.get("input_ids", arguments[0] if arguments else None)
        assert isinstance(given, Tensor)
        rows.append(given.shape[1])

    hook = network.register_forward_pre_hook(count, with_kwargs=True)
    try:
        generation = engine.generate(prompt.ids, max_new_tokens)
    finally:
        hook.remove()
    # `generate` is called a second time for the first token alone: that pass comes last.
    rounds = rows[1:-1]
    assert generation.time_to_first_token is not None
    return Gain(
        engine=engine.name,
        task=prompt.task,
        prompt=prompt.id,
        tokens=len(generation.tokens) - 1,
        rounds=len(rounds),
        seconds=generation.seconds - generation.time_to_first_token,
        estimated_seconds=None if times is None else sum(times.of(count) for count in rounds),
        copied=max(len(generation.tokens) - 1 - len(rounds), 0) if "lookup" in engine.name else 0,
        text=[*generation.tokens],
    )


def by_engine(gains: Sequence[Line], task: str | None = None) -> dict[str, list[Line]]:
    """The lines of each engine, of one task or of all, in the order in which they ran."""
    found: dict[str, list[Line]] = {}
    for line in gains:
        if line["kind"] == "gain" and task in (None, line["task"]):
            found.setdefault(line["engine"], []).append(line)
    return found
