"""The tasks whose answers are copied: rename, quote, edit a file, go on with rows, reformat. One function each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from bench.experiments.copying.code_files import code_file
from bench.experiments.copying.words import ADJECTIVES, DAYS, PLACES, THINGS, Material


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingText:
    """A prompt and its answer. The answer goes on where the prompt ends, and holds no more than was asked for."""

    task: str
    prompt: str
    answer: str


def rename(material: Material) -> CopyingText:
    """The same text with another name, or word for word."""
    random = material.random
    old, new = material.names(2)
    text = material.piece(60, 140) if random.random() < 0.3 else None
    if text is None:
        text = material.story(old, 5, 11)
    if old not in text or random.random() < 0.2:
        ask, answer = random.choice(("The same text again:", "Copy the text word for word:", "Repeat the text.")), text
    else:
        ask = random.choice(
            (
                f"The same text with {new} instead of {old}:",
                f"Replace {old} by {new} and leave the rest as it is:",
                f"Write {new} wherever the text says {old}.",
            )
        )
        answer = text.replace(old, new)
    title = random.choice(("Text:", "Letter:", "Story:", "Article:"))
    return CopyingText(task="rename", prompt=f"{title}\n{text}\n\n{ask}\n", answer=answer + "\n")


def quote(material: Material) -> CopyingText:
    """Documents with a title each, and a question that is answered with what one or two of them say."""
    random = material.random
    titles = material.names(random.randint(3, 4))
    documents = {}
    for title in titles:
        text = material.piece(35, 70) if random.random() < 0.3 else None
        documents[title] = text or material.story(title, 3, 6).replace("\n\n", " ")
    given = "\n\n".join(
        f"[{number}] {title}: {text}" for number, (title, text) in enumerate(documents.items(), start=1)
    )
    wanted = random.sample(titles, random.choice((1, 2, 2)))
    ask = random.choice(
        (
            "Question: What do the documents say about {}?\nAnswer:",
            "Question: What is written about {}? Quote the whole text.\nAnswer:",
            "Quote what the documents say about {}.\nAnswer:",
        )
    )
    answer = "\n\n".join(f" {title}: {documents[title]}" for title in wanted)
    prompt = f"Documents:\n\n{given}\n\n{ask.format(' and '.join(wanted))}"
    return CopyingText(task="quote", prompt=prompt, answer=answer + "\n")


def edit(material: Material) -> CopyingText:
    """A small Python file and one change to it; the answer is the whole file after the change."""
    random = material.random
    file = code_file(material)
    kind = random.choice(("rename", "rename", "hint", "typo", "number"))
    text = file.text
    if kind == "rename":
        old, new = random.choice(file.identifiers), material.invented()
        ask, after = f"Rename {old} to {new}.", text.replace(old, new)
    elif kind == "hint":
        function = random.choice(file.functions)
        ask = f"Add the return type int to {function}."
        before = next(line for line in text.splitlines() if line.startswith(f"def {function}("))
        after = text.replace(before, before.removesuffix(":") + " -> int:")
    elif kind == "typo":
        wrong = file.word[:1] + file.word[2:3] + file.word[1:2] + file.word[3:]
        ask, after = f"Correct the word {wrong} to {file.word}.", text
        text = text.replace(file.word, wrong)
    else:
        number = material.number()
        ask, after = f"Change {file.constant} to {number}.", text.replace(f"= {file.constant}\n", f"= {number}\n")
    prompt = f"File {file.name}.py:\n```python\n{text}```\n\n{ask} The whole file after the change:\n```python\n"
    return CopyingText(task="edit", prompt=prompt, answer=after + "```\n")


def go_on(material: Material) -> CopyingText:
    """Rows of a list, a table or records that come back in turn; the answer goes on with them."""
    random = material.random
    rows = _records(material, random.randint(3, 6))
    keys = list(rows[0])
    form = random.choice(("table", "list", "json", "log"))
    if form == "table":
        head, lines = _table(rows)
    elif form == "json":
        lines, head = [json.dumps(row) for row in rows], ""
    elif form == "list":
        lines, head = ["- " + ", ".join(row.values()) for row in rows], f"The {keys[0]} and the {keys[-1]} in turn:\n\n"
    else:
        lines, head = [" ".join(f"{key}={value}" for key, value in row.items()) for row in rows], ""
    given = 2 * len(lines) + random.randrange(len(lines))
    asked = max(len(lines), min(2 * len(lines), 10))
    turn = [lines[index % len(lines)] + "\n" for index in range(given + asked)]
    return CopyingText(task="go on", prompt=head + "".join(turn[:given]), answer="".join(turn[given:]))


def reformat(material: Material) -> CopyingText:
    """Records in one format, and the same records in another."""
    random = material.random
    rows = _records(material, random.randint(4, 8))
    keys = list(rows[0])
    head, lines = _table(rows)
    formats: dict[str, str] = {
        "CSV": f"{','.join(keys)}\n" + "".join(",".join(row.values()) + "\n" for row in rows),
        "JSON lines": "".join(json.dumps(row) + "\n" for row in rows),
        "a table": head + "".join(f"{line}\n" for line in lines),
        "a list": "".join("- " + ", ".join(f"{key}: {value}" for key, value in row.items()) + "\n" for row in rows),
    }
    before, after = random.sample(list(formats), 2)
    prompt = f"The records as {before}:\n\n{formats[before]}\nThe same records as {after}:\n\n"
    return CopyingText(task="reformat", prompt=prompt, answer=formats[after])


def _table(rows: list[dict[str, str]]) -> tuple[str, list[str]]:
    """The head of a Markdown table of records, with its newlines, and a line for each record, without."""
    keys = list(rows[0])
    return f"| {' | '.join(keys)} |\n|{' --- |' * len(keys)}\n", [f"| {' | '.join(row.values())} |" for row in rows]


def _records(material: Material, count: int) -> list[dict[str, str]]:
    """Records with the same keys; the first value of each is a name of its own."""
    random = material.random
    columns: dict[str, Callable[[], str]] = {
        "place": lambda: material.one_of(PLACES),
        "thing": lambda: f"{material.one_of(ADJECTIVES)} {material.one_of(THINGS)}",
        "day": lambda: random.choice(DAYS),
        "number": lambda: str(material.number()),
        "code": lambda: material.invented(),
    }
    keys = random.sample(list(columns), random.randint(2, 4))
    return [{"name": name, **{key: columns[key]() for key in keys}} for name in material.names(count)]


TASKS: dict[str, Callable[[Material], CopyingText]] = {
    "rename": rename,
    "quote": quote,
    "edit": edit,
    "go on": go_on,
    "reformat": reformat,
}
