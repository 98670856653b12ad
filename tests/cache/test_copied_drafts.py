"""Drafts that are copied from the text: exact like any other, cut by the exit, counted by source."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from batched_runs import LAYOUTS, shared_model
from decoding import decode
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from policies import (
    CopiedRow,
    NeverStop,
    ObservationSpec,
    Plan,
    Policy,
    RoundContext,
    RoundRecord,
    StatelessPolicy,
    parse_policy,
)
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from selfspec.pacer.inference import PreVerification
from tiny_llama import VOCAB_SIZE, WORDS, pool_model, request_for, tiny_tokenizer

COPYING = tuple(name for name in EVERY_POLICY if "copy" in name)
EXAMPLES = 30


class Copies(StatelessPolicy):
    """So many tokens in every round in which something can be copied, at this exit layer; keeps what it saw."""

    observes = ObservationSpec(copies="needed", confidence=True)

    def __init__(self, copied: int, exit_layer: int | None = None, drafts: int = 0) -> None:
        self._plan = Plan(exit_layer=exit_layer, max_speculations=drafts, copied=copied)
        self.contexts: list[RoundContext] = []
        self.records: list[RoundRecord] = []

    def plan(self, context: RoundContext) -> Plan:
        self.contexts.append(context)
        return self._plan

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


class KeepsSome(NeverStop):
    """Keeps the first so many copied tokens, whatever the exit says, and notes what it was asked."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, 0
        self.asked: list[CopiedRow] = []

    def start_round(self, plan: Plan) -> None:
        self._kept = 0

    def keep_copied(self, row: CopiedRow) -> bool:
        self.asked.append(row)
        self._kept += 1
        return self._kept <= self._most


def repeating(random: Random) -> list[int]:
    """A prompt in which pieces come again."""
    pieces = [[random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 7))] for _ in range(3)]
    return [token for _ in range(random.randint(2, 6)) for token in random.choice(pieces)]


def decoded(policy: Policy, prompt: list[int], new: int = 24, store: CopyStore | None = None) -> Sequence:
    model = shared_model("plain")
    request = replace(request_for(model, prompt, max_new_tokens=new), copy_from=store)
    text = Sequence(model, KVCache(model, len(prompt) + new), request, policy)
    with torch.inference_mode():
        for _ in decode(text, EagerRunner(model)):
            pass
    return text


def test_the_exit_cuts_a_copy_where_the_policy_says() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    plain = decoded(parse_policy("ar", num_layers=4), prompt)
    store = CopyStore([plain.tokens[0, : plain.length].tolist()])
    for most in (0, 2, 5):
        exit_policy, stopping = Copies(5, exit_layer=2, drafts=2), KeepsSome(most)
        decoded(Policy(exit_policy, stopping), prompt, store=store)
        first = exit_policy.records[0]
        assert exit_policy.contexts[0].match_length >= 8
        assert (first.num_tried, first.num_copied) == (5, most)
        assert first.num_drafted == most + 2
        asked = stopping.asked[: min(most + 1, 5)]
        lengths = [row.match_length for row in asked]
        assert lengths == [*range(lengths[0], lengths[0] + len(asked))]
        assert all(row.exit_layer == 2 and row.confidence is not None for row in asked)


def test_without_a_stopping_policy_the_copy_ends_where_the_exit_disagrees() -> None:
    """With a store that holds what exit 2 says, nothing is cut; what the others hold is."""
    exit_policy = Copies(6, exit_layer=2)
    decoded(Policy(exit_policy), [3, 3, 9, 3, 3], 30)
    assert any(record.num_copied < record.num_tried for record in exit_policy.records)
    for record in exit_policy.records:
        assert record.exit_layer in (2, None)
        assert record.num_drafted == record.num_copied or record.num_tried == 0


def test_records_say_what_the_index_would_have_said_of_every_token() -> None:
    exit_policy = Copies(0)
    text = decoded(Policy(exit_policy), [1, 2, 3, 1, 2, 3, 1, 2], 20)
    tokens = text.tokens[0, : text.length].tolist()
    index = type(text.copies)(None)  # type: ignore[misc]
    index.read(torch.tensor(tokens[:9]))
    expected = []
    for token in tokens[9:]:
        if index.match is not None:
            expected.append((index.match.length, index.match.token == token))
        index.append(token)
    assert [seen for record in exit_policy.records for seen in record.copies] == expected
    assert expected


def test_nothing_is_copied_behind_the_budget_or_an_eos() -> None:
    class Watches(Copies):
        def observe(self, record: RoundRecord) -> None:
            super().observe(record)
            assert record.num_tried < 9

    _, engine = pool_model(3, torch.float64, "eager")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    policy = Watches(32)
    engine.generate(prompt, max_new_tokens=10, policy=Policy(policy), eos_token_id=[8])
    assert any(record.num_tried for record in policy.records)


def test_statistics_by_source() -> None:
    _, engine = pool_model(3, torch.float64, "eager")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    store = [prompt + engine.generate(prompt, max_new_tokens=30, policy="ar").new_tokens]
    result = engine.generate(prompt, max_new_tokens=30, policy="copy:6+ls:1-2", copy_from=store, trace=True)
    assert result.trace is not None
    stats = result.stats
    assert stats.num_copied == sum(min(r.num_copied, r.counted_drafts[0]) for r in result.trace) > 0
    assert 0 < stats.num_copied_accepted <= min(stats.num_copied, stats.num_accepted)
    assert stats.num_copied <= stats.num_drafted


def test_texts_to_copy_from_are_texts_ids_or_a_store() -> None:
    model = shared_model("plain")
    generator = SelfSpecGenerator(model, tiny_tokenizer())
    said = generator.generate([5, 6], max_new_tokens=30, policy="ar")
    prompt = [5, 6, *said.new_tokens[:3]]
    ids = said.sequences[0].tolist()
    alike = []
    for source in ([ids], [tiny_tokenizer().decode(ids)], CopyStore([ids])):
        result = generator.generate(prompt, max_new_tokens=20, policy="copy:8", copy_from=source)
        assert result.new_tokens == said.new_tokens[3:23]
        alike.append((result.stats.rounds, result.stats.num_accepted))
    assert alike[0] == alike[2] and alike[0][0] < 5
    with pytest.raises(TypeError, match="copy_from"):
        generator.generate(prompt, copy_from="one text", policy="copy:8")
    captured = SelfSpecGenerator(model, tiny_tokenizer(), runner="captured")
    with pytest.raises(ValueError, match=r'copy_from changes nothing.*runner="eager"'):
        captured.generate(prompt, copy_from=[ids], policy="auto:cost=layers")
    with pytest.raises(ValueError, match="copy_from changes nothing"):
        generator.generate(prompt, copy_from=[ids], policy="ls:1-3")
    assert WORDS


def test_rows_that_a_draft_left_behind_are_forgotten() -> None:
    cache = KVCache(shared_model("plain"), 10)
    cache.extend(0, 4, 3)
    cache.extend(0, 2, 5)
    cache.forget(2, 4)
    assert cache.position(0, 2) == 4 and cache.position(2, 4) == 3
    with pytest.raises(ValueError, match="rows must be in"):
        cache.forget(2, 5)
    with pytest.raises(ValueError, match="different numbers"):
        cache.forget(4, 1)


def record_of(copied: int, drafts: int, accepted: int) -> RoundRecord:
    tokens = tuple(range(accepted + 1))
    return RoundRecord(
        index=0, num_committed_before=5, exit_layer=1, max_speculations=3, draft_tokens=tuple(range(copied + drafts)),
        num_accepted=accepted, tokens=tokens, loaded_layers=4, stop_cause="cap", confidences=(0.5,) * drafts,
        acceptance_probabilities=tuple([1.0] * accepted), num_copied=copied, num_tried=copied,
    )  # fmt: skip


def test_a_policy_sees_its_own_drafts_alone() -> None:
    own = record_of(copied=3, drafts=2, accepted=4).without_copies
    assert (own.draft_tokens, own.num_accepted, own.tokens) == ((3, 4), 1, (3, 4))
    assert own.acceptance_probabilities == (1.0,) and own.confidences == (0.5, 0.5)
    lost = record_of(copied=3, drafts=2, accepted=1).without_copies  # nobody knows what became of its drafts
    assert (lost.draft_tokens, lost.num_accepted, lost.confidences) == ((), 0, None)
    plain = record_of(copied=0, drafts=2, accepted=1)
    assert plain.without_copies is plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("copy:0", "length must be in"), ("copy:33", "length must be in"), ("copy:4,min=1", "min must be an integer in"),
        ("copy:4+ar", "say copy:4 alone"), ("copy+copy:3", "say copy alone"), ("copy+", "unknown policy"),
    ],
)  # fmt: skip
def test_what_a_name_cannot_mean(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(name, num_layers=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rule_that_looks_back_sees_the_copied_rows(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind a copy look back at its rows, which are not committed yet, and later at what replaced them."""
    model, empty, estimate = shared_model(layout), HiddenStates._empty, PreVerification.estimate
    monkeypatch.setattr(HiddenStates, "_empty", lambda self, *shape: empty(self, *shape).fill_(torch.nan))
    seen: list[tuple[Tensor, list[float]]] = []

    def watched(self: PreVerification, context: Any, layer: int, position: int, first: int, *rest: Any) -> list[float]:
        estimates = estimate(self, context, layer, position, first, *rest)
        rows = context.rows(layer, 0, position - first + 1).clone()
        expected = PreVerification(self.network)  # which knows nothing of earlier rounds
        if first == 1:
            assert estimate(expected, context, layer, position, first, *rest) == pytest.approx(estimates, abs=1e-5)
        seen.append((rows, estimates))
        return estimates

    monkeypatch.setattr(PreVerification, "estimate", watched)
    behind_copies = 0
    for seed in range(6):
        random = Random(seed)
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(5)] * 4
        policy = named_policy("ls:2-6+pacer:random,b=2,t=0.05", 2, model)
        copying = Policy(Copies(2, exit_layer=2, drafts=5), policy.stopping)
        result = SelfSpecGenerator(model).generate(prompt, max_new_tokens=30, policy=copying, trace=True)
        assert result.trace is not None
        behind_copies += sum(0 < r.num_copied < r.num_drafted for r in result.trace)
    assert behind_copies > 5
    assert all(bool(rows.isfinite().all()) and all(map(math.isfinite, given)) for rows, given in seen)
