"""Shadow tokens are norm + head of the hidden states that a full forward pass has at those layers."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers
from policies import DraftRow, ObservationSpec, Policy, RoundRecord, ShadowTokens
from policies.base import NeverStop
from policies.spide import shadow_acceptance
from scripted_policies import ScriptedExit, StopBelow
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(num_layers=5, dtype=torch.float64, late_scale=0.6, seed=3)


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


def text_before(record: RoundRecord, text: list[int]) -> list[int]:
    """What the rows 0..m of a round were run on: the text before it and the accepted drafts."""
    return text[: record.num_committed_before] + list(record.draft_tokens[: record.num_accepted])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("stopping", [None, StopBelow(0.4)], ids=["cap", "before a draw"])
def test_shadow_tokens_of_rounds_and_prompt(
    llama: LlamaForCausalLM, stopping: StopBelow | None, do_sample: bool
) -> None:
    """Layers below, at and above the exit layer; rounds with drafts, without, and plain steps; the prompt's last rows."""
    exit_policy = ScriptedExit([(2, 4), (None, 0), (3, 1)], ObservationSpec(shadow_layers=(1, 2, 4), prompt_rows=5))
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    prompt = [3, 9, 1, 4, 4, 20, 8]
    result = engine.generate(
        prompt, max_new_tokens=30, policy=Policy(exit_policy, stopping), do_sample=do_sample, top_k=0, seed=1
    )
    text = result.sequences[0].tolist()
    (shadow,) = exit_policy.prompts
    check(llama, shadow, prompt, slice(-5, None))
    assert shadow.target_tokens.tolist() == layer_logits(llama, prompt, 5)[-5:].argmax(dim=-1).tolist()
    accepted = 0
    for record in exit_policy.records:
        assert record.shadow is not None
        before = text_before(record, text)
        rows = slice(record.num_committed_before - 1, None)
        assert record.shadow.tokens.shape == (3, record.num_accepted + 1)
        check(llama, record.shadow, before, rows)
        target = layer_logits(llama, before, 5)[rows]
        assert record.shadow.target_tokens.tolist() == target.argmax(dim=-1).tolist()
        if do_sample:
            expected = target.softmax(dim=-1).expand(3, -1, -1).gather(-1, record.shadow.tokens[..., None])[..., 0]
            assert record.shadow.target_probabilities is not None
            torch.testing.assert_close(record.shadow.target_probabilities, expected, rtol=0, atol=1e-5)
        else:
            assert record.shadow.target_probabilities is None
        accepted += record.num_accepted
    assert accepted > 0


def test_about_one_row_in_n_is_learned_from(llama: LlamaForCausalLM) -> None:
    exit_policy = ScriptedExit([(2, 2)], ObservationSpec(shadow_layers=(1,), learn_every=3))
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    engine.generate([5, 6], max_new_tokens=30, policy=Policy(exit_policy))
    assert exit_policy.prompts == []
    learned = seen = 0
    for record in exit_policy.records:
        assert (record.shadow is not None) == (3 * learned <= seen)
        seen += record.num_accepted + 1
        learned += 0 if record.shadow is None else record.num_accepted + 1
    assert 0 < learned < seen // 2


def test_what_a_dropped_row_would_have_said(llama: LlamaForCausalLM) -> None:
    """It teaches at no cost: right or wrong is known as soon as its row is verified."""

    class DropThird(NeverStop):
        observes = ObservationSpec(confidence=True)

        def stop_before_draw(self, row: DraftRow) -> bool:
            return row.num_drafted == 2

    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    for do_sample in (False, True):
        exit_policy = ScriptedExit([(2, 9)], ObservationSpec(shadow_layers=(2,)))
        policy = Policy(exit_policy, DropThird())
        engine.generate([5, 6], max_new_tokens=60, policy=policy, do_sample=do_sample, top_k=4, seed=3)
        known = []
        for record in exit_policy.records:
            assert (record.dropped_acceptance is not None) == (
                not do_sample and record.stop_cause == "before_draw" and record.num_accepted == record.num_drafted
            )
            if record.dropped_acceptance is not None and record.shadow is not None:
                known.append(record.dropped_acceptance)
                assert record.dropped_acceptance == shadow_acceptance(record.shadow)[0][2]
        assert do_sample or (len(known) > 3 and len(set(known)) > 1)


@pytest.mark.parametrize("num_prompt", [1020, 1024, 1030, 2060])
def test_a_prompt_longer_than_a_prefill_pass(num_prompt: int) -> None:
    """Prefill runs 1,024 rows at a time: the last 32 are learned from also where the last pass would have fewer."""
    llama = tiny_llama(num_layers=3, dtype=torch.float64, max_position_embeddings=2100, seed=3)
    exit_policy = ScriptedExit([(1, 2)], ObservationSpec(shadow_layers=(1, 2), prompt_rows=32))
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    prompt = [i * i % 23 for i in range(num_prompt)]
    engine.generate(prompt, max_new_tokens=2, policy=Policy(exit_policy))
    (shadow,) = exit_policy.prompts
    assert shadow.tokens.shape == (2, 32)
    check(llama, shadow, prompt, slice(-32, None))


def test_a_short_prompt_gives_the_rows_it_has(llama: LlamaForCausalLM) -> None:
    exit_policy = ScriptedExit([(1, 2)], ObservationSpec(shadow_layers=(1,), prompt_rows=32))
    SelfSpecGenerator(from_transformers(llama, layout="plain")).generate(
        [1, 2, 3], max_new_tokens=2, policy=Policy(exit_policy)
    )
    assert exit_policy.prompts[0].tokens.shape == (1, 3)


def test_a_policy_is_told_that_a_new_text_begins(llama: LlamaForCausalLM) -> None:
    class Told(ScriptedExit):
        def __init__(self) -> None:
            super().__init__([(1, 2)])
            self.events: list[str] = []

        @property
        def observes(self) -> ObservationSpec:
            self.events.append("needs")
            return ObservationSpec(shadow_layers=(1,), prompt_rows=4)

        @observes.setter
        def observes(self, value: ObservationSpec) -> None:
            pass

        def begin_text(self) -> None:
            self.events.append("begin")

        def observe_prompt(self, shadow: ShadowTokens) -> None:
            self.events.append("prompt")

    told = Told()
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    for _ in range(2):
        engine.generate([5, 6], max_new_tokens=8, policy=Policy(told))
    assert told.events == ["begin", "needs", "prompt"] * 2


def test_del_does_the_same_on_every_run_and_auto_does_not(llama: LlamaForCausalLM) -> None:
    for name, equal in (("del", True), ("ls:2-9+del", True), ("auto:cost=layers", False)):
        engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), policy=name)
        runs = [engine.generate([5, 6], max_new_tokens=40, eos_token_id=[], trace=True) for _ in range(2)]
        estimates = [[(record.acceptance, record.threshold) for record in run.trace or ()] for run in runs]
        assert (estimates[0] == estimates[1]) == equal
        assert runs[0].new_tokens == runs[1].new_tokens
