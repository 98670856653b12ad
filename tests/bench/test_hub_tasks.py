"""Tasks from the hub, with the rows as the hub has them but a loader of our own: prompts, examples before them, choices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.commands.run_command import choose_prompts
from bench.hub_tasks import HUB_TASKS, Row, load_hub_task

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


EXTRA = {
    "openai/openai_humaneval": {"task_id": "HumanEval/0", "test": "def check(f):\n", "entry_point": "f"},
    "abisee/cnn_dailymail": {"id": "f00"},
    "EdinburghNLP/xsum": {"id": "123"},
}
"""What else the hub's rows have."""


@pytest.mark.parametrize("name", HUB_TASKS)
def test_rows_of_datasets_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts from `datasets`' own objects, read from local files laid out as the hub's are: a folder per config,
    a Parquet file per split; Spec-Bench as the JSON lines that it is, some with references of another type."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    task = HUB_TASKS[name]
    more = EXTRA.get(task.path, {})
    cache = {"cache_dir": str(tmp_path / "cache")}
    if task.files is not None:
        file = tmp_path / "question.jsonl"
        references: list[dict[str, Any]] = [{}, {"reference": ["4"]}, {"reference": ["b", "c"]}]
        lines = [json.dumps({**row, **references[i % 3]}) for i, row in enumerate(ROWS[task.path])]
        file.write_text("\n".join(lines))
        monkeypatch.setitem(HUB_TASKS, name, replace(task, files=str(file)))  # type: ignore[index]
    else:
        folder = tmp_path / "hub" / (task.config or "default")
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            table = datasets.Dataset.from_list([{**more, **row} for row in load(task.path, task.config, split=split)])
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        (tmp_path / "hub" / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {folder.name}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {folder.name}/{split}-*\n" for split in ("train", "test"))
            + "---\n"
        )
    original = datasets.load_dataset

    def local(path: str, config: str | None, **options: Any) -> Any:
        return original(path if path == "json" else str(tmp_path / "hub"), config, **options, **cache)

    monkeypatch.setattr(datasets, "load_dataset", local)
    prompts = load_hub_task(name, 3)
    expected = load_hub_task(name, 3, load=load)
    assert [(p.id, p.task, p.prompt, p.reference) for p in prompts] == [
        (p.id, p.task, p.prompt, p.reference) for p in expected
    ]


def test_a_repository_with_a_loading_script_is_read_from_its_converted_files() -> None:
    asked = []

    def noting(*arguments: Any, **options: Any) -> Sequence[Row]:
        asked.append(options.get("revision"))
        return load(*arguments, **options)

    for name in ("xsum_summarization", "humaneval"):
        load_hub_task(name, 1, load=noting)
    assert asked == ["refs/convert/parquet", None]
