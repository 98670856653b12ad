"""SmolLM2-135M-Instruct, a real model, used in the ways in which people use one.

The texts are short, so that all of this takes a minute; `-m real` runs it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openai import OpenAI
from pydantic import BaseModel, Field
from transformers import AutoTokenizer, PreTrainedModel

from layerskip_models import from_transformers, load_tokenizer
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.checkpoints.named_models import NAMED_MODELS
from running_server import RunningServer, running_server
from selfspec import SelfSpecGenerator

_MODEL = NAMED_MODELS["smollm2"]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(_MODEL.find() is None, reason=f"{_MODEL.package} is not installed: selfspec get smollm2"),
]
NEAR_TIE = 1e-3
"""Logits that are closer than this may change places between two ways of summing in float32."""
EXIT = 8
QUESTIONS = (
    "What is the capital of France?", "Who wrote Romeo and Juliet?", "Name three primary colours.", "What is 12 times 7?",
    "Explain gravity in one sentence.",
)  # fmt: skip
TEXTS = (
    "The capital of France is", "Once upon a time there was", "Water boils at", "The three laws of motion are",
    "In 1969, the first man",
)  # fmt: skip
CODE = (
    "def fibonacci(n):\n", "def is_prime(n):\n    if n < 2:\n", "import json\n\ndef load(path):\n", "SELECT name FROM",
    "<html>\n<head>\n",
)  # fmt: skip
REPEATING = tuple(
    f"Copy this line: {line}\n{line}\nCopy it again: " for line in
    ("the cat sat on the mat", "3, 1, 4, 1, 5, 9", "https://example.org/a/b", "Öl, Käse, Brot", "日本語の文章")
)  # fmt: skip


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """transformers' model of the numbers in the file, in float32."""
    return load_transformers("smollm2", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def exact(reference: PreTrainedModel) -> SelfSpecGenerator:
    """The same numbers in our engine."""
    return SelfSpecGenerator(from_transformers(reference), load_tokenizer("smollm2"))


@pytest.fixture(scope="module")
def smollm2() -> SelfSpecGenerator:
    """As users get it: layers in 4 bits."""
    return SelfSpecGenerator.from_pretrained("smollm2")


@pytest.fixture(scope="module")
def server(smollm2: SelfSpecGenerator) -> Iterator[RunningServer]:
    with running_server(smollm2, batch_size=4, served_name="smollm2", chat_template=None) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.client() as opened:
        yield opened


@pytest.mark.parametrize("each", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_greedy_texts_are_transformers_own(each: int, exact: SelfSpecGenerator, reference: PreTrainedModel) -> None:
    """Every token is the one of the largest logit, for prompts of four kinds, up to ties that float32 cannot tell apart."""
    prompts = [*map(chat, QUESTIONS[:each]), *TEXTS[:each], *CODE[:each], *REPEATING[:each]]
    found = exact.generate_batch(prompts, max_new_tokens=8, policy=f"ls:{EXIT}-1", batch_size=20)
    assert len(found) == 4 * each
    for result in found:
        text, start = result.sequences, result.stats.num_prompt_tokens
        with torch.no_grad():
            logits = reference(text, use_cache=False, logits_to_keep=text.shape[1] - start + 1).logits[0, :-1]
        chosen = logits.gather(1, text[0, start:, None]).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) < NEAR_TIE


def test_a_text_is_the_same_alone_and_with_others(smollm2: SelfSpecGenerator) -> None:
    prompts: list[Any] = [chat(QUESTIONS[0]), TEXTS[1], CODE[0], REPEATING[4], chat(QUESTIONS[4])]
    together = smollm2.generate_batch(prompts, max_new_tokens=14, policy="copy")
    alone = [smollm2.generate(prompt, max_new_tokens=14, policy="ar") for prompt in prompts]
    assert [result.new_tokens for result in together] == [result.new_tokens for result in alone]


def test_messages_are_written_as_the_tokenizer_writes_them(smollm2: SelfSpecGenerator) -> None:
    conversation = [*chat("Hi"), {"role": "assistant", "content": "Hello!"}, *chat("Who are you?")]
    template = smollm2.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    result = smollm2.generate(conversation, max_new_tokens=1)
    assert result.sequences[0, :-1].tolist() == template
    assert "<|im_start|>system\nYou are a helpful AI assistant named SmolLM" in smollm2.tokenizer.decode(template)


def test_the_tokenizer_is_the_one_that_transformers_finds_but_for_its_split(smollm2: SelfSpecGenerator) -> None:
    path = _MODEL.find()
    assert path is not None
    found, meant = smollm2.tokenizer, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert (found.get_vocab(), found.all_special_ids) == (meant.get_vocab(), meant.all_special_ids)
    for text in (*QUESTIONS, *TEXTS, *REPEATING):
        if not any(letter.isdigit() for letter in text):
            assert found(text)["input_ids"] == meant(text)["input_ids"]
    assert (found.special_tokens_map, found.chat_template) == (meant.special_tokens_map, meant.chat_template)


def test_a_second_turn_reads_only_what_is_new(smollm2: SelfSpecGenerator) -> None:
    # With rows of 8 bits another first token is as likely, and the text another.
    smollm2 = SelfSpecGenerator(smollm2.model.with_rows(16), smollm2.tokenizer)
    first = smollm2.generate(chat("What is the capital of France?"), max_new_tokens=40)
    assert first.text == "The capital of France is Paris."
    follow_up = [*chat("What is the capital of France?"), {"role": "assistant", "content": first.text}]
    second = smollm2.generate([*follow_up, *chat("And of Spain?")], max_new_tokens=10)
    assert second.stats.num_reused_tokens >= first.stats.num_prompt_tokens + first.stats.num_new_tokens - 1


def test_answers_follow_a_json_schema(client: OpenAI) -> None:
    class City(BaseModel):
        city: str = Field(max_length=20)
        capital: bool

    asked: Any = {"messages": chat("Name a large city as JSON."), "response_format": City, "max_tokens": 80}
    answer = client.chat.completions.parse(model="smollm2", temperature=0, **asked).choices[0]
    assert answer.finish_reason == "stop" and isinstance(answer.message.parsed, City)


def test_it_drafts_for_itself_in_eight_bits() -> None:
    """Its numbers in 16 bits, of which the exits are as bad: nearly all drafts in 8 bits are right, and no text changes."""
    generator = SelfSpecGenerator.from_pretrained("smollm2", dtype="bfloat16", prefix_cache=0)
    asked: Any = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_new_tokens": 14}
    plain, drafted = (generator.generate(policy=policy, **asked) for policy in ("ar", "bits:8-4"))
    assert drafted.new_tokens == plain.new_tokens
    assert drafted.stats.num_accepted > 0.8 * drafted.stats.num_drafted
