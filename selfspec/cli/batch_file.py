"""`selfspec generate --prompts FILE --output FILE`: many prompts. Results are written at once, so that a run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from layerskip_models.output_paths import output_file
from layerskip_models.text_files import read_lines, write_text
from policies import Policy, runs_own_code
from selfspec import SelfSpecGenerator
from selfspec.batch import completed
from selfspec.cache.copy_index import copies_drafts
from selfspec.cli.arguments import progress_bar, store_of_files
from selfspec.engine.engine import BoundRequest
from selfspec.messages import Messages, are_messages, encode_question
from selfspec.options import SpeculationOptions, WrittenOptions, described

OWN_OPTIONS = tuple(described(WrittenOptions))
"""Options that a line may give. They take precedence over the command's."""
_SPECULATION = tuple(described(SpeculationOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of the file.

    key: identifies the prompt with its options, to recognise its result. chooses: the line itself says how to speculate.
    raw: a text is continued even if the model has a chat template.
    """

    id: str | int
    prompt: str | Messages
    options: Mapping[str, Any]
    key: str
    chooses: bool = False
    raw: bool = False

    def policy(self, generator: SelfSpecGenerator) -> Policy:
        return generator.resolve_policy(**{name: self.options.get(name) for name in _SPECULATION})


def read_prompts(
    path: Path, output: Path, options: Mapping[str, Any], copy_texts: Sequence[str] = (), *, raw: bool = False
) -> list[PromptLine]:
    """Read JSON lines with "prompt" or "messages", and optionally "id" and options of their own.

    options: the command's. copy_texts: texts to copy drafts from, for all lines. raw: as in `PromptLine`.
    Raises ValueError that names the line, and OSError or ValueError if `output` cannot take the results.
    """
    output_file(output, replaced=True)
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        raise FileNotFoundError(f'no file {path}: give JSON lines such as {{"prompt": "Once upon a time"}}') from None
    written = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    found = [_read_line(line, number, f"{path}, line {number}", options, copy_texts, raw) for number, line in written]
    if not found:
        raise ValueError(f"{path} holds no prompts")
    if len({line.id for line in found}) < len(found):
        raise ValueError(f"{path} has the same id twice: results could not be told apart")
    return found


def _read_line(
    line: str, number: int, where: str, options: Mapping[str, Any], copy_texts: Sequence[str], raw: bool
) -> PromptLine:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or thousands of brackets
        raise ValueError(f"{where} cannot be read as JSON: {error}") from None
    values = values if isinstance(values, dict) else {}
    prompt, messages = values.get("prompt"), values.get("messages")
    given: Any = messages if prompt is None else prompt
    if not (are_messages(messages) if prompt is None else messages is None and isinstance(prompt, str) and prompt):
        wanted = '"prompt", a text that is not empty, or with "messages", a list of {"role": "user", "content": "..."}'
        raise ValueError(f"{where} must be an object with {wanted}")
    own = {name: value for name, value in values.items() if name not in ("prompt", "messages", "id", "task")}
    if unknown := sorted(own.keys() - set(OWN_OPTIONS)):
        raise ValueError(f"{where}: {unknown[0]!r} is no option; there are {', '.join(OWN_OPTIONS)}")
    name = values.get("id", number)
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise ValueError(f"{where}: the id must be a text or an integer, got {json.dumps(name)[:100]}")
    if not isinstance(own.get("policy", ""), (str, type(None))):
        raise ValueError(f"{where}: the policy must be a name, got {json.dumps(own['policy'])[:100]}")
    if runs_own_code(own.get("policy") or "") and own["policy"] != options.get("policy"):
        raise ValueError(f"{where}: a file of prompts names no code to run: give {own['policy']!r} as --policy instead")
    merged = {**options, **own}
    hashed = {**merged, "raw": raw}
    if copy_texts:
        hashed = {"copy_from": hashlib.sha256("\0".join(copy_texts).encode()).hexdigest(), **hashed}
    key = hashlib.sha256(json.dumps([given, hashed], sort_keys=True).encode()).hexdigest()[:16]
    chooses = any(option in own for option in _SPECULATION)
    return PromptLine(id=name, prompt=given, options=merged, key=key, chooses=chooses, raw=raw)


def _results_so_far(path: Path, prompts: list[PromptLine]) -> set[str | int]:
    """Remove all but an earlier run's results, atomically, and return their ids. Raises ValueError for other prompts."""
    wanted = {line.id: line.key for line in prompts}
    found: dict[str | int, str] = {}
    lines = read_lines(path) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        known = isinstance(values, dict) and isinstance(values.get("id"), (str, int)) and wanted.get(values["id"])
        if not known or known != values.get("key"):
            raise ValueError(f"{path}, line {number} is no result of these prompts and options: give another --output")
        if "error" not in values:  # failed prompts are tried again
            found[values["id"]] = line
    kept = "".join(f"{line}\n" for line in found.values())
    if path.is_file() and path.read_bytes() != kept.encode():
        write_text(path, kept)
    return set(found)


def generate_file(
    generator: SelfSpecGenerator,
    prompts: list[PromptLine],
    output: Path,
    batch_size: int,
    copy_texts: Sequence[str],
    log: Console,
) -> int:
    """Decode the prompts without a result, and write each result, or error, at once. Returns how many failed."""
    own = next((line.policy(generator) for line in prompts if not line.chooses), None) if copy_texts else None
    store = store_of_files(generator, copy_texts, own)
    done = _results_so_far(output, prompts)
    if done:
        log.print(f"{len(done)} of {len(prompts)} results are in {output} already")
    failed = tokens = 0
    with output.open("a", encoding="utf-8") as file, progress_bar(len(prompts), log, len(done)) as on_progress:
        checked: list[BoundRequest] = []
        lines: list[PromptLine] = []
        for line in prompts:
            if line.id in done:
                continue
            try:
                options = {**line.options}
                if store is not None and "copy_from" not in options and copies_drafts(line.policy(generator).observes):
                    options["copy_from"] = store
                asked: str | list[int] | Messages = line.prompt
                if isinstance(asked, str):
                    asked = encode_question(asked, generator.tokenizer, raw=line.raw)
                checked.append(generator.check(asked, **options))
                lines.append(line)
            except (ValueError, TypeError) as error:
                failed += 1
                _write(file, line, {"error": str(error)})
                on_progress("Decoding")
        with closing(completed(checked, batch_size)) as results:
            for index, result in results:
                if isinstance(result, Exception):
                    failed += 1
                    _write(file, lines[index], {"error": str(result)})
                else:
                    tokens += result.stats.num_new_tokens
                    values = {"text": result.text, "token_ids": result.new_tokens, "stop_reason": result.stop_reason}
                    _write(file, lines[index], {**values, "policy": result.policy, "stats": result.stats.as_dict()})
                on_progress(f"Decoding, {tokens} tokens")
    return failed


def _write(file: TextIO, line: PromptLine, values: Mapping[str, Any]) -> None:
    """Write and flush, so that complete results survive however the command ends."""
    kind = "prompt" if isinstance(line.prompt, str) else "messages"
    file.write(json.dumps({"id": line.id, "key": line.key, kind: line.prompt, **values}, allow_nan=False) + "\n")
    file.flush()
