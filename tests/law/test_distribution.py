"""Sampled text has the model's own distribution, processors on: by enumeration of every random event, and by counting.

Both walk the rounds themselves (`decode`, all that `generate` does but for checking its arguments), a few tokens into an
8-token run, so that drafts go as deep as they would in the middle of a text. A batch changes nothing of that: see
`tests/exact`.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
)

import selfspec.engine.round
import selfspec.engine.verification
from decoding import decode
from exact_laws import PROMPT, RUN_LENGTH, Law, distance, enumerated_law, exact_law, sampled_run
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.exits import STEERED
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from policies import Policy, parse_policy
from random_adapters import adapted
from scripted_policies import EVERY_POLICY, ScriptedExit, StopAtTokens, StopBelow, fixed, named_policy, others_slow
from selfspec.cache.copy_index import CopyStore
from selfspec.engine.accept import accept_sampled
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.runner import Runner
from selfspec.engine.sequence import Sequence
from tiny_llama import tiny_llama

VOCAB_SIZE = 6
NUM_LAYERS = 3
REPEATING = (4, 1, 2, 5, 4, 1)  # for policies that copy
FALSE_ALARMS = 1e-4  # of each policy's goodness-of-fit test
DRAWS = 20_000


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return _tiny()


@cache
def _tiny() -> LlamaForCausalLM:
    return tiny_llama(num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE, late_scale=0.4, seed=11)


@cache
def _made(kind: str) -> LayerSkipModel:
    """That model: "bare" on operators, "in use" on our kernels where they work, with an adapter; and with other drafts."""
    native = native_works(torch.device("cpu"), torch.float32)
    if kind == "draft head":  # drafts are chosen by a head in 8 bits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("layerskip_models.checkpoints.conversion.DRAFT_HEAD_BYTES", 0)
            return from_transformers(_tiny(), layout="native")
    if kind == "native":
        return from_transformers(_tiny(), layout="native")
    bare = from_transformers(_tiny(), layout="native" if kind == "in use" and native else "plain")
    if kind == "steered":
        return adapted(bare, [1, 2], form=STEERED)
    return bare if kind == "bare" else adapted(bare, [1])


@pytest.fixture(scope="module")
def model() -> LayerSkipModel:
    return _made("adapters")


@pytest.fixture(scope="module")
def model_in_use() -> LayerSkipModel:
    """As a user has it, and several times as fast on matrices this small."""
    return _made("in use")


def _named(name: str) -> Policy:
    return named_policy(name, 2, _made("bare"))


POLICIES: dict[str, Callable[[], Policy]] = {
    "ar": lambda: parse_policy("ar", num_layers=NUM_LAYERS),
    "ls:1-3": lambda: parse_policy("ls:1-3", num_layers=NUM_LAYERS),
    "ls:2-2": lambda: parse_policy("ls:2-2", num_layers=NUM_LAYERS),
    "stop before a draw": lambda: fixed(1, 4, StopBelow(0.5)),
    "stop after a draw": lambda: fixed(2, 4, StopAtTokens([0, 2, 5])),
    "changing plans": lambda: Policy(ScriptedExit([(1, 2), (None, 0), (2, 3)])),
    **{name: partial(_named, name) for name in EVERY_POLICY},
}
COPYING = [name for name in POLICIES if "copy" in name]
BITS = ("bits:8-3", "bits:4-2", "bits:4-2,layer=2", "bits:4-4+svip:threshold=1", "bits:8-3+spide")
needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("in use", *name.values, marks=name.marks) for name in others_slow(POLICIES)),
        *(("steered", name) for name in ("ls:2-2", "changing plans", "stop before a draw")),
        *(pytest.param("draft head", name, marks=needs_native) for name in ("ls:1-3", "stop after a draw", "del")),
        *(pytest.param("native", name, marks=needs_native) for name in BITS),
    ],
)
def test_the_law_of_the_first_three_tokens_is_exact(kind: str, name: str, llama: LlamaForCausalLM) -> None:
    """No sampling error: what remains is the rounding of float32 distributions.

    What accepts and rejects a draft is the distribution that it was drawn from, whatever drew it. Policies that copy have a
    prompt that repeats, so that they copy from the first round on.
    """
    prompt = REPEATING if name in COPYING else PROMPT
    prompt = (*prompt, 2) if "min=3" in name else prompt
    policy = POLICIES[name]() if name in POLICIES else parse_policy(name, num_layers=NUM_LAYERS)
    law = enumerated_law(_made(kind), policy, 3, top_k=2, prompt=prompt)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert distance(law, exact_law(llama, 3, top_k=2, prompt=prompt)) < 1e-5


@pytest.mark.parametrize("name", [name for name in COPYING if "min=3" not in name])
def test_the_law_is_exact_with_other_texts_to_copy_from(
    name: str, llama: LlamaForCausalLM, model: LayerSkipModel
) -> None:
    """The prompt itself does not repeat: all that is copied comes from the other texts."""
    texts = CopyStore(
        [
            [*PROMPT[-2:], first, (first + 1) % VOCAB_SIZE, (first + 2) % VOCAB_SIZE, 0, first]
            for first in range(VOCAB_SIZE)
        ]
    )
    copied = Sequence(model, KVCache(model, 40), replace(sampled_run(model, 2), copy_from=texts), POLICIES[name]())
    assert copied.copies is not None and copied.copies.match is not None
    law = enumerated_law(model, POLICIES[name](), 3, top_k=2, copy_from=texts)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert distance(law, exact_law(llama, 3, top_k=2)) < 1e-5


def test_that_enumeration_sees_a_copied_token_taken_for_a_drawn_one(
    llama: LlamaForCausalLM, model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied token is accepted with its own probability p, not with p / q for the q of an exit."""
    original = selfspec.engine.verification._judge

    def with_exit_q(draft: Draft) -> None:
        draft.sequence.q[: draft.num_copied].fill_(1 / VOCAB_SIZE)
        draft.num_copied = 0
        original(draft)

    monkeypatch.setattr(selfspec.engine.verification, "_judge", with_exit_q)
    law = enumerated_law(model, POLICIES["copy:4"](), 3, top_k=2, prompt=REPEATING)
    assert distance(law, exact_law(llama, 3, top_k=2, prompt=REPEATING)) > 1e-2


def test_that_enumeration_sees_a_token_dropped_for_its_own_probability(
    llama: LlamaForCausalLM, model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the policy interface rules out, planted: a draft that was drawn and then thrown away."""

    def dropping(runner: Runner, drafts: abc.Sequence[Draft]) -> None:
        make_drafts(runner, drafts)
        (draft,) = drafts
        if len(draft.tokens) > 1 and float(draft.sequence.q[len(draft.tokens) - 1][draft.tokens[-1]]) < 0.5:
            del draft.rows[-1]
            draft.end -= 1

    monkeypatch.setattr(selfspec.engine.round, "make_drafts", dropping)
    law = enumerated_law(model, POLICIES["ls:2-2"](), 3, top_k=2)
    assert distance(law, exact_law(llama, 3, top_k=2)) > 1e-2


@pytest.mark.parametrize("policy", ["ls:1-1", "ls:2-1"])
def test_that_enumeration_sees_a_bonus_token_from_q(
    policy: str, llama: LlamaForCausalLM, model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfspec.engine.verification, "accept_sampled", bonus_from_q)
    law = enumerated_law(model, parse_policy(policy, num_layers=NUM_LAYERS), 3, top_k=2)
    assert distance(law, exact_law(llama, 3, top_k=2)) > 1e-2


def count_runs(
    model: LayerSkipModel, policy: Policy, draws: int, num_tokens: int, seed: int
) -> Counter[tuple[int, ...]]:
    """How often each beginning came out of that many runs, from one seed."""
    request = sampled_run(model, top_k=3, seed=seed)
    cache = KVCache(model, len(PROMPT) + RUN_LENGTH)
    counts: Counter[tuple[int, ...]] = Counter()
    first, passes = len(PROMPT), EagerRunner(model)
    with torch.inference_mode():
        for _ in range(draws):
            cache.declare(0)
            text = Sequence(model, cache, request, policy)
            for _ in decode(text, passes):
                if text.num_new >= num_tokens:  # what comes later cannot change these
                    break
            counts[tuple(text.tokens[0, first : first + num_tokens].tolist())] += 1
    return counts


def p_value(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """Chi-square goodness of fit; outcomes expected less than 5 times are pooled. 0 for an impossible outcome."""
    if any(outcome not in law for outcome in counts):
        return 0.0
    draws = sum(counts.values())
    cells: list[tuple[float, int]] = []
    rare = (0.0, 0)
    for outcome, probability in law.items():
        expected, observed = draws * probability, counts[outcome]
        if expected < 5:
            rare = (rare[0] + expected, rare[1] + observed)
        else:
            cells.append((expected, observed))
    if rare[0] > 0:
        cells.append(rare)
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


# All draws take a minute for each policy, so that counting is for the slow run: in every run there is the enumeration above.
# One policy, which accepts, rejects and drops, is counted also with as few draws as find the planted faults below.
FEWER_DRAWS = DRAWS // 8


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        pytest.param("stop before a draw", FEWER_DRAWS, marks=pytest.mark.slow),
        *(pytest.param(name, DRAWS, marks=pytest.mark.slow) for name in POLICIES),
    ],
)
def test_goodness_of_fit(name: str, draws: int, llama: LlamaForCausalLM, model_in_use: LayerSkipModel) -> None:
    """First 4 of 8 tokens, 3 possible ones each: 81 outcomes. False-alarm rate 1e-4 for each policy; the seed is fixed."""
    law = exact_law(llama, 4, top_k=3)
    assert len(law) == 81
    counts = count_runs(model_in_use, POLICIES[name](), draws, 4, seed=20_000)
    assert p_value(counts, law) > FALSE_ALARMS


def bonus_from_q(p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, left: object) -> tuple[int, Tensor]:
    accepted, weights = accept_sampled(p, q, drafts, uniforms)
    return accepted, q[accepted - 1] if accepted == drafts.shape[0] else weights


def no_residual(p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, left: object) -> tuple[int, Tensor]:
    accepted, _ = accept_sampled(p, q, drafts, uniforms)
    return accepted, p[accepted]


@pytest.mark.parametrize(("fault", "policy"), [(bonus_from_q, "ls:1-1"), (no_residual, "ls:1-3")])
@pytest.mark.slow
def test_goodness_of_fit_sees_a_planted_bias(
    fault: Callable[[Tensor, Tensor, Tensor, Tensor, object], tuple[int, Tensor]],
    policy: str,
    llama: LlamaForCausalLM,
    model_in_use: LayerSkipModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two faults that published code had: the test objects to them.

    The first needs short drafts, so that bonus tokens fall among the first four.
    """
    monkeypatch.setattr(selfspec.engine.verification, "accept_sampled", fault)
    counts = count_runs(model_in_use, parse_policy(policy, num_layers=NUM_LAYERS), FEWER_DRAWS, 4, seed=1)
    assert p_value(counts, exact_law(llama, 4, top_k=3)) < FALSE_ALARMS


def test_the_statistic_has_its_false_alarm_rate() -> None:
    """Draws from the law itself are flagged at 5 % in about 5 % of the trials; a law 0.05 away from it is always found."""
    generator = torch.Generator().manual_seed(5)
    outcomes = list(product(range(3), repeat=4))
    weights = torch.rand(81, generator=generator, dtype=torch.float64) ** 2
    weights /= weights.sum()
    law = dict(zip(outcomes, weights.tolist()))
    biased = weights.clone()
    half = biased[:40].sum()
    biased[:40] *= 1 + 0.05 / half
    biased[40:] *= 1 - 0.05 / (1 - half)

    def trial(source: Tensor) -> float:
        drawn = torch.multinomial(source, DRAWS, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=81).tolist()
        return p_value(Counter(dict(zip(outcomes, counts))), law)

    alarms = sum(trial(weights) < 0.05 for _ in range(400))
    assert 5 <= alarms <= 40  # binomial(400, .05): outside this with probability below 2e-4
    assert all(trial(biased) < FALSE_ALARMS for _ in range(20))
