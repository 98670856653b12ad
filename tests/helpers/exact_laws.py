"""The law of sampled texts, exactly: by transformers' forward pass, and of our engine by taking every course of a run."""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from decoding import decode
from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from policies import Policy
from sampling_in_parts import SamplerInParts
from selfspec.cache.copy_index import CopyStore
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import full_logits, request_for

PROMPT = (4, 1)
RUN_LENGTH = 5  # so that drafts have up to 4 tokens

Law = dict[tuple[int, ...], float]


@cache  # one law for all policies
def exact_law(llama: LlamaForCausalLM, num_tokens: int, top_k: int, prompt: tuple[int, ...] = PROMPT) -> Law:
    """The joint distribution of the first tokens, by transformers' forward pass and its processors."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(1.3), TopKLogitsWarper(top_k)]
    )
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        longer: Law = {}
        for tokens, probability in law.items():
            text = [*prompt, *tokens]
            scores = processors(torch.tensor([text]), full_logits(llama, text)[-1:])
            for token, p in enumerate(scores.double().softmax(dim=-1)[0].tolist()):
                if p > 0:
                    longer[(*tokens, token)] = probability * p
        law = longer
    return law


class Oracle(SamplerInParts):
    """A sampler that takes every possible course in turn, with its probability, instead of drawing one.

    A course is a list of choices. A draw chooses among the tokens with weight; each comparison with a uniform number has two
    ways to go.
    """

    def start(self, script: list[int]) -> None:
        self.script, self.chosen, self.options = script, [], []
        self.probability = 1.0

    def _choose(self, options: int) -> int:
        step = len(self.chosen)
        choice = self.script[step] if step < len(self.script) else 0
        self.chosen.append(choice)
        self.options.append(options)
        return choice

    def draw(self, weights: Tensor, where: str) -> int:
        possible = weights.nonzero()[:, 0].tolist()
        token = possible[self._choose(len(possible))]
        self.probability *= float(weights[token].double() / weights.double().sum())
        return token

    def uniforms(self, count: int, device: torch.device) -> list[float]:
        return [Undecided(self) for _ in range(count)]

    def is_below(self, chance: float) -> bool:
        if not 0 < chance < 1:
            return chance > 0
        below = self._choose(2) == 0
        self.probability *= chance if below else 1 - chance
        return below


class Undecided(float):
    """A uniform number of which only one comparison is decided, u * factor < bound; it may be made again."""

    def __new__(cls, oracle: Oracle) -> Undecided:
        return super().__new__(cls, "nan")

    def __init__(self, oracle: Oracle) -> None:
        self.oracle, self.factor, self.known = oracle, 1.0, {}

    def __mul__(self, factor: float) -> Undecided:
        self.factor = factor
        return self

    def __lt__(self, bound: float) -> bool:
        chance = bound / self.factor if self.factor else float(bound > 0)
        if chance not in self.known:
            assert not self.known, "one number decides two things"
            self.known[chance] = self.oracle.is_below(chance)
        return self.known[chance]


def next_script(chosen: list[int], options: list[int]) -> list[int] | None:
    """The next course in depth-first order; None after the last."""
    script = list(chosen)
    while script and script[-1] == options[len(script) - 1] - 1:
        script.pop()
    if not script:
        return None
    script[-1] += 1
    return script


def enumerated_law(
    model: LayerSkipModel,
    policy: Policy,
    num_tokens: int,
    top_k: int,
    prompt: abc.Sequence[int] = PROMPT,
    copy_from: CopyStore | None = None,
) -> Law:
    """The engine's output law: every course of its random events, with its probability.

    With processors of both kinds: one that looks at the text, and two that do not.
    """
    options = {"max_new_tokens": RUN_LENGTH, "do_sample": True, "temperature": 1.3, "top_k": top_k}
    made = request_for(model, [*prompt], seed=0, repetition_penalty=1.2, **options)
    request, cache = replace(made, copy_from=copy_from), KVCache(model, len(prompt) + RUN_LENGTH)
    runner = EagerRunner(model)
    law: Counter[tuple[int, ...]] = Counter()
    script: list[int] | None = []
    while script is not None:
        cache.declare(0)
        policy.reset()  # the same course must meet the same policy
        text = Sequence(model, cache, request, policy)
        oracle = Oracle(request.processors, request.generator, native=model.kernels is not None)
        oracle.start(script)
        text.sampler = oracle
        with torch.inference_mode():
            for _ in decode(text, runner):
                if text.num_new >= num_tokens or oracle.probability == 0:
                    break
        if oracle.probability > 0:
            first = len(prompt)
            law[tuple(text.tokens[0, first : first + num_tokens].tolist())] += oracle.probability
        script = next_script(oracle.chosen, oracle.options)
    return dict(law)


def distance(left: Law, right: Law) -> float:
    return sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right}) / 2
