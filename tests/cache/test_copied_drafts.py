"""Drafts that are copied from the text: exact like any other, and counted by source."""

from __future__ import annotations

import pytest
import torch

from batched_runs import shared_model
from policies import ObservationSpec, Plan, Policy, RoundContext, RoundRecord, StatelessPolicy, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyIndex, CopyStore
from tiny_llama import pool_model, tiny_tokenizer


class Copies(StatelessPolicy):
    """So many tokens in every round in which something can be copied; keeps what it saw."""

    observes = ObservationSpec(copies="needed")

    def __init__(self, copied: int, exit_layer: int | None = None) -> None:
        self._plan = Plan(exit_layer=exit_layer, max_speculations=0, copied=copied)
        self.records: list[RoundRecord] = []

    def plan(self, context: RoundContext) -> Plan:
        return self._plan

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


def test_a_plan_that_copies_and_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="with copied=5, exit_layer must be None, got 2"):
        SelfSpecGenerator(shared_model("plain")).generate([1, 2, 1, 2], policy=Policy(Copies(5, exit_layer=2)))


def test_records_say_what_the_index_would_have_said_of_every_token_before_the_round() -> None:
    copies = Copies(0)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    generator = SelfSpecGenerator(shared_model("plain"))
    tokens = prompt + generator.generate(prompt, max_new_tokens=20, policy=Policy(copies)).new_tokens
    index, expected = CopyIndex(None), []
    index.read(torch.tensor(prompt))
    for token in tokens[len(prompt) : -1]:
        if index.match is not None:
            expected.append((index.match.length, index.match.token == token))
        index.append(token)
    assert [seen for record in copies.records for seen in record.copies] == expected != []


def test_nothing_is_copied_behind_the_budget_or_an_eos() -> None:
    _, engine = pool_model(3, torch.float64)
    policy = Copies(32)
    engine.generate([1, 2, 3, 4, 5, 6, 7, 8] * 2, max_new_tokens=10, policy=Policy(policy), eos_token_id=[8])
    copied = [record.num_copied for record in policy.records]
    assert any(copied) and max(copied) < 9


def test_statistics_by_source() -> None:
    _, engine = pool_model(3, torch.float64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    store = [prompt + engine.generate(prompt, max_new_tokens=30, policy="ar").new_tokens]
    result = engine.generate(prompt, max_new_tokens=30, policy="copy:6", copy_from=store, trace=True)
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
    with pytest.raises(ValueError, match="copy_from changes nothing"):
        generator.generate(prompt, copy_from=[ids], policy="ls:1-3")


def test_what_a_name_cannot_mean() -> None:
    for name, message in {
        "copy:0": "length must be in", "copy:33": "length must be in", "copy:4,min=1": "min must be an integer in",
        "copy:4+ar": "say copy:4 alone", "copy+ls:3-6": "say copy alone, or auto, which copies and drafts",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            parse_policy(name, num_layers=4)
