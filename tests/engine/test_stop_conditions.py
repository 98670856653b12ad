"""A text ends at the first stop, to the exact token, wherever in a round it falls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxTimeCriteria

from callbacks import StopAt
from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator, custom_generate
from selfspec.engine.sequence import Sequence
from selfspec.engine.stopping import StopConditions
from tiny_llama import reference_greedy, tiny_tokenizer

PROMPT = [5, 1, 7]


@pytest.mark.parametrize(
    ("changes", "num_new", "expected"),
    [
        ({}, 0, (4, None)),
        ({"eos": frozenset({12})}, 0, (3, "eos")),
        ({"eos": frozenset({10, 12})}, 0, (1, "eos")),
        ({"max_new_tokens": 5}, 3, (2, "length")),
        ({"max_new_tokens": 5}, 1, (4, "length")),
        ({"max_new_tokens": 3, "eos": frozenset({12})}, 0, (3, "eos")),  # both at once: transformers calls it finished
        ({"max_new_tokens": 2, "eos": frozenset({12})}, 0, (2, "length")),
        ({"criteria": StoppingCriteriaList([StopAt(4)])}, 0, (2, "stopping_criteria")),
        ({"criteria": StoppingCriteriaList([MaxLengthCriteria(5)])}, 0, (3, "length")),
        ({"criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])}, 0, (1, "max_time")),
        ({"criteria": StoppingCriteriaList([EosTokenCriteria([13])])}, 0, (4, "eos")),
    ],
)
def test_first_stop(changes: dict[str, Any], num_new: int, expected: tuple[int, str | None]) -> None:
    """A block of tokens 10, 11, 12, 13 behind a text of two."""
    tokens = torch.tensor([[1, 2, 10, 11, 12, 13, 99, 99]])
    options: dict[str, Any] = {"eos": frozenset(), "criteria": StoppingCriteriaList(), "max_new_tokens": 100, **changes}
    assert StopConditions(**options).first_stop([10, 11, 12, 13], tokens, 2, num_new) == expected


@pytest.fixture
def engine(llama64: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama64, layout="plain"), tiny_tokenizer(), "ls:2-5")


def test_criteria_see_every_prefix_once(engine: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a copy of the text in the host's memory: on a GPU each look at its tokens would wait for all that runs there."""
    looked, tokens, read = StopConditions.first_stop, Sequence.next_piece, set[int]()

    def watched(self: StopConditions, block: Any, text: Any, *rest: Any) -> Any:
        assert text.device == torch.device("cpu") and text.untyped_storage().data_ptr() not in read
        return looked(self, block, text, *rest)

    def noted(self: Sequence, *most: int) -> Any:
        read.add(self.tokens.untyped_storage().data_ptr())
        return tokens(self, *most)

    monkeypatch.setattr(StopConditions, "first_stop", watched)
    monkeypatch.setattr(Sequence, "next_piece", noted)
    criterion = StopAt(12)
    result = engine.generate(PROMPT, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion]))
    text = result.sequences[0].tolist()
    assert len(text) == 12 and read
    assert criterion.seen == [text[:length] for length in range(4, 13)]
    assert result.stop_reason == "stopping_criteria"


def test_the_tokenizers_end_token_ends_a_text_as_well(llama64: LlamaForCausalLM) -> None:
    """Alone, in a batch and in transformers' generate. A call or its own configuration that names others has only those."""
    free = reference_greedy(llama64, PROMPT, max_new_tokens=20)
    ends = sorted({*free}, key=free.index)[-2:]
    tokenizer, model = tiny_tokenizer(), copy.deepcopy(llama64)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    expected = free[: free.index(ends[0]) + 1]
    for own in (None, ends[1], ends):
        model.generation_config.eos_token_id = own
        generator = SelfSpecGenerator(model, tokenizer, "ls:2-3")
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
        result = generator.generate(PROMPT, **options)
        assert (result.new_tokens, result.stop_reason) == (expected, "eos")
        assert [one.new_tokens for one in generator.generate_batch([PROMPT] * 2, **options)] == [expected] * 2
        assert generator.generate(PROMPT, **options, eos_token_id=[]).new_tokens == free
        for named in ({"eos_token_id": ends[1]}, {"generation_config": GenerationConfig(eos_token_id=ends[1])}):
            assert generator.generate(PROMPT, **options, **named).new_tokens == free[: free.index(ends[1]) + 1]
        loop = custom_generate("ls:2-3", tokenizer=tokenizer)
        ids = torch.tensor([PROMPT, PROMPT])
        found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=loop, **options)
        assert found[:, len(PROMPT) :].tolist() == [expected] * 2


def test_a_drafted_eos_ends_drafting_and_is_kept(llama64: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    free = reference_greedy(llama64, PROMPT, max_new_tokens=20)
    met = 0
    for eos in range(24):
        result = engine.generate(PROMPT, max_new_tokens=20, eos_token_id=eos, trace=True)
        expected = free[: free.index(eos) + 1] if eos in free else free
        assert result.new_tokens == expected
        assert result.trace is not None
        for record in result.trace:
            assert eos not in record.draft_tokens[:-1]
            assert (record.stop_cause == "eos") == (eos in record.draft_tokens[-1:])
            met += record.stop_cause == "eos"
        if eos == free[0]:
            assert (result.stats.rounds, result.stop_reason) == (0, "eos")
    assert met > 0


def test_stop_strings_need_a_tokenizer(llama64: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"))
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate(PROMPT, stop_strings="a")
