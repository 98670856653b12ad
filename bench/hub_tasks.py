"""The papers' tasks from the Hugging Face hub, through `datasets`, for people with a network.

Prompts are built as DEL (Entezari Zarch et al. 2025, Appendix B.1) describes: no chat template; CNN/DailyMail summaries with
one example, XSum without, GSM8K and AQuA-RAT with five, examples drawn at random from the training split (the papers'
AQuA-RAT uses five fixed ones by others); HumanEval, WMT14 and Spec-Bench as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.datasets import Prompt

Row = Mapping[str, Any]
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTask:
    """One task. path, config, split: of `datasets.load_dataset`. render: a row as (prompt, answer); shots: how many
    examples stand before it, out of shot_split; files: for a path that reads files; revision: of the repository, where its
    main one holds a loading script, which `datasets` no longer runs. task_of: a row's task, where there are several."""

    path: str
    split: str
    render: Callable[[Row], tuple[str, str | None]]
    config: str | None = None
    shots: int = 0
    shot_split: str = "train"
    files: str | None = None
    revision: str | None = None
    task_of: Callable[[Row], str] | None = None


def _gsm8k(row: Row) -> tuple[str, str | None]:
    return f"Question: {row['question']}\nAnswer:", row["answer"]


def _aqua(row: Row) -> tuple[str, str | None]:
    options = " ".join(f"({option}" if not option.startswith("(") else option for option in row["options"])
    answer = f"{row['rationale']}\nThe answer is {row['correct']}."
    return f"Question: {row['question']}\nAnswer Choices: {options}\nAnswer:", answer


def _summary(article: str, summary: str) -> Callable[[Row], tuple[str, str | None]]:
    return lambda row: (f"Article: {row[article]}\nSummary:", row[summary])


def _continuation(row: Row) -> tuple[str, str | None]:
    words = row["article"].split(" ")
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _translation(row: Row) -> tuple[str, str | None]:
    pair = row["translation"]
    return f"Translate German to English: {pair['de']}\nEnglish:", pair["en"]


HUB_TASKS: Mapping[str, HubTask] = {
    "humaneval": HubTask(
        path="openai/openai_humaneval", split="test", render=lambda row: (row["prompt"], row["canonical_solution"])
    ),
    "gsm8k": HubTask(path="openai/gsm8k", config="main", split="test", render=_gsm8k, shots=5),
    "cnn_dm_summarization": HubTask(
        path="abisee/cnn_dailymail", config="3.0.0", split="test", render=_summary("article", "highlights"), shots=1
    ),
    "cnn_dm_lm": HubTask(path="abisee/cnn_dailymail", config="3.0.0", split="test", render=_continuation),
    "xsum_summarization": HubTask(
        path="EdinburghNLP/xsum", revision="refs/convert/parquet", split="test", render=_summary("document", "summary")
    ),
    "aqua_rat": HubTask(path="deepmind/aqua_rat", config="raw", split="test", render=_aqua, shots=5),
    "wmt14_de_en": HubTask(path="wmt/wmt14", config="de-en", split="test", render=_translation),
    "spec_bench": HubTask(
        path="json", files=SPEC_BENCH, split="train", render=lambda row: (row["turns"][0], None),
        task_of=lambda row: f"spec_bench/{row['category']}",
    ),
}  # fmt: skip


def load_hub_task(
    name: str, num_samples: int, *, seed: int = 0, load: Callable[..., Sequence[Row]] | None = None
) -> list[Prompt]:
    """`num_samples` prompts of a task, drawn by the seed and kept in the data's order; all if there are fewer.

    Of a data set that holds several tasks (`task_of`), `num_samples` of each. load: `datasets.load_dataset` by default.
    Raises ValueError for an unknown name, or where `datasets` is not installed.
    """
    if name not in HUB_TASKS:
        raise ValueError(f"unknown task {name!r}: on the hub there are {', '.join(HUB_TASKS)}")
    task = HUB_TASKS[name]
    load = load or _load_dataset
    more = {"data_files": task.files, "revision": task.revision}
    more = {option: value for option, value in more.items() if value is not None}
    rows = load(task.path, task.config, split=task.split, **more)
    random = Random(seed)
    before = ""
    if task.shots:
        examples = load(task.path, task.config, split=task.shot_split, **more)
        for index in random.sample(range(len(examples)), min(task.shots, len(examples))):
            prompt, answer = task.render(examples[index])
            before += f"{prompt} {answer}\n\n"
    prompts = []
    for index in _draw(rows, task, num_samples, random):
        prompt, answer = task.render(rows[index])
        prompts.append(
            Prompt(
                id=f"{name}/{index}",
                task=name if task.task_of is None else task.task_of(rows[index]),
                prompt=before + prompt,
                reference=answer,
                source=task.path if task.files is None else task.files,
            )
        )
    return prompts


def _draw(rows: Sequence[Row], task: HubTask, num_samples: int, random: Random) -> list[int]:
    groups: dict[str, list[int]] = {}
    for index in range(len(rows)):
        groups.setdefault("" if task.task_of is None else task.task_of(rows[index]), []).append(index)
    return [i for group in groups.values() for i in sorted(random.sample(group, min(num_samples, len(group))))]


def _load_dataset(*arguments: Any, **options: Any) -> Sequence[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            "tasks from the hub need the package datasets: pip install 'selfspec[tasks]' (or give --prompts)"
        ) from None
    rows: Sequence[Row] = load_dataset(*arguments, **options)
    return rows
