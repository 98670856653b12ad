"""Training data of every form: which tokens count, what is cut, what prompts become; the model's own answers."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from layerskip_models import from_transformers
from layerskip_models.training.documents import (
    block,
    block_order,
    num_blocks,
    pack_streams,
    read_documents,
    split_document,
    split_sources,
    train_tokenizer,
)
from layerskip_models.training.examples import Example, examples_of, in_shares, read_examples
from layerskip_models.training.settings import DataSource, FrozenModelSettings, parse_data_source
from selfspec import SelfSpecGenerator
from selfspec.exits.training_texts import TextReader, own_answers
from selfspec.messages import OWN_TEMPLATE, ChatTemplate
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer

TEXT = [
    "def add(left, right):\n    return left + right\n",
    "The quick brown fox jumps over the lazy dog, and the dog looks the other way.\n",
    "12 + 34 = 46\n",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXT * 3, 300).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text() | st.text(alphabet=" \t\n\r\x00\x1f .,'_0aé\u0301\u200b\U0001f600\ufeff"))
@example("  leading,\ttabs \r\n and   trailing  ")
@example("don 't , stop . n't")
@example("\x00\x07\x1b[0m\x7f")
@example("e\u0301 \ufb01 \u212b \U0001f469\u200d\U0001f4bb")
def test_tokenizer_round_trips_any_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_tokenizer_specials_and_digits(tokenizer):
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer.tokenize("\n    return")[0].startswith("ĊĠ")  # a line break and indentation are one token


def test_vocab_size_that_the_text_cannot_give():
    with pytest.raises(ValueError, match=r"vocab_size 5000 is more than this text gives \(\d+ tokens\)"):
        train_tokenizer(TEXT, 5000)
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(TEXT, 256)


def test_data_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b:c.txt").write_text("x")
    assert parse_data_source("a.txt").weight == 1
    assert parse_data_source("a.txt:0.5").weight == 0.5
    assert parse_data_source("b:c.txt").path.name == "b:c.txt"
    with pytest.raises(ValueError, match=r"does not exist: 'none\.txt'"):
        parse_data_source("none.txt")
    with pytest.raises(ValueError, match="above 0"):
        parse_data_source("a.txt:-1")


def test_documents_of_files_and_folders(tmp_path):
    with gzip.open(tmp_path / "one.txt.gz", "wt", encoding="utf-8") as stream:
        stream.write("first\nlines\n<|endoftext|>\nsecond\n<|endoftext|>\n\n<|endoftext|>\n")
    (tmp_path / "two.py").write_text("x = '<|endoftext|>'\n")
    (tmp_path / "three.md").write_text("not text of ours")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "four.py").write_text("left_out = 1\n")
    found = list(read_documents(tmp_path, ["test"]))
    assert found == ["first\nlines\n", "second\n", "x = '<|endoftext|>'\n"]
    assert len(list(read_documents(tmp_path, []))) == 4
    assert list(read_documents(tmp_path, ["test", "*.gz"])) == ["x = '<|endoftext|>'\n"]
    with pytest.raises(ValueError, match=r"must be \.txt, \.txt\.gz or \.py"):
        list(read_documents(tmp_path / "three.md"))
    with pytest.raises(ValueError, match="utf-8"):
        list(read_documents(tmp_path / "latin.py"))


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 40))
def test_pieces_of_a_document_make_it_up(text, max_chars):
    pieces = list(split_document(text, max_chars))
    assert "".join(pieces) == text
    assert all(len(piece) <= max_chars for piece in pieces)


def test_streams_repeat_by_weight_and_keep_held_out_apart(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(f"alpha {index}" for index in range(200)))
    (tmp_path / "b.txt").write_text("\n<|endoftext|>\n".join(f"beta {index}" for index in range(200)))
    sources = [DataSource(path=tmp_path / "a.txt", weight=2), DataSource(path=tmp_path / "b.txt", weight=0.5)]
    train, held_out = split_sources(sources, (), 0.1)
    streams = pack_streams(train, held_out, tokenizer, seed=0)
    documents, kept = (tokenizer.decode(stream.tolist()).split("<|endoftext|>") for stream in streams)
    num_alpha, num_beta = (len(texts) for _, texts in train)
    assert sum(text.startswith("alpha") for text in documents) == 2 * num_alpha
    assert sum(text.startswith("beta") for text in documents) == round(0.5 * num_beta)
    assert documents[-1] == kept[-1] == ""
    assert not set(documents[:-1]) & set(kept[:-1])
    assert len(kept) - 1 == len(held_out) > 0
    (tmp_path / "c.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        split_sources([DataSource(path=tmp_path / "c.txt")], (), 0.1)


def test_blocks_and_their_order():
    stream = np.arange(11, dtype=np.uint32)
    assert num_blocks(stream, 5) == 2
    assert num_blocks(stream, 11) == 0
    assert block(stream, [1, 0], 5).tolist() == [[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5]]
    steps = [block_order(step, 3, 6, seed=7) for step in range(4)]
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(6))  # two passes
    assert block_order(1, 3, 6, seed=7) == steps[1]
    assert [block_order(step, 3, 6, seed=8) for step in range(4)] != steps


TEMPLATE = (
    "{% for m in messages %}{{ ' a' if m.role == 'user' else ' be' }}{{ m.content }}"
    "{{ '.' if m.role == 'assistant' else '' }}\n{% endfor %}{{ ' be' if add_generation_prompt else '' }}"
)
TALK = [
    {"role": "user", "content": "cab"},
    {"role": "assistant", "content": "fig"},
    {"role": "user", "content": "bed"},
    {"role": "assistant", "content": "headfig"},
]


def reader(template: str | None = TEMPLATE, *, length: int = 64, bos: bool = False) -> TextReader:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "."
    if bos:
        tokenizer.bos_token = "\n"
        special = [("\n", tokenizer.convert_tokens_to_ids("\n"))]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="\n $A", special_tokens=special)
    return TextReader(
        tokenizer=tokenizer, template=OWN_TEMPLATE if template is None else ChatTemplate(template), length=length
    )


def words(reader: TextReader, tokens: list[int]) -> str:
    return "".join(reader.tokenizer.convert_ids_to_tokens(tokens))


def talk(messages: list[dict[str, str]]) -> Example:
    return Example(key="", messages=messages)


def scored(reader: TextReader, example: Example) -> list[tuple[str, list[str]]]:
    """Each text that is made of an example, and the parts of it that count."""
    made = reader.texts(example)
    return [(words(reader, one.tokens), [words(reader, one.tokens[a:b]) for a, b in one.scored]) for one in made]


def test_of_a_conversation_the_answers_count_with_their_end() -> None:
    assert scored(reader(), talk(TALK)) == [(" acab\n befig.\n abed\n beheadfig.\n", ["fig.", "headfig."])]
    (text,) = reader().texts(talk(TALK))
    assert text.num_scored == len("fig.headfig.") and not text.own
    assert scored(reader(), talk(TALK[:1])) == []  # without an answer


def test_a_template_that_rewrites_earlier_turns_gives_a_text_for_each_answer() -> None:
    """As those do that drop the thoughts of earlier answers."""
    made = reader(TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last else '' }}"))
    one, other = " acab\n befig.\n", " acab\n be.\n abed\n beheadfig.\n"
    assert scored(made, talk(TALK)) == [(one, ["fig."]), (other, ["headfig."])]


def test_of_a_prompt_with_its_completion_the_completion_counts() -> None:
    example = Example(key="", prompt="cab fig", completion=" a head")
    assert scored(reader(bos=True), example) == [("\ncab fig a head.", [" a head."])]
    with pytest.raises(ValueError, match="--own-answers"):
        reader().texts(Example(key="", prompt="cab"))


def test_a_long_text_is_cut_and_every_piece_begins_as_prompts_do() -> None:
    made = reader(length=5, bos=True)
    texts = made.texts(Example(key="", text="abcdefghij"))
    assert all(len(text.tokens) <= 5 and words(made, text.tokens[:1]) == "\n" for text in texts)
    assert "".join(words(made, text.tokens[1:]) for text in texts) == "abcdefghij."
    assert all(text.scored == [(1, len(text.tokens))] for text in texts)


def test_a_long_conversation_keeps_its_answers() -> None:
    made = reader(length=8)
    (text,) = made.texts(
        talk([{"role": "user", "content": "cab" * 20}, {"role": "assistant", "content": "fighead" * 9}])
    )
    ((first, end),) = text.scored
    assert len(text.tokens) == 8 and (first, end) == (4, 8)
    assert words(made, text.tokens[first:end]) == "figh"


def test_prompts_are_the_questions() -> None:
    made, draw = reader(), np.random.default_rng(0)
    assert [words(made, prompt) for prompt in made.prompts(talk(TALK), 64, draw)] == [
        " acab\n be",
        " acab\n befig.\n abed\n be",
    ]
    assert [words(made, prompt) for prompt in made.prompts(talk(TALK[:3]), 64, draw)][1:] == [
        " acab\n befig.\n abed\n be"
    ]
    assert words(made, made.prompts(talk(TALK), 5, draw)[0]) == "b\n be"
    made = reader(bos=True)
    assert words(made, made.prompts(Example(key="", prompt="cab fig"), 4, draw)[0]) == "\nfig"
    pieces = made.prompts(Example(key="", text="abcdefghij" * 9), 16, draw)
    assert all(2 <= len(piece) <= 16 for piece in pieces)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ('{"question": "a"}', 'expected "messages"'),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
        ('{"prompt": "a", "completion": 3}', "completion must be text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / "data.jsonl", ())


def test_every_form_is_read(tmp_path: Path) -> None:
    lines = [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"messages": TALK}]
    lines.append({"prompt": TALK[:1], "completion": TALK[1:2]})
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as stream:
        stream.write("\n".join(map(json.dumps, lines)))
    found = read_examples(tmp_path / "data.jsonl.gz", ())
    assert [one.messages for one in found] == [None, None, None, TALK, TALK[:2]]
    assert [one.completion for one in found] == [None, "b", None, None, None]
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no text"):
        read_examples(tmp_path / "empty.jsonl", ())


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    data, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"{n}"}) for n in range(60)))
    other.write_text(json.dumps({"text": "elsewhere"}))
    config = FrozenModelSettings(data=(f"{data}:2",), output_dir="out", holdout_fraction=0.3)
    (shares, (kept,)), (_, (trained,)) = (examples_of(config, held_out=part) for part in (True, False))
    assert 5 < len(kept) < 35 and shares == [2.0]
    assert {e.text for e in kept}.isdisjoint(e.text for e in trained) and len(kept) + len(trained) == 60
    apart = replace(config, evaluate_on=(str(other),))
    assert [e.text for e in examples_of(apart, held_out=True)[1][0]] == ["elsewhere"]
    assert len(examples_of(apart, held_out=False)[1][0]) == 60
    with pytest.raises(ValueError, match="raise holdout_fraction"):
        examples_of(replace(config, holdout_fraction=1e-9), held_out=True)


def test_sources_give_their_shares_until_they_are_used_up() -> None:
    mixed = list(in_shares([iter([4] * 9), iter([1] * 9)], [2.0, 1.0], lambda size: size))
    assert mixed[:6] == [4, 1, 1, 4, 1, 1]
    assert sorted(mixed) == [1] * 9 + [4] * 9


def test_own_answers_are_the_models_and_are_not_written_twice(tmp_path: Path) -> None:
    """Sampled ones follow their seeds."""
    llama = tiny_llama(num_layers=4, seed=5, eos_token_id=6, dtype=torch.float64)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), tiny_tokenizer())
    prompts = [[1, 2, 3], [9] * 6, [4, 20], [11, 7, 5, 2], [8]]
    sampled = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        drawn = own_answers(engine, iter([[1, 2]] * 2), tmp_path / name, max_tokens=12, temperature=1.0, seed=seed)
        sampled.append([text.tokens for text in drawn])
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0][0] != sampled[0][1]
    made: list[int] = []

    def answers(count: int) -> list[Any]:
        path = tmp_path / "answers.jsonl"
        return list(own_answers(engine, iter(prompts[:count]), path, max_tokens=9, advance=made.append))

    assert len(answers(3)) == 3
    with (tmp_path / "answers.jsonl").open("a") as stream:
        stream.write('{"prompt": "ab')  # cut short
    texts = answers(5)
    assert len(made) == 5 and len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5
    for prompt, text in zip(prompts, texts):
        assert text.own and text.scored == [(len(prompt), len(text.tokens))]
        assert text.tokens[len(prompt) :] == reference_greedy(llama, prompt, max_new_tokens=9, eos_token_id=6)
    with pytest.raises(ValueError, match="other prompts"):
        list(own_answers(engine, iter([[1]]), tmp_path / "answers.jsonl", max_tokens=9))
