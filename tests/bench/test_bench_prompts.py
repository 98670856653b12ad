"""Prompts of files, shipped and from the hub, and scores of answers by hand."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commands.run_command import choose_prompts
from bench.datasets import EncodedPrompt, Prompt, digest, encode_prompts, load_prompts, select_prompts
from bench.hub_tasks import HUB_TASKS, Row, load_hub_task
from bench.scoring import Scorer, final_choice, final_number, metric_of, rouge, score, until_next_example
from tiny_llama import tiny_tokenizer


def write_lines(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_shipped_prompts_cover_four_kinds_at_the_length_that_is_measured():
    prompts = load_prompts()
    assert set(Counter(prompt.task for prompt in prompts)) == {"code", "math", "english", "translation"}
    assert min(Counter(prompt.task for prompt in prompts).values()) >= 3
    assert all(650 <= len(prompt.prompt) <= 1150 for prompt in prompts)  # about 300 tokens of a 4k vocabulary
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.source for prompt in prompts)
    assert not any(prompt.prompt.endswith(" ") for prompt in prompts)  # the next word brings its own space


def test_shipped_prompts_that_copy_are_used_where_they_are_named():
    copying = load_prompts(Path("copying"))
    assert len(copying) >= 16
    assert {prompt.task for prompt in copying} == {"copying"}
    assert not {prompt.id for prompt in copying} & {prompt.id for prompt in load_prompts()}
    assert choose_prompts([], ["copying", "math"], 2)[:2] == copying[:2] == choose_prompts([Path("copying")], [], 2)
    assert load_prompts(Path("math")) == [prompt for prompt in load_prompts() if prompt.task == "math"]


def test_a_file_goes_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").write_text(json.dumps({"id": "a", "task": "x", "prompt": "two"}) + "\n")
    assert [prompt.id for prompt in load_prompts(Path("math"))] == ["a"]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_a_file_is_read_in_order(tmp_path, name):
    rows = [
        {"id": "b", "task": "x", "prompt": "für\n", "reference": None, "source": "s"},
        {"id": "a", "task": "x", "prompt": "two", "reference": "r"},
    ]
    assert load_prompts(write_lines(tmp_path / name, *rows)) == [
        Prompt(id="b", task="x", prompt="für\n", source="s"),
        Prompt(id="a", task="x", prompt="two", reference="r"),
    ]


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
    with pytest.raises(ValueError, match="num_samples must be >= 1"):
        select_prompts(prompts, 0)


def test_long_prompts_keep_their_end_and_the_digest_sees_every_token():
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id="1", task="t", prompt="abcdefgh"), Prompt(id="2", task="t", prompt="cd")]
    encoded = encode_prompts(prompts, tokenizer, 4)
    assert [tokenizer.decode(prompt.ids) for prompt in encoded] == ["efgh", "cd"]
    assert digest(encoded) == digest(encode_prompts(prompts, tokenizer, 4))
    assert digest(encoded) != digest(encode_prompts(prompts, tokenizer, 3))


ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/openai_humaneval": [{"prompt": f"def f{i}():\n", "canonical_solution": "    pass\n"} for i in range(9)],
    "openai/gsm8k": [{"question": f"How many {i}?", "answer": f"{i}\n#### {i}"} for i in range(9)],
    "abisee/cnn_dailymail": [{"article": f"One two three {i}", "highlights": f"Sum {i}"} for i in range(9)],
    "EdinburghNLP/xsum": [{"document": f"Doc {i}", "summary": f"Sum {i}"} for i in range(9)],
    "deepmind/aqua_rat": [
        {"question": f"What is {i}?", "options": ["A)1", "B)2"], "rationale": f"It is {i}.\nA", "correct": "A"}
        for i in range(9)
    ],
    "wmt/wmt14": [{"translation": {"de": f"Satz {i}", "en": f"Sentence {i}"}} for i in range(9)],
    "json": [
        {"category": "qa" if i % 2 else "rag", "turns": [f"First {i}", "then"], "question_id": i} for i in range(9)
    ],
}


def load(path: str, config: str | None, *, split: str, **more: Any) -> Sequence[Row]:
    if split == "train" and path != "json":
        return [{name: _marked(value) for name, value in row.items()} for row in ROWS[path]]
    return ROWS[path]


def _marked(value: Any) -> Any:
    return f"train {value}" if isinstance(value, str) else value


EXPECTED = {
    "humaneval": ("def f{}():\n", 0),
    "gsm8k": ("Question: How many {}?\nAnswer:", 5),
    "cnn_dm_summarization": ("Article: One two three {}\nSummary:", 1),
    "cnn_dm_lm": ("One two", 0),
    "xsum_summarization": ("Article: Doc {}\nSummary:", 0),
    "aqua_rat": ("Question: What is {}?\nAnswer Choices: (A)1 (B)2\nAnswer:", 5),
    "wmt14_de_en": ("Translate German to English: Satz {}\nEnglish:", 0),
    "spec_bench": ("First {}", 0),
}


@pytest.mark.parametrize("name", HUB_TASKS)
def test_prompts_are_as_the_papers_have_them(name: str) -> None:
    prompts = load_hub_task(name, 3, load=load)
    ending, shots = EXPECTED[name]
    assert len(prompts) == (6 if name == "spec_bench" else 3)
    for prompt in prompts:
        index = int(prompt.id.rpartition("/")[2])
        assert prompt.prompt.endswith(ending.format(index))
        assert prompt.prompt.count("\n\n") == shots
        assert prompt.prompt.count("train ") >= shots  # examples are not test items
    assert len({prompt.prompt.rpartition("\n\n")[0] for prompt in prompts}) == 1  # the same examples before each
    assert prompts == load_hub_task(name, 3, load=load)
    assert load_hub_task(name, 100, load=load, seed=1)[0].id == f"{name}/0"


def test_kinds_of_spec_bench_are_tasks() -> None:
    prompts = load_hub_task("spec_bench", 2, load=load)
    assert [prompt.task for prompt in prompts] == ["spec_bench/rag"] * 2 + ["spec_bench/qa"] * 2


def test_a_run_takes_them_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.hub_tasks._load_dataset", load)
    prompts = choose_prompts([], ["math", "gsm8k"], 2)
    assert [prompt.task for prompt in prompts] == ["math", "math", "gsm8k", "gsm8k"]


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown task 'gsm9k': on the hub there are humaneval"):
        load_hub_task("gsm9k", 1, load=load)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="need the package datasets"):
        load_hub_task("gsm8k", 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 3 + 4 = <<3+4=7>>7.\n#### 7", 7),
        ("#### $1,250.50 in all", 1250.5),
        ("#### -3", -3),
        ("It costs 12 dollars, or 15 with tax.", 15),
        ("1,000", 1000),
        ("none at all", None),
    ],
)
def test_final_numbers(text: str, number: float | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("First the answer is A, no: the answer is (C).", "C"),
        ("The answer is: B.", "B"),
        (" (D) 12", "D"),
        ("E", "E"),
        ("A man walks", None),
        ("Because of it", None),
    ],
)
def test_final_letters(text: str, letter: str | None) -> None:
    assert final_choice(text) == letter


def test_rouge_by_hand() -> None:
    """the cat sat on the mat / the cat lay on a mat: words the, cat, on, mat: 4 of 6 and 6; pairs "the cat": 1 of 5 and 5."""
    found = rouge("The cat sat on the mat.", "the cat lay on a mat")
    assert found == {"ROUGE-1": pytest.approx(2 / 3), "ROUGE-2": pytest.approx(1 / 5), "ROUGE-L": pytest.approx(2 / 3)}
    # Of unlike length: precision 2/2, recall 2/4. In another order the longest common subsequence is one word.
    assert rouge("b a", "a b c d") == {
        "ROUGE-1": pytest.approx(2 * 1.0 * 0.5 / 1.5),
        "ROUGE-2": 0.0,
        "ROUGE-L": pytest.approx(2 * 0.5 * 0.25 / 0.75),
    }
    # A word counts as often as both have it.
    assert rouge("a a a", "a b")["ROUGE-1"] == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    assert set(rouge("", "a").values()) == set(rouge("a", "?!").values()) == {0.0}
    assert set(rouge("Same, words!", "same words").values()) == {1.0}


def prompt(reference: str | None, text: str = "Question: x\nAnswer:", metric: str | None = None) -> Prompt:
    return Prompt(id="1", task="t", prompt=text, reference=reference, metric=metric)


@pytest.mark.parametrize(
    ("reference", "metric"),
    [
        (None, None),
        ("so 17\n#### 17", "number"),
        ("294", "number"),
        ("It takes 5 minutes. The answer is A.", "choice"),
        ("Pawnbrokers shine in Singapore in 2015", "rouge"),
        ("    return number % 1.0\n", None),
        ("def square(a):\n  return a * a", None),
    ],
)
def test_the_metric_is_that_of_the_reference(reference: str | None, metric: str | None) -> None:
    assert metric_of(prompt(reference)) == metric


def test_a_prompt_can_name_its_metric() -> None:
    assert metric_of(prompt("42 people", metric="rouge")) == "rouge"
    assert metric_of(prompt("42", metric="none")) is None


def test_an_answer_ends_where_the_next_example_begins() -> None:
    text = " 4\n#### 4\n\nQuestion: And now?\nAnswer: #### 5"
    assert until_next_example("Question: x\nAnswer:", text) == " 4\n#### 4\n"
    assert until_next_example("Once upon a time", text) == text
    assert score(prompt("#### 4"), text) == {"exact match": 1.0}
    assert score(prompt("#### 5"), text) == {"exact match": 0.0}
    assert score(prompt("The answer is B."), " so the answer is B.\nQuestion: the answer is C") == {"exact match": 1.0}


def test_of_several_answers_the_nearest_counts() -> None:
    assert score(prompt("purple | red house"), " red house") == dict.fromkeys(("ROUGE-1", "ROUGE-2", "ROUGE-L"), 1.0)
    assert score(prompt(None), " red house") is None


def test_tokens_are_scored_up_to_the_first_eos() -> None:
    tokenizer = tiny_tokenizer()
    words = tokenizer("abcd")["input_ids"]
    encoded = EncodedPrompt(id="1", task="t", ids=torch.tensor([1]), origin=prompt("abcd", metric="rouge"))
    scorer = Scorer(tokenizer, [0, 7])
    expected = scorer(encoded, words)
    assert expected is not None
    for end in (0, 7):
        assert scorer(encoded, [*words, end, *words]) == expected
    assert scorer(EncodedPrompt(id="1", task="t", ids=torch.tensor([1])), words) is None


def test_shipped_references_are_scored() -> None:
    """Their own references get full marks."""
    scored = [each for each in load_prompts() if metric_of(each) is not None]
    assert {each.task for each in scored} == {"math", "translation"}
    for each in scored:
        assert each.reference is not None
        assert set((score(each, f" {each.reference}") or {}).values()) == {1.0}
