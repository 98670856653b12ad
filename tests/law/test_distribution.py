"""Sampled text has the model's own distribution, processors on: by enumeration of every random event.

It walks the rounds themselves (`decode`, all that `generate` does but for checking its arguments). Draws of a token from its
weights: `tests/engine/test_sampling.py`. A batch changes nothing of that: see `tests/exact`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import selfspec.engine.wave
from batched_runs import looped_model
from exact_laws import PROMPT, Law, distance, enumerated_law, exact_law
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.draft_vocabulary import DraftTokens
from layerskip_models.exits import STEERED
from layerskip_models.kernels.check import native_works
from layerskip_models.linear import Layout
from policies import Policy, parse_policy
from random_adapters import adapted
from scripted_policies import EVERY_POLICY, ScriptedExit, StopAtTokens, StopBelow, fixed, named_policy, others_slow
from selfspec.cache.copy_index import CopyIndex, CopyStore
from selfspec.engine.accept import accept_sampled, reach, residual
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.runners.runner import Runner
from selfspec.engine.verification import _judge
from selfspec.engine.wave import Row, _token
from tiny_llama import lean_logits, tiny_llama

VOCAB_SIZE = 6
NUM_LAYERS = 3
REPEATING = (4, 1, 2, 5, 4, 1)  # for policies that copy


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
    if kind == "few tokens":
        return _made("native").with_draft_vocabulary(DraftTokens((5, 0)))
    if kind == "native":
        return from_transformers(_tiny(), layout="native")
    bare = from_transformers(_tiny(), layout="native" if kind == "in use" and native else "plain")
    if kind == "steered":
        return adapted(bare, [1, 2], form=STEERED)
    return bare if kind == "bare" else adapted(bare, [1])


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
        *(
            pytest.param("few tokens", name, marks=needs_native)
            for name in ("ls:1-3", "stop before a draw", "del", *BITS[:2])
        ),
    ],
)
def test_the_law_of_the_first_three_tokens_is_exact(kind: str, name: str) -> None:
    """No sampling error: what remains is the rounding of float32 distributions.

    What accepts and rejects a draft is the distribution that it was drawn from, whatever drew it. Policies that copy have a
    prompt that repeats, so that they copy from the first round on.
    """
    prompt = REPEATING if name in COPYING else PROMPT
    prompt = (*prompt, 2) if "min=3" in name else prompt
    policy = POLICIES[name]() if name in POLICIES else parse_policy(name, num_layers=NUM_LAYERS)
    law = enumerated_law(_made(kind), policy, 3, top_k=2, prompt=prompt)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert distance(law, exact_law(_tiny(), 3, top_k=2, prompt=prompt)) < 1e-5


@cache
def _looped(layout: Layout) -> tuple[LayerSkipModel, Law]:
    """A model of 3 loops, an adapter after the first, and its law: each text is read at once, through all loops."""
    model = adapted(looped_model(layout, num_loops=3, vocab_size=VOCAB_SIZE), [2])

    def read(ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=lean_logits(model, ids[0].tolist()).unsqueeze(0))

    return model, exact_law(read, 4, top_k=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["wave:loop=1", "wave:loop=2", "ls:2-2", "auto"])
@pytest.mark.parametrize("layout", ["plain", pytest.param("native", marks=needs_native)])
def test_the_law_of_a_looped_model_is_exact(layout: Layout, name: str) -> None:
    """Rows that were in flight when the last token was judged are there for the next ones."""
    model, expected = _looped(layout)
    law = enumerated_law(model, named_policy(name, 2, model), 4, top_k=2)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert distance(law, expected) < 1e-5


def q_of_the_first_loop(draft: Draft, said: Any, position: int, guess: Row | None) -> tuple[int, Tensor | None]:
    """Forget that the second loop has judged a draft that it kept."""
    token, q = _token(draft, said, position, guess)
    return token, q if guess is None else guess.q


def nothing_subtracted(p: Tensor, q: Tensor, reached: Any) -> Tensor:
    """Draw by p among the tokens of the residual."""
    return p * (p > q)


@pytest.mark.parametrize(("name", "fault"), [("_token", q_of_the_first_loop), ("residual", nothing_subtracted)])
def test_that_enumeration_sees_a_fault_in_a_wave(
    name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfspec.engine.wave, name, fault)
    model, expected = _looped("plain")
    assert distance(enumerated_law(model, named_policy("wave", 2, model), 4, top_k=2), expected) > 1e-2


@pytest.mark.parametrize("name", [name for name in COPYING if "min=3" not in name])
def test_the_law_is_exact_with_other_texts_to_copy_from(name: str) -> None:
    """The prompt itself does not repeat: all that is copied comes from the other texts."""
    model = _made("adapters")
    texts = CopyStore(
        [
            [*PROMPT[-2:], first, (first + 1) % VOCAB_SIZE, (first + 2) % VOCAB_SIZE, 0, first]
            for first in range(VOCAB_SIZE)
        ]
    )
    index = CopyIndex(texts)
    index.read(torch.tensor(PROMPT))
    assert index.match is not None
    law = enumerated_law(model, POLICIES[name](), 3, top_k=2, copy_from=texts)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert distance(law, exact_law(_tiny(), 3, top_k=2)) < 1e-5


def copied_as_drawn(draft: Draft) -> None:
    """Judge a copied token by p / q for the q of an exit, where its own probability p is to accept it."""
    draft.sequence.q[: draft.num_copied].fill_(1 / VOCAB_SIZE)
    draft.num_q, draft.num_copied = draft.num_copied, 0
    _judge(draft)


def dropping(runner: Runner, drafts: abc.Sequence[Draft]) -> None:
    """Throw away a draft that was drawn for its own probability, which the policy interface rules out."""
    make_drafts(runner, drafts)
    (draft,) = drafts
    if len(draft.tokens) > 1 and float(draft.sequence.q[len(draft.tokens) - 1][draft.tokens[-1]]) < 0.5:
        del draft.rows[-1]
        draft.end -= 1


Numbers = abc.Sequence[float]


def bonus_from_q(p: Tensor, q: Tensor, reached: Numbers, uniforms: Numbers) -> tuple[int, Tensor]:
    accepted, weights = accept_sampled(p, q, reached, uniforms)
    return accepted, q[accepted - 1] if accepted == len(uniforms) else weights


def no_residual(p: Tensor, q: Tensor, reached: Numbers, uniforms: Numbers) -> tuple[int, Tensor]:
    accepted, _ = accept_sampled(p, q, reached, uniforms)
    return accepted, p[accepted]


def credit_above_one(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """A draft that the target likes more than the drafter did stands for more than one: the minimum with 1 is forgotten."""
    known = min(len(p), len(drafts))
    ratios = (p[:known] / q[:known]).gather(-1, drafts[:known].unsqueeze(-1))[:, 0]
    return [1.0, *ratios.cumprod(0).tolist()]


def unscaled(p: Tensor, q: Tensor, reached: Numbers) -> Tensor:
    """What a rejection leaves, as of a single draft."""
    return residual(p, q, [1.0] * len(reached))


def only_what_can_be_drafted(p: Tensor, q: Tensor, reached: Numbers) -> Tensor:
    """A rejection leaves nothing of the tokens that the draft could not choose."""
    return residual(p * (q > 0), q, reached)


def the_end_where_the_target_cannot_go(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """A draft that the target cannot say ends the block as if nothing had been drafted there."""
    reached = reach(p, q, drafts)
    return reached[:-1] if reached[-1] == 0 else reached


@pytest.mark.parametrize(
    ("place", "fault", "name"),
    [
        ("verification._judge", copied_as_drawn, "copy:4"),
        ("round.make_drafts", dropping, "ls:2-2"),
        *(("verification.accept_sampled", bonus_from_q, name) for name in ("ls:1-1", "ls:2-1")),
        ("verification.accept_sampled", no_residual, "ls:1-3"),
        ("accept.residual", unscaled, "ls:1-3"),
        ("accept.residual", only_what_can_be_drafted, "ls:1-3"),
        ("verification.reach", credit_above_one, "ls:1-3"),
        ("verification.reach", the_end_where_the_target_cannot_go, "ls:1-3"),
    ],
)
def test_that_enumeration_sees_a_planted_fault(
    place: str, fault: Callable[..., object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"selfspec.engine.{place}", fault)
    prompt = REPEATING if name in COPYING else PROMPT
    law = enumerated_law(_made("adapters"), parse_policy(name, num_layers=NUM_LAYERS), 3, top_k=2, prompt=prompt)
    assert distance(law, exact_law(_tiny(), 3, top_k=2, prompt=prompt)) > 1e-2
