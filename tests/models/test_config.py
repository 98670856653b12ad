"""Every argument is checked where it enters, and errors say what to do; a GenerationConfig means what it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from selfspec.engine.request import DEFAULT_MAX_NEW_TOKENS, encode_prompt, make_generator
from tiny_llama import CONTEXT, VOCAB_SIZE, reference_greedy, tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, r"exit_layer must be in \[1, 3\] for this 4-layer model, got 0"),
        ({"exit_layer": 4}, r"exit_layer must be in \[1, 3\] for this 4-layer model, got 4"),
        ({"exit_layer": True}, "exit_layer must be in"),
        ({"num_speculations": -1}, "num_speculations|ls:"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"temperature": -1}, "temperature must be a number of at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": "warm"}, "temperature must be"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": -0.1}, "min_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"seed": 1, "generator": torch.Generator()}, "seed or generator, not both"),
        ({"num_beams": 3}, "num_beams does not apply to self-speculative decoding of one sequence"),
        ({"max_tokens": 3}, "'max_tokens': did you mean max_new_tokens"),
        ({"no_repeat_ngram_size": 3}, "set it in a GenerationConfig"),
        ({"xyzzy": 3}, "'xyzzy'; it takes prompt, messages, max_new_tokens"),
    ],
)
def test_bad_options(engine64: SelfSpecGenerator, options: dict[str, Any], message: str) -> None:
    """Values and names. An unknown name is a TypeError."""
    with pytest.raises((ValueError, TypeError), match=message):
        engine64.generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "empty"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "empty"),
        ([1, VOCAB_SIZE], ValueError, rf"\[0, {VOCAB_SIZE - 1}\].*got {VOCAB_SIZE}"),
        (torch.ones(2, 3, dtype=torch.long), ValueError, r"\[2, 3\]: one text is decoded at a time"),
        (["a bed", "a fig"], TypeError, "list of 2 texts: one text is decoded at a time, call generate for each"),
        (torch.ones(1, 1, 3, dtype=torch.long), ValueError, "shape"),
        (torch.ones(3), TypeError, "integers"),
        ([1.5, 2], TypeError, "list of token ids .* got a list that holds a float"),
        ([True, False], TypeError, "list of token ids"),
        (None, TypeError, "NoneType"),
        ({"input_ids": [1]}, TypeError, r"\['input_ids'\]"),
        ("text", ValueError, "needs a tokenizer"),
    ],
)
def test_bad_prompts(engine64: SelfSpecGenerator, prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine64.generate(prompt)


def test_min_new_tokens_takes_precedence_over_min_length(
    engine64: SelfSpecGenerator, llama64: LlamaForCausalLM
) -> None:
    free = engine64.generate(PROMPT, max_new_tokens=12, eos_token_id=[]).new_tokens
    options: dict[str, Any] = {"max_new_tokens": 12, "min_length": 11, "min_new_tokens": 1, "eos_token_id": free[3]}
    found = engine64.generate(PROMPT, generation_config=GenerationConfig(do_sample=False, **options)).new_tokens
    assert found == reference_greedy(llama64, PROMPT, **options) == free[: free.index(free[3]) + 1]


def test_too_long_says_by_how_much(engine64: SelfSpecGenerator) -> None:
    prompt = [1] * 50
    message = rf"prompt \(50\) \+ max_new_tokens \(20\) = 70 tokens exceed this model's context of {CONTEXT} by 6"
    with pytest.raises(ValueError, match=message):
        engine64.generate(prompt, max_new_tokens=20)
    with pytest.raises(ValueError, match="by 37"):
        engine64.generate([1] * 100)
    with pytest.raises(ValueError, match="max_length=10 leaves no room after a prompt of 50 tokens"):
        engine64.generate(prompt, generation_config=GenerationConfig(max_length=10))


def test_the_default_length_fits_the_context(engine64: SelfSpecGenerator) -> None:
    assert CONTEXT < DEFAULT_MAX_NEW_TOKENS
    assert len(engine64.generate(PROMPT).new_tokens) == CONTEXT - len(PROMPT)
    longer = SelfSpecGenerator(from_transformers(tiny_llama(max_position_embeddings=256), layout="plain"))
    assert len(longer.generate(PROMPT).new_tokens) == DEFAULT_MAX_NEW_TOKENS


def test_the_call_goes_before_the_config_before_the_checkpoint(llama64: LlamaForCausalLM) -> None:
    changed = tiny_llama(dtype=torch.float64, seed=3)
    changed.generation_config.update(repetition_penalty=2.0, max_new_tokens=9)
    engine = SelfSpecGenerator(from_transformers(changed, layout="plain"))
    expected = [
        reference_greedy(llama64, PROMPT, repetition_penalty=penalty, max_new_tokens=length)
        for penalty, length in ((2.0, 9), (1.5, 9), (1.1, 12))
    ]
    config = GenerationConfig(repetition_penalty=1.5)
    assert engine.generate(PROMPT).new_tokens == expected[0]
    assert engine.generate(PROMPT, generation_config=config).new_tokens == expected[1]
    last = engine.generate(PROMPT, generation_config=config, repetition_penalty=1.1, max_new_tokens=12)
    assert last.new_tokens == expected[2]
    assert config.repetition_penalty == 1.5  # not written to
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_every_form_of_a_prompt() -> None:
    prompts: list[Any] = [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([1, 2, 3]).int(),
        "bcd",
    ]
    for prompt in prompts:
        ids = encode_prompt(prompt, tiny_tokenizer(), VOCAB_SIZE)
        assert ids.dtype == torch.int64 and ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="empty"):
        encode_prompt("", tiny_tokenizer(), VOCAB_SIZE)


def test_random_sources() -> None:
    cpu, given = torch.device("cpu"), torch.Generator()
    assert make_generator(1, None, cpu, do_sample=False) is None
    assert make_generator(None, given, cpu, do_sample=True) is given
    seeded = [make_generator(seed, None, cpu, do_sample=True) for seed in (5, 5, None, None)]
    numbers = [torch.rand(1, generator=source).item() for source in seeded]
    assert numbers[0] == numbers[1] and len({*numbers}) == 3
    with pytest.raises(ValueError, match="make it there"):
        make_generator(None, given, torch.device("meta"), do_sample=True)
