"""Grammars for answers that must be tool calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from selfspec.serve.grammar_worker import COMPACT
from selfspec.serve.schema_check import as_compiled
from selfspec.serve.tools.tool_formats import BEGIN, END, ToolFormat
from selfspec.serve.tools.tool_requests import Tool

_SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}
"""White space as json.dumps writes it, which is how templates write calls."""


def call_grammar(
    written: ToolFormat,
    tools: Sequence[Tool],
    *,
    several: bool,
    special_id: Callable[[str], int | None],
    answer: dict[str, Any] | bool | None = None,
) -> str:
    """Write the grammar of an answer that consists of calls of these tools, whose arguments follow their schemas.

    several: more than one call is possible, if the format has that. special_id: of a text that is one special token, see
    `Vocabulary.special_id`. answer: a schema that the answer may follow instead.
    Raises ValueError for a format, or schemas, for which there is no such grammar.
    """
    if written.kind == "own" or (written.kind == "bare" and answer is not None):
        raise ValueError("this model's form of tool calls has no grammar that goes with this request")
    calls = "call"
    if several and written.between is not None:
        calls = f"call ({_literal(written.between)} call)*"
    rules = [f"start: {calls}" if answer is None else f"start: answer | {calls}"]
    if answer is not None:
        # As `Vocabulary.matcher` makes it of the schema alone.
        rules.append(f"answer: %json {_with_spaces(answer, COMPACT)}")
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    before, after = _tagged(written.before, BEGIN, special_id), _tagged(written.after, END, special_id)
    rules.append(f"call: {before} ( {names} ) {after}")
    for number, tool in enumerate(tools):
        parts = []
        for place, key in enumerate(written.keys):
            lead = ("{" if place == 0 else ", ") + f"{json.dumps(key)}: "
            parts.append(_literal(lead + json.dumps(tool.function.name)) if key == "name" else _literal(lead))
            if key != "name":
                parts.append(f"arguments_{number}")
        rules.append(f"call_{number}: {' '.join(parts)} {_literal('}')}")
        rules.append(f"arguments_{number}: %json {_with_spaces(tool.schema_, _SPACED)}")
    return "\n".join(rules) + "\n"


def _with_spaces(schema: dict[str, Any] | bool, spaces: dict[str, Any]) -> str:
    return json.dumps({"x-guidance": spaces, **as_compiled(schema)})


def _tagged(text: str, tag: str, special_id: Callable[[str], int | None]) -> str:
    """Write the grammar of a text that begins or ends with a tag, or is empty."""
    token = special_id(tag)
    if not text or token is None:
        return _literal(text)
    before, _, after = text.partition(tag)
    return f"{_literal(before)} <[{token}]> {_literal(after)}".strip()


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
