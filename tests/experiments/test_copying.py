"""Texts that teach copying: answers are made of what stands in the prompt, held-out prompts share no words, counts agree."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from bench.datasets import load_prompts
from bench.experiments.__main__ import app
from bench.experiments.copying.accuracy import CopyAccuracy, add_answer, copied_tokens, total
from bench.experiments.copying.copying_tasks import TASKS, CopyingText
from bench.experiments.copying.make_texts import held_out_prompts, training_documents
from bench.experiments.copying.repetition import repetition
from bench.experiments.copying.words import NAMES, PLACES, Material, is_for_held_out
from layerskip_models.training.documents import read_documents
from layerskip_models.training.evaluation import greedy_continuations
from tiny_llama import tiny_llama

PASSAGE = " ".join(f"word{number}" for number in range(200))


def texts(task: str, held_out: bool = False) -> list[CopyingText]:
    return [
        TASKS[task](Material(random=Random(seed), held_out=held_out, passages=[PASSAGE] * (seed % 2)))
        for seed in range(60)
    ]


def test_a_renamed_text_is_the_text_with_the_other_name() -> None:
    asks = (
        r"The same text with (?P<new>\w+) instead of (?P<old>\w+):"
        r"|Replace (?P<old2>\w+) by (?P<new2>\w+) and .*|Write (?P<new3>\w+) wherever the text says (?P<old3>\w+)\."
    )
    renamed = 0
    for text in texts("rename"):
        given, _, ask = text.prompt.strip().rpartition("\n\n")
        source = given.partition("\n")[2]
        found = re.fullmatch(asks, ask)
        if found is None:
            assert text.answer == source + "\n"
            continue
        names = {key.rstrip("23"): value for key, value in found.groupdict().items() if value}
        assert names["old"] in source and names["old"] not in text.answer
        assert text.answer == source.replace(names["old"], names["new"]) + "\n"
        renamed += 1
    assert 20 < renamed < 60


def test_a_quotation_stands_in_the_documents() -> None:
    for text in texts("quote"):
        for quotation in text.answer.rstrip().split("\n\n"):
            assert f"]{quotation}\n\n" in text.prompt
            assert quotation.partition(":")[0].strip() in text.prompt.rpartition("\n\n")[2]  # what was asked about


def test_an_edited_file_differs_from_the_file_in_what_was_asked_for() -> None:
    for text in texts("edit"):
        before = text.prompt.partition("```python\n")[2].partition("```")[0]
        after = text.answer.removesuffix("```\n")
        compile(after, "after", "exec")
        ask = text.prompt.rpartition("```\n\n")[2].partition(" The whole file")[0]
        renaming = re.fullmatch(r"Rename (\w+) to (\w+)\.", ask)
        if renaming:
            assert after == before.replace(*renaming.groups())
        changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
        assert changed
        if not renaming and not ask.startswith("Correct"):
            assert len(changed) == 1


def test_rows_go_on_in_turn() -> None:
    for text in texts("go on"):
        rows = text.answer.splitlines()
        assert set(rows) <= set(text.prompt.splitlines())
        period = len(set(rows))
        given = text.prompt.splitlines()[-period:] + rows
        assert all(row == given[index] for index, row in enumerate(given[period:]))


def test_records_are_the_same_in_both_formats() -> None:
    for text in texts("reformat"):
        before = text.prompt.partition(":\n\n")[2].partition("\nThe same records as ")[0]
        assert records(before) == records(text.answer)


def records(text: str) -> list[dict[str, str]]:
    lines = text.strip().splitlines()
    if lines[0].startswith("{"):
        return [json.loads(line) for line in lines]
    if lines[0].startswith("- "):
        return [dict(part.split(": ") for part in line[2:].split(", ")) for line in lines]
    if lines[0].startswith("|"):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]
        return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]
    return list(csv.DictReader(io.StringIO(text.strip())))


def test_a_repetition_repeats() -> None:
    for seed in range(40):
        material = Material(random=Random(seed), held_out=False, passages=[PASSAGE])
        document = repetition(material, ["one", "two", "three", "four"], 60)
        assert re.fullmatch(
            r"(?P<run>.{10,}?)(?P<between> |\n+| \| |\. )(?P=run)((?P=between)(?P=run))*", document, re.S
        )
        assert len(document.split()) <= 60 + 6


def test_held_out_prompts_have_other_names_and_words() -> None:
    training = "".join(training_documents(60, 0, [], 0.25, 60))
    prompts = held_out_prompts(30, 0, [])
    assert {prompt.task.removeprefix("copying ") for prompt in prompts} == set(TASKS)
    held_out = "".join(prompt.prompt for prompt in prompts)
    for words in (NAMES, PLACES):
        own = [word for word in words if re.search(rf"\b{word}\b", held_out)]
        assert len(own) > 5 and all(is_for_held_out(word) for word in own)
        assert not [word for word in own if re.search(rf"\b{word}\b", training)]


def test_the_command_writes_the_same_files_again(tmp_path: Path) -> None:
    passages = tmp_path / "text.txt"
    passages.write_text("\n<|endoftext|>\n".join(PASSAGE.replace("word", f"w{part}x") for part in range(12)))
    options = ["--documents", "20", "--prompts", "10", "--seed", "3", "--passages", str(passages)]
    written = []
    for name in ("a", "b"):
        result = CliRunner().invoke(app, ["copying-texts", str(tmp_path / name), *options])
        assert result.exit_code == 0, result.output
        written.append([(tmp_path / name / file).read_text() for file in ("train.txt", "prompts.jsonl")])
    assert written[0] == written[1]
    prompts = load_prompts(tmp_path / "a" / "prompts.jsonl")
    assert len(prompts) == 10 and all(prompt.reference for prompt in prompts)
    documents = list(read_documents(tmp_path / "a" / "train.txt"))
    assert len(documents) == 20
    assert not set(documents) & {f"{prompt.prompt}{prompt.reference}" for prompt in prompts}


def test_passages_that_are_too_short_are_refused(tmp_path: Path) -> None:
    passages = tmp_path / "text.txt"
    passages.write_text("too short\n")
    result = CliRunner().invoke(app, ["copying-texts", str(tmp_path / "out"), "--passages", str(passages)])
    assert result.exit_code == 2
    assert "has no document of 160 words" in result.output


def test_copied_tokens_end_an_ngram_that_was_there_before() -> None:
    #                      answer: 1 2 3 4 (not a copy of 9 1 2 3: 4 follows), then 5
    assert copied_tokens([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 6) == [False, False, False, True, True]
    assert copied_tokens([7, 7, 7, 7, 7, 7], 4) == [True, True]


def test_accuracy_of_what_the_model_would_say_is_whole() -> None:
    model = tiny_llama(num_layers=3)
    prompt = [5, 6, 7, 8]
    answer = greedy_continuations(model, [prompt], 12)[0]
    right, wrong = CopyAccuracy(), CopyAccuracy()
    add_answer(right, model, prompt, answer, own_text=True)
    add_answer(wrong, model, prompt, [(token + 1) % model.config.vocab_size for token in answer], own_text=True)
    assert (right.num_tokens, right.num_right[-1], right.num_own_right, right.num_own_whole) == (12, 12, 12, 1)
    assert len(right.num_right) == 3
    assert wrong.num_right[-1] < 12 and wrong.num_own_whole == 0
    both = asdict(total([right, wrong]))
    assert both["num_tokens"] == 24 and both["num_own_whole"] == 1
    assert both["num_right"] == [a + b for a, b in zip(right.num_right, wrong.num_right)]
    assert both["num_copied"] == right.num_copied + wrong.num_copied


def test_the_command_shows_accuracy_by_task_and_exit(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "task": name, "prompt": "abcabc", "reference": "abc"} for name in ("x", "y")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["copying-accuracy", str(prompts), "--model", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert "How well the answers are copied" in result.output and "exit_layer" in result.output
    prompts.write_text(json.dumps({"id": "x", "task": "x", "prompt": "abc"}) + "\n")
    result = CliRunner().invoke(app, ["copying-accuracy", str(prompts), "--model", str(checkpoint)])
    assert result.exit_code == 2 and "no prompt with an answer" in result.output


@pytest.mark.parametrize("prompt", load_prompts(Path("copying")), ids=lambda prompt: prompt.id)
def test_shipped_copying_prompts_have_answers_made_of_the_prompt(prompt) -> None:
    assert prompt.reference and prompt.reference.strip()
    known = set(re.findall(r"\w+", prompt.prompt))
    assert set(re.findall(r"\w+", prompt.reference)) <= known
