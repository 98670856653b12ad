import gzip

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from layerskip_models.training.documents import (
    DataSource,
    block,
    block_order,
    is_held_out,
    num_blocks,
    pack_streams,
    parse_data_source,
    read_documents,
    split_document,
    split_sources,
    train_tokenizer,
)

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


def test_held_out_share():
    share = np.mean([is_held_out(f"document {index}", 0.1) for index in range(5000)])
    # standard deviation sqrt(.1 * .9 / 5000) = .0042
    assert share == pytest.approx(0.1, abs=0.02)
    assert not is_held_out("document", 0.0)


def test_streams_repeat_by_weight_and_keep_held_out_apart(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(f"alpha {index}" for index in range(200)))
    (tmp_path / "b.txt").write_text("\n<|endoftext|>\n".join(f"beta {index}" for index in range(200)))
    sources = [DataSource(path=tmp_path / "a.txt", weight=2), DataSource(path=tmp_path / "b.txt", weight=0.5)]
    train, held_out = split_sources(sources, (), 0.1)
    streams = pack_streams(train, held_out, tokenizer, seed=0)
    documents = tokenizer.decode(streams.train.tolist()).split("<|endoftext|>")
    kept = tokenizer.decode(streams.held_out.tolist()).split("<|endoftext|>")
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
