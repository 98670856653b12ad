"""Prompts of files and shipped ones, as text and in a chat template."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.commands.run_command import choose_prompts
from bench.datasets import Prompt, chat_prompts, digest, encode_prompts, load_prompts, select_prompts
from tiny_llama import tiny_tokenizer


def write_lines(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_shipped_prompts_cover_four_kinds_at_the_length_that_is_measured():
    prompts = load_prompts()
    counts = Counter(prompt.task for prompt in prompts)
    assert {*counts} == {"code", "math", "english", "translation"} and min(counts.values()) >= 3
    assert all(650 <= len(prompt.prompt) <= 1150 for prompt in prompts)  # about 300 tokens of a 4k vocabulary
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert not any(prompt.prompt.endswith(" ") for prompt in prompts)  # the next word brings its own space


def test_shipped_prompts_that_copy_are_used_where_they_are_named():
    copying = load_prompts(Path("copying"))
    assert len(copying) >= 16
    assert {prompt.task for prompt in copying} == {"copying"}
    assert not {prompt.id for prompt in copying} & {prompt.id for prompt in load_prompts()}
    assert choose_prompts([], ["copying", "math"], 2)[:2] == copying[:2] == choose_prompts([Path("copying")], [], 2)
    assert load_prompts(Path("math")) == [prompt for prompt in load_prompts() if prompt.task == "math"]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz", "math"])
def test_a_file_is_read_in_order_and_goes_before_a_shipped_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": "b", "task": "x", "prompt": "für\n"}, {"id": "a", "task": "x", "prompt": "two"}]
    write_lines(tmp_path / name, rows[0] | {"source": "s"}, rows[1] | {"reference": "ignored"})
    assert load_prompts(Path(name)) == [Prompt(**row) for row in rows]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "b", "task": "x", "prompt": ""}, 'line 2: "prompt" must be'),
        ({"id": 3, "task": "x", "prompt": "p"}, 'line 2: "id" must be'),
        (["b", "x", "p"], "line 2: expected an object"),
        ({"id": "a", "task": "x", "prompt": "p"}, "ids must differ"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    path = write_lines(tmp_path / "p.jsonl", {"id": "a", "task": "x", "prompt": "p"}, row)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_a_few_prompts_cover_all_tasks():
    prompts = [Prompt(id=name, task=name[0], prompt=name) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [prompt.id for prompt in select_prompts(prompts, 5)] == ["a1", "b1", "c1", "a2", "c2"]
    assert len(select_prompts(prompts, 99)) == 6


def test_long_prompts_keep_their_end_and_the_digest_sees_every_token():
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id="1", task="t", prompt="abcdefgh"), Prompt(id="2", task="t", prompt="cd")]
    encoded = encode_prompts(prompts, tokenizer, 4)
    assert [tokenizer.decode(prompt.ids) for prompt in encoded] == ["efgh", "cd"]
    assert digest(encoded) == digest(encode_prompts(prompts, tokenizer, 4))
    assert digest(encoded) != digest(encode_prompts(prompts, tokenizer, 3))


def test_messages_in_a_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id=text, task="t", prompt=text) for text in ("ab", "abcdefgh", "cd")]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}h"
    found = chat_prompts(prompts, tokenizer, 4, 9)
    assert [(prompt.id, tokenizer.decode(prompt.ids)) for prompt in found] == [("ab", "abh"), ("cd", "cdh")]
    with pytest.raises(ValueError, match="no prompt has at most 2 tokens"):
        chat_prompts(prompts, tokenizer, 2, 9)
