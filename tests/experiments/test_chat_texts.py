"""Questions out of plain texts, and conversations with a model's own answers to train on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.experiments.exit_adapters.chat_prompts import held_out_prompts, training_prompts, write_chats
from bench.experiments.exit_adapters.own_chats import own_chats
from layerskip_models import from_transformers
from layerskip_models.training.documents import read_documents
from layerskip_models.training.examples import read_examples
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama, tiny_tokenizer

PARAGRAPH = "It was a long winter, and nobody in the village remembered one that had been colder. " * 4


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = {
        "gsm8k_train": "Question: What is 1 + 1?\nAnswer: 2",
        "mbpp_train": "here is your task: Write a sum. Your code should pass these tests:\n\nassert x\n[BEGIN]\nx",
        "wikitext2_valid_test": f"= Lobster =\n\n{PARAGRAPH}",
        "us_addresses": PARAGRAPH,
        "gutenberg_books": PARAGRAPH,
        "tatoeba_de_en": "Translate German to English: Guten Tag.\nEnglish: Good day.",
    }
    for name, text in texts.items():
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt", encoding="utf-8") as stream:
            stream.write(text)
    return tmp_path


def test_questions_of_all_sources_take_turns(corpus: Path) -> None:
    found = training_prompts(corpus, 8)
    assert found == training_prompts(corpus, 8)  # in the same order whenever it is asked
    assert "Lobster" in found[1]
    assert all(PARAGRAPH.strip() in prompt for prompt in found[2:5])
    assert found[5:] == ["What is 1 + 1?", "Write a sum.", "Translate into English: Guten Tag."]
    assert len({*training_prompts(corpus, 100)}) == 100  # then the topics go on alone


def test_held_out_questions_are_asked_without_their_examples(tmp_path: Path) -> None:
    prompts = {
        "mt_bench": "Write a poem.",
        "qa": "Question: Who was it?\nAnswer:",
        "gsm8k": "Question: One?\nAnswer: 1\n\nQuestion: Two?\nAnswer:",
    }
    for name, prompt in prompts.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as stream:
            stream.write(json.dumps({"prompt": prompt}) + "\n")
    found = held_out_prompts(tmp_path)
    assert found == ["Write a poem.", "Who was it?", "Two?"]
    write_chats(found, tmp_path / "chats.jsonl")
    read = read_examples(tmp_path / "chats.jsonl", ())
    assert [example.messages for example in read] == [[{"role": "user", "content": text}] for text in found]


def test_conversations_are_texts_with_the_models_answers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    generator = SelfSpecGenerator(from_transformers(tiny_llama(), layout="plain"), tokenizer)
    asked = [[{"role": "user", "content": text}] for text in ("abc", "bad", "fig")]
    path = tmp_path / "answers.jsonl"
    found = [*own_chats(generator, asked, path, most_tokens=12, answer_tokens=6, batch_size=2)]
    assert len(found) == 2  # two answers of six tokens are enough
    for text, messages in zip(found, asked):
        answer = generator.generate(messages, max_new_tokens=6, policy="ar", do_sample=False)
        assert text == tokenizer.decode([*tokenizer(messages[0]["content"])["input_ids"], *answer.new_tokens])
    assert [*own_chats(generator, asked, path, most_tokens=12, answer_tokens=6, batch_size=2)] == found  # from the file
    target = tmp_path / "own.txt"
    target.write_text("\n<|endoftext|>\n".join(found) + "\n", encoding="utf-8")
    assert [document.rstrip("\n") for document in read_documents(target)] == [text.rstrip("\n") for text in found]
