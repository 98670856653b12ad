"""A paper's prompts, from the hub's data sets or from files at hand, in the words of its preset. None is ever cut.

A task of a preset names a data set (`dataset`, `configs`, `split`), how many rows it takes of each configuration (`samples`:
the first ones, or with `seed` a random choice), a `template` that a row's fields fill, and `shots`: examples before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from bench.datasets import group_by_task, load_prompts
from layerskip_models.text_files import json_lines

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


def paper_prompts(tasks: Mapping[str, Task], source: str, most: int | None) -> dict[str, list[PaperPrompt]]:
    """Return the prompts of each task; none of one that a folder has no file of.

    source: a folder with a file a task, "hub" or "shipped". most: prompts of a task, None for the paper's number.
    Raises ValueError for a folder that is missing or has no task's file, and where the hub cannot be read.
    """
    if source not in (HUB, SHIPPED) and not Path(source).is_dir():
        raise ValueError(f"--prompts: there is no folder {source}; one has files such as {next(iter(tasks))}.jsonl")
    shipped = group_by_task(load_prompts())
    found: dict[str, list[PaperPrompt]] = {}
    for name, task in tasks.items():
        if source == SHIPPED:
            own = shipped.get(task.get("stand_in", ""), [])
            found[name] = [PaperPrompt(id=one.id, task=name, turns=(one.prompt,)) for one in own][:most]
        else:
            parts = [_part(name, task, source, config, most) for config in task.get("configs", [None])]
            found[name] = [one for turn in zip_longest(*parts) for one in turn if one is not None][:most]
    if not any(found.values()):
        raise ValueError(f"--prompts: {source} has a file of none of the tasks {', '.join(tasks)} (TASK.jsonl[.gz])")
    return found


def _part(name: str, task: Task, source: str, config: str | None, most: int | None) -> list[PaperPrompt]:
    """Make the prompts of one configuration."""
    rows = _rows(name, task, source, config, task["split"])
    ready = bool(rows) and {"prompt", "task"} <= {*rows[0]}  # prompts as they are to be, not rows of the hub
    if ready:
        task = {**task, "template": "{prompt}", "reference": "reference", "shots": None}
        rows = [row for row in rows if len(task.get("configs", [])) < 2 or f"/{config}/" in row["id"]]
    if count := task.get("words"):  # language modelling: an article's first words
        field = "prompt" if ready else "article"
        rows = [{**row, field: " ".join(row[field].removeprefix("Article: ").split()[:count])} for row in rows]
    shots = _shots(name, task, source, config) if rows and task.get("shots") else ""
    made = []
    for place in _places(len(rows), task["samples"] if most is None else min(most, task["samples"]), task.get("seed")):
        first, *others = _filled(task["template"], task, rows[place])
        own = "/".join(filter(None, (name, config, str(place))))
        reference = rows[place].get(task.get("reference", ""))
        made.append(PaperPrompt(id=own, task=name, turns=(shots + first, *others), reference=reference))
    return made


def _shots(name: str, task: Task, source: str, config: str | None) -> str:
    """Write the examples before a prompt. Raises ValueError if there are too few."""
    wanted = task["shots"]
    rows = _rows(name, task, source, config, wanted["split"])
    places = wanted.get("rows") or _places(len(rows), wanted["count"], wanted.get("seed"))
    if len(rows) <= max(places, default=0) or len(places) < wanted["count"]:
        raise ValueError(f"{name} needs {wanted['count']} examples; its split {wanted['split']} has {len(rows)} rows")
    return "".join(_filled(wanted["template"], task, rows[place])[0] for place in places)


def _filled(template: str, task: Task, row: Row) -> list[str]:
    """Fill a template with a row's fields; a field that is a list becomes lines, or turns where it is all of the template."""
    fields = {**row, **row.get("translation", {})}
    if isinstance(turns := fields.get(template.strip("{}")), list):
        return turns
    fields |= {field: " ".join(fields[field].split()) for field in task.get("one_line", []) if field in fields}
    lists = {name: task.get("joint", "\n").join(value) for name, value in fields.items() if isinstance(value, list)}
    return [template.format_map({**fields, **lists})]


def _places(available: int, count: int, seed: int | None) -> Sequence[int]:
    if seed is None or count >= available:
        return range(min(count, available))
    return sorted(Random(seed).sample(range(available), count))


def _rows(name: str, task: Task, source: str, config: str | None, split: str) -> list[Row]:
    """Read a split from the hub, or from TASK[.CONFIG][.SPLIT].jsonl[.gz]; the split is named for examples alone."""
    if source == HUB:
        try:
            load_dataset = import_module("datasets").load_dataset  # an optional package
        except ImportError:
            raise ValueError("the hub needs the package datasets: install it, or give --prompts FOLDER") from None
        try:
            return list(load_dataset(task["dataset"], config, split=split))
        except Exception as error:  # of any of the libraries beneath it
            raise ValueError(f"{task['dataset']}: {str(error).splitlines()[0]}; --prompts FOLDER reads files") from None
    middle = f".{config}" if len(task.get("configs", [])) > 1 else ""
    stems = [f"{name}{middle}", name, task.get("file", name)] if split == task["split"] else [f"{name}{middle}.{split}"]
    paths = [Path(source) / f"{stem}.jsonl{end}" for stem in stems for end in ("", ".gz")]
    path = next(filter(Path.is_file, paths), None)
    return [] if path is None else [row for _, row in json_lines(path)]
