"""A paper's prompts, from the hub's data sets or from files at hand, in the words of its preset. None is ever cut.

A task of a preset names a data set (`dataset`, `configs`, `split`), how many rows it takes (`samples`: the first ones, or with
`seed` a random choice), a `template` that a row's fields fill, and `shots`: examples before it, from a split of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from bench.datasets import group_by_task, load_prompts

Task = Mapping[str, Any]
Row = Mapping[str, Any]
HUB, SHIPPED = "hub", "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPrompt:
    """turns: what a user says, one after another; each but the first follows the answer to the one before it."""

    id: str
    task: str
    turns: tuple[str, ...]
    reference: str | None = None


def paper_prompts(
    tasks: Mapping[str, Task], source: str | None, most: int | None
) -> tuple[list[PaperPrompt], list[str]]:
    """Return the prompts of all tasks, and the names of those that a folder has no file of.

    source: a folder with a file a task, "hub" or "shipped"; None: the hub where the package `datasets` is installed, else the
    shipped ones. most: prompts of a task, None for the paper's number.
    Raises ValueError for a folder that is missing or has no task's file, and where the hub cannot be read.
    """
    if source is None:
        source = HUB if find_spec("datasets") else SHIPPED
    if source not in (HUB, SHIPPED) and not Path(source).is_dir():
        raise ValueError(
            f"--prompts: there is no folder {source}; give one with files such as {next(iter(tasks))}.jsonl"
        )
    shipped = group_by_task(load_prompts())
    found: dict[str, list[PaperPrompt]] = {}
    for name, task in tasks.items():
        count = task["samples"] if most is None else min(most, task["samples"])
        if source == SHIPPED:
            own = shipped.get(task.get("stand_in", ""), [])[:count]
            found[name] = [PaperPrompt(id=one.id, task=name, turns=(one.prompt,)) for one in own]
            continue
        parts = [[*_part(name, task, source, config, count)] for config in task.get("configs", [None])]
        in_turn = [one for several in zip_longest(*parts) for one in several if one is not None]
        found[name] = in_turn if most is None else in_turn[:most]
    prompts = [one for own in found.values() for one in own]
    if not prompts:
        raise ValueError(f"--prompts: {source} has a file of none of the tasks {', '.join(tasks)} (TASK.jsonl[.gz])")
    return prompts, [name for name, own in found.items() if not own]


def _part(name: str, task: Task, source: str, config: str | None, count: int) -> Iterator[PaperPrompt]:
    """Make the prompts of one configuration; none if a folder has no file of it."""
    several = len(task.get("configs", [])) > 1
    rows = _rows(name, task, source, config, task["split"])
    ready = bool(rows) and "prompt" in rows[0] and "task" in rows[0]  # prompts as they are to be, not rows of the hub
    if ready and several:
        rows = [row for row in rows if f"/{config}/" in row["id"]]
    shots = _shots(name, task, source, config) if rows and not ready and "shots" in task else ""
    for place in _chosen(len(rows), count, task.get("seed")):
        row = {**rows[place]}
        if words := task.get("words"):  # language modelling: a text's first words
            field = "prompt" if ready else words["field"]
            row[field] = " ".join(row[field].removeprefix(words["drop"]).split()[: words["count"]])
        texts = row["prompt"] if ready else _filled(task["template"], task, row)
        turns = [texts] if isinstance(texts, str) else texts
        yield PaperPrompt(
            id=f"{name}/{config}/{place}" if several else f"{name}/{place}",
            task=name,
            turns=(shots + turns[0], *turns[1:]),
            reference=row.get("reference" if ready else task.get("reference", "")),
        )


def _shots(name: str, task: Task, source: str, config: str | None) -> str:
    """Write the examples before a prompt. Raises ValueError if there are too few."""
    wanted = task["shots"]
    rows = _rows(name, task, source, config, wanted["split"])
    places = wanted.get("rows") or list(_chosen(len(rows), wanted["count"], wanted.get("seed")))
    if len(rows) <= max(places, default=0) or len(places) < wanted["count"]:
        needed = f"{wanted['count']} examples of its split {wanted['split']}"
        raise ValueError(f"{name} needs {needed}, and there are {len(rows)} rows")
    return "".join(_filled(wanted["template"], task, rows[place]) for place in places)


def _filled(template: str, task: Task, row: Row) -> Any:
    """Fill a template with a row's fields; a list of lines becomes lines, and a template that is one list stays one."""
    fields = {**row, **row.get("translation", {})}
    whole = fields.get(template.strip("{}"))
    if isinstance(whole, list):
        return whole
    for field in task.get("one_line", []):
        fields[field] = " ".join(str(fields[field]).split())
    joined = {
        key: task.get("joint", "\n").join(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    return template.format_map(joined)


def _chosen(available: int, count: int, seed: int | None) -> Sequence[int]:
    if seed is None or count >= available:
        return range(min(count, available))
    return sorted(Random(seed).sample(range(available), count))


def _rows(name: str, task: Task, source: str, config: str | None, split: str) -> list[Row]:
    """Read a split: from the hub, or from TASK[.CONFIG][.SPLIT].jsonl[.gz], the split being named for examples alone."""
    if source == HUB:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(
                "the hub's data sets need the package `datasets`: install it, or give --prompts FOLDER"
            ) from None
        try:
            return list(load_dataset(task["dataset"], config, split=split))
        except Exception as error:  # of any of the libraries beneath it
            raise ValueError(f"{task['dataset']}: {str(error).splitlines()[0]}; --prompts FOLDER reads files") from None
    middle = "" if len(task.get("configs", [])) < 2 else f".{config}"
    ends = [f"{middle}{'' if split == task['split'] else '.' + split}{end}" for end in (".jsonl", ".jsonl.gz")]
    whole = [] if split != task["split"] else [f"{task.get('file', name)}{end}" for end in (".jsonl", ".jsonl.gz")]
    for file in [*(f"{name}{end}" for end in ends), *whole]:
        path = Path(source) / file
        if path.is_file():
            opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
            with opened as stream:
                rows = [json.loads(line) for line in stream if line.strip()]
            return rows
    return []
