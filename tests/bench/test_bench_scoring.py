"""Scores by hand: final numbers, letters, ROUGE; what is not scored; where an answer ends."""

from __future__ import annotations

import pytest
import torch

from bench.datasets import EncodedPrompt, Prompt, load_prompts
from bench.scoring import Scorer, final_choice, final_number, metric_of, rouge, score, until_next_example
from tiny_llama import tiny_tokenizer


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
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    encoded = EncodedPrompt(id="1", task="t", ids=torch.tensor([1]), origin=prompt("abcd", metric="rouge"))
    scorer = Scorer(tokenizer)
    expected = scorer(encoded, words)
    assert expected is not None
    assert scorer(encoded, [*words, tokenizer.eos_token_id, *words]) == expected
    assert scorer(EncodedPrompt(id="1", task="t", ids=torch.tensor([1])), words) is None


def test_shipped_references_are_scored() -> None:
    """Their own references get full marks."""
    scored = [each for each in load_prompts() if metric_of(each) is not None]
    assert {each.task for each in scored} == {"math", "translation"}
    for each in scored:
        assert each.reference is not None
        assert set((score(each, f" {each.reference}") or {}).values()) == {1.0}
