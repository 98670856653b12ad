"""A text ends at the first stop, to the exact token, wherever in a round it falls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxTimeCriteria

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator, custom_generate
from selfspec.engine.sequence import Sequence
from selfspec.engine.stopping import StopConditions
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


class StopAtLength(StoppingCriteria):
    """Holds once the text has some length; writes down every prefix it is shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


def conditions(**changes: Any) -> StopConditions:
    options: dict[str, Any] = {"eos": frozenset(), "criteria": StoppingCriteriaList(), "max_new_tokens": 100}
    return StopConditions(**{**options, **changes})


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
        ({"criteria": StoppingCriteriaList([StopAtLength(4)])}, 0, (2, "stopping_criteria")),
        ({"criteria": StoppingCriteriaList([MaxLengthCriteria(5)])}, 0, (3, "length")),
        ({"criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])}, 0, (1, "max_time")),
        ({"criteria": StoppingCriteriaList([EosTokenCriteria([13])])}, 0, (4, "eos")),
    ],
)
def test_first_stop(changes: dict[str, Any], num_new: int, expected: tuple[int, str | None]) -> None:
    """A block of tokens 10, 11, 12, 13 behind a text of two."""
    tokens = torch.tensor([[1, 2, 10, 11, 12, 13, 99, 99]])
    assert conditions(**changes).first_stop([10, 11, 12, 13], tokens, 2, num_new) == expected


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float64, seed=3)


@pytest.fixture
def engine(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), tiny_tokenizer(), "ls:2-5")


def test_criteria_see_every_prefix_once(engine: SelfSpecGenerator) -> None:
    criterion = StopAtLength(12)
    result = engine.generate(PROMPT, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion]))
    text = result.sequences[0].tolist()
    assert len(text) == 12
    assert criterion.seen == [text[:length] for length in range(4, 13)]
    assert result.stop_reason == "stopping_criteria"


def test_an_eos_in_the_first_token_makes_no_round(llama: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    first = reference_greedy(llama, PROMPT, max_new_tokens=1)
    result = engine.generate(PROMPT, max_new_tokens=20, eos_token_id=first)
    assert result.new_tokens == first
    assert (result.stats.rounds, result.stop_reason) == (0, "eos")


def test_the_tokenizers_end_token_ends_a_text_as_well(llama: LlamaForCausalLM) -> None:
    """Alone, in a batch and in transformers' generate. A call or its own configuration that names others has only those."""
    free = reference_greedy(llama, PROMPT, max_new_tokens=20)
    ends = sorted({*free}, key=free.index)[-2:]
    tokenizer, model = tiny_tokenizer(), copy.deepcopy(llama)
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


def test_a_drafted_eos_ends_drafting_and_is_kept(llama: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    """No draft holds anything behind an EOS, and rounds that met one say so."""
    free = reference_greedy(llama, PROMPT, max_new_tokens=20)
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
    assert met > 0


def test_stop_strings_need_a_tokenizer(llama: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"))
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate(PROMPT, stop_strings="a")


class Touched(TorchDispatchMode):
    """Notes the memory that operations read or write while the stop conditions are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looking = False
        self.operations = 0
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.looking:
            self.operations += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.memory |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return func(*args, **(kwargs or {}))


def test_criteria_never_look_at_the_device_s_tokens(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings, a time limit and a criterion of one's own are decided on a copy of the text in the host's memory."""
    touched, tokens = Touched(), []
    first_stop, piece = StopConditions.first_stop, Sequence.next_piece

    def watched(self: StopConditions, block: Any, text: Any, *rest: Any) -> Any:
        touched.looking = True
        assert text is not None
        assert text.device == torch.device("cpu")
        try:
            return first_stop(self, block, text, *rest)
        finally:
            touched.looking = False

    def noted(self: Sequence, *most: int) -> Any:
        tokens.append(self.tokens)
        return piece(self, *most)

    monkeypatch.setattr(StopConditions, "first_stop", watched)
    monkeypatch.setattr(Sequence, "next_piece", noted)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), tiny_tokenizer(), "ls:2-5")
    criterion = StopAtLength(20)
    with touched:
        result = engine.generate(
            PROMPT,
            generation_config=GenerationConfig(max_time=1000.0, max_new_tokens=30),
            stop_strings="figfigfigfig",
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
    text = result.sequences[0].tolist()
    assert criterion.seen == [text[:length] for length in range(4, 21)]
    assert touched.operations > 50
    assert tokens[0].untyped_storage().data_ptr() not in touched.memory
