"""Shadow tokens are norm + head of what a full forward pass has at those layers, and DEL asks for few of them."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from batched_runs import needs_native
from layerskip_models import LayerSkipModel, from_transformers
from policies import DelExit, DraftRow, ObservationSpec, Policy, RoundContext, RoundRecord, ShadowTokens
from policies.base import NeverStop
from policies.spide import shadow_acceptance
from records import finished
from scripted_policies import ScriptedExit, StopBelow
from selfspec import SelfSpecGenerator
from selfspec.cache.hidden_states import DeferredShadow
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(num_layers=5, dtype=torch.float64, late_scale=0.6, seed=3)


@pytest.fixture(scope="module")
def engine(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"))


@lru_cache(1)  # every layer of a text is asked for in turn
def hidden_states(llama: LlamaForCausalLM, text: tuple[int, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        found = llama.model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    assert found is not None
    return tuple(found)


def layer_logits(llama: LlamaForCausalLM, text: list[int], layer: int) -> Tensor:
    """Float32 logits of an early exit over a whole text, by transformers, [n, vocab]."""
    with torch.no_grad():
        hidden = hidden_states(llama, tuple(text))[layer]
        if layer < llama.config.num_hidden_layers:  # the last one has been through the norm
            hidden = llama.model.norm(hidden)
        return llama.lm_head(hidden)[0].float()


def check(llama: LlamaForCausalLM, shadow: ShadowTokens, text: list[int], rows: slice) -> None:
    for index, layer in enumerate(shadow.layers):
        logits = layer_logits(llama, text, layer)[rows]
        assert shadow.tokens[index].tolist() == logits.argmax(dim=-1).tolist()
        best = logits.softmax(dim=-1).max(dim=-1).values
        torch.testing.assert_close(shadow.confidences[index], best, rtol=0, atol=1e-5)


def sampled(logits: Tensor) -> Tensor:
    """Probabilities at temperature 0.7 of the 5 likeliest tokens."""
    scaled = logits / 0.7
    return scaled.masked_fill(scaled < scaled.topk(5).values[:, -1:], -math.inf).softmax(dim=-1)


def check_chances(llama: LlamaForCausalLM, record: RoundRecord, text: list[int], p: Tensor) -> None:
    """Compare with the sum of min(p, q / r) for the rows up to the first rejected draft's, or the dropped one.

    text: with the accepted drafts. p: [rows, vocab].
    """
    reached, known = 1.0, []
    q = sampled(layer_logits(llama, text, record.exit_layer or 0)[-len(p) :])
    for row in range(len(p)):
        known.append(float(torch.minimum(p[row], q[row] / reached).sum()))
        if row < record.num_accepted:
            token = record.draft_tokens[row]
            reached = min(1.0, reached * float(p[row, token] / q[row, token]))
    dropped = record.stop_cause == "before_draw" and record.num_accepted == record.num_drafted
    if not dropped:
        known = known[: record.num_drafted]
    assert record.acceptance_probabilities == pytest.approx(known, abs=1e-5)
    assert record.dropped_acceptance == (pytest.approx(known[-1], abs=1e-5) if dropped else None)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("stopping", [None, StopBelow(0.4)], ids=["cap", "before a draw"])
def test_shadow_tokens_of_rounds_and_prompt(
    llama: LlamaForCausalLM, engine: SelfSpecGenerator, stopping: StopBelow | None, do_sample: bool
) -> None:
    """Layers below, at and above the exit layer; rounds with drafts, without, and plain steps; the prompt's last rows."""
    exit_policy = ScriptedExit([(2, 4), (None, 0), (3, 1)], ObservationSpec(shadow_layers=(1, 2, 4), prompt_rows=5))
    prompt = [3, 9, 1, 4, 4, 20, 8]
    options = {"max_new_tokens": 30, "do_sample": do_sample, "temperature": 0.7, "top_k": 5, "seed": 1}
    result = engine.generate(prompt, policy=Policy(exit_policy, stopping), **options)
    text = result.sequences[0].tolist()
    (shadow,) = exit_policy.prompts
    check(llama, shadow, prompt, slice(-5, None))
    assert shadow.target_tokens.tolist() == layer_logits(llama, prompt, 5)[-5:].argmax(dim=-1).tolist()
    p = sampled(layer_logits(llama, prompt, 5)[-5:])
    chances = [torch.minimum(p, sampled(layer_logits(llama, prompt, layer)[-5:])).sum(-1) for layer in (1, 2, 4)]
    if do_sample:
        torch.testing.assert_close(shadow.acceptance_probabilities, torch.stack(chances), rtol=0, atol=1e-5)
    accepted = 0
    for record in exit_policy.records:
        assert record.shadow is not None
        before = text[: record.num_committed_before] + list(record.draft_tokens[: record.num_accepted])
        rows = slice(record.num_committed_before - 1, None)
        assert record.shadow.tokens.shape == (3, record.num_accepted + 1)
        check(llama, record.shadow, before, rows)
        target = layer_logits(llama, before, 5)[rows]
        assert record.shadow.target_tokens.tolist() == target.argmax(dim=-1).tolist()
        if do_sample:
            p = sampled(target)
            chances = [
                torch.minimum(p, sampled(layer_logits(llama, before, layer)[rows])).sum(-1) for layer in (1, 2, 4)
            ]
            assert record.shadow.acceptance_probabilities is not None
            torch.testing.assert_close(record.shadow.acceptance_probabilities, torch.stack(chances), rtol=0, atol=1e-5)
            if stopping is not None and record.exit_layer is not None:
                check_chances(llama, record, before, p)
        else:
            assert record.shadow.acceptance_probabilities is record.acceptance_probabilities is None
        accepted += record.num_accepted
    assert accepted > 0


@needs_native
def test_auto_does_no_more_than_plain_decoding_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns from a prompt afterwards, and what every layer puts out is kept for few of its rows."""
    work: list[tuple[str, int]] = []

    def count(name: str, run: Any) -> None:
        def counted(self: Any, x: Tensor, *rest: Any) -> Any:
            work.append(("kept" if name == "run_layers" and rest[-1] else name, len(x)))
            return run(self, x, *rest)

        monkeypatch.setattr(LayerSkipModel, name, counted)

    for name in ("run_layers", "logits", "draft_choices"):
        count(name, getattr(LayerSkipModel, name))
    running = SelfSpecGenerator(from_transformers(tiny_llama(max_position_embeddings=400))).engine()
    running.add([1, *range(23)] * 12 + [5] * 12, max_new_tokens=64, policy="auto:cost=layers")
    while not running.step():
        pass
    assert work == [("run_layers", 256), ("kept", 44), ("logits", 1)]
    running.step()
    assert ("logits", 8) in work


def test_about_one_row_in_n_is_learned_from(engine: SelfSpecGenerator) -> None:
    exit_policy = ScriptedExit([(2, 2)], ObservationSpec(shadow_layers=(1,), learn_every=3))
    engine.generate([5, 6], max_new_tokens=30, policy=Policy(exit_policy))
    assert exit_policy.prompts == []
    learned = seen = 0
    for record in exit_policy.records:
        assert (record.shadow is not None) == (3 * learned <= seen)
        seen += record.num_accepted + 1
        learned += 0 if record.shadow is None else record.num_accepted + 1
    assert 0 < learned < seen // 2


def test_what_a_dropped_row_would_have_said(engine: SelfSpecGenerator) -> None:
    """It teaches at no cost: right or wrong is known as soon as its row is verified."""

    class DropThird(NeverStop):
        observes = ObservationSpec(confidence=True)

        def stop_before_draw(self, row: DraftRow) -> bool:
            return row.num_drafted == 2

    for do_sample in (False, True):
        exit_policy = ScriptedExit([(2, 9)], ObservationSpec(shadow_layers=(2,)))
        policy = Policy(exit_policy, DropThird())
        engine.generate([5, 6], max_new_tokens=60, policy=policy, do_sample=do_sample, top_k=4, seed=3)
        known = []
        for record in exit_policy.records:
            assert (record.dropped_acceptance is not None) == (
                record.stop_cause == "before_draw" and record.num_accepted == record.num_drafted
            )
            if record.dropped_acceptance is not None and record.shadow is not None:
                known.append(record.dropped_acceptance)
                # The drafts that were accepted before it make up for some of it.
                assert record.dropped_acceptance >= float(shadow_acceptance(record.shadow)[0][2]) - 1e-5
                assert do_sample or record.dropped_acceptance == shadow_acceptance(record.shadow)[0][2]
        assert len(known) > 3 and len(set(known)) > 1


def test_a_policy_is_told_that_a_new_text_begins(engine: SelfSpecGenerator) -> None:
    events: list[str] = []
    asked = ObservationSpec(shadow_layers=(1,), prompt_rows=4)

    class Told(ScriptedExit):
        observes: Any = property(lambda self: events.append("needs") or asked, lambda self, value: None)

        def begin_text(self) -> None:
            events.append("begin")

        def observe_prompt(self, shadow: ShadowTokens) -> None:
            events.append("prompt")

    policy = Policy(Told([(1, 2)]))
    for _ in range(2):
        events.clear()
        engine.generate([5, 6], max_new_tokens=8, policy=policy)
        assert events == ["begin", "needs", "prompt"]


@pytest.mark.parametrize("num_prompt", [3, 1020, 1024, 1030, 2060])
def test_the_last_rows_of_a_prompt(num_prompt: int) -> None:
    """Prefill runs 1,024 rows at a time: the last 32 are learned from also where the last pass would have fewer."""
    llama = tiny_llama(num_layers=3, dtype=torch.float64, max_position_embeddings=2100, seed=3)
    exit_policy = ScriptedExit([(1, 2)], ObservationSpec(shadow_layers=(1, 2), prompt_rows=32))
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    prompt = [i * i % 23 for i in range(num_prompt)]
    engine.generate(prompt, max_new_tokens=2, policy=Policy(exit_policy))
    (shadow,) = exit_policy.prompts
    assert shadow.tokens.shape == (2, min(num_prompt, 32))
    check(llama, shadow, prompt, slice(-32, None))


LAYERS = tuple(range(1, 8))
CONTEXT = RoundContext(round_index=0, num_committed=5, remaining_tokens=50)


class Counting(ShadowTokens):
    @cached_property
    def asked(self) -> set[int]:
        return set()

    def rows_of(self, layer: int) -> list[tuple[bool, float]]:
        self.asked.add(layer)
        return super().rows_of(layer)


def shadow_of(matches: list[list[bool]], seed: int) -> Counting:
    tokens = torch.tensor(matches).long()
    confidences = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
    target = torch.ones(tokens.shape[1], dtype=torch.long)
    return Counting(layers=LAYERS, tokens=tokens, confidences=confidences, target_tokens=target)


def test_layers_that_cannot_be_chosen_are_not_asked_for() -> None:
    """One layer is always right: deeper ones cost more for nothing better, whatever they would have said."""
    text = [shadow_of([[layer >= 2] * 3 for layer in LAYERS], index) for index in range(12)]
    policy = DelExit(num_layers=8)
    policy.observe_prompt(text[0])
    for shadow in text[1:]:
        assert policy.plan(CONTEXT).exit_layer == 2
        policy.observe(finished(1, 1, exit_layer=2, seen=shadow))
    assert set().union(*(shadow.asked for shadow in text)) == {1, 2}


def test_hidden_states_are_not_kept_for_ever() -> None:
    """A layer that is never asked for is learned all the same once 256 of its rows wait."""
    policy = DelExit(num_layers=8)
    rows = (60, 60, 60, 60, 17, 60)  # 257 with the fifth
    text = [shadow_of([[layer >= 2] * count for layer in LAYERS], index) for index, count in enumerate(rows)]
    for shadow in text:
        policy.observe(finished(1, 1, exit_layer=2, seen=shadow))
    assert [len(shadow.asked) for shadow in text] == [7, 7, 7, 7, 7, 0]


def test_a_record_that_is_kept_holds_no_hidden_states() -> None:
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3)))
    trace = engine.generate([5, 1, 7], max_new_tokens=12, policy="del", trace=True).trace or ()
    shadows = [record.shadow for record in trace if isinstance(record.shadow, DeferredShadow)]
    assert shadows and all(shadow._hidden is None for shadow in shadows)
