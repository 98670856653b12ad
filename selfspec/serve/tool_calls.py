"""Calls in what a model writes, found while it is written.

A call is passed on once it is complete: what looks like one and is none is content, and content cannot be taken back. It is
none if it is not JSON, lacks a name, or names a function that the request does not have.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from selfspec.detokenize import StopCutter

BEGIN, END = "<tool_call>", "</tool_call>"
Found = tuple[str, list[dict[str, Any]]]
"""Content, and calls as an answer has them."""
_SEPARATOR = re.compile(r"[\s;,]*")
_HALF = re.compile("[\ud800-\udfff]")
_BARE = re.compile(r'\s*(\Z|\{\s*(\Z|"([a-z]{0,10}\Z|(arguments|function|id|name|parameters|type)")))')
"""The beginning of an answer that may be calls and nothing else."""


class CallReader(ABC):
    """Reads one answer. names: of the functions that may be called. max_calls: further calls are dropped."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        self._names, self._max_calls = frozenset(names), max_calls
        self.num_calls = 0
        self._content, self._calls = "", list[dict[str, Any]]()  # found, but not returned yet

    @abstractmethod
    def push(self, text: str) -> Found:
        """Return what is certain with this text."""

    @abstractmethod
    def finish(self, is_whole: bool = True) -> Found:
        """Return the rest. is_whole: the model has ended the answer itself, so a call may lack its end tag."""

    def _found(self) -> Found:
        found = self._content, self._calls
        self._content, self._calls = "", []
        return found

    def _call(self, value: object) -> tuple[str, str] | None:
        """Name and arguments of a call, from the model's JSON; None if it is none."""
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        try:
            if isinstance(arguments, str):
                arguments = _parsed(arguments or "{}")
            written = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):  # 1e999 is infinite, which JSON has no number for
            return None
        # Escapes in JSON can make half characters, which no answer can hold.
        return (name, _HALF.sub("\N{REPLACEMENT CHARACTER}", written)) if written.startswith("{") else None

    def _take(self, call: tuple[str, str]) -> None:
        if self._max_calls is None or self.num_calls < self._max_calls:
            name, arguments = call
            function = {"arguments": arguments, "name": name}
            self._calls.append({"id": f"call_{uuid4().hex[:24]}", "function": function, "type": "function"})
            self.num_calls += 1


class TagReader(CallReader):
    """Calls between BEGIN and END, with content around them; or an answer that is nothing but calls, without the tags."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        super().__init__(names, max_calls)
        self._cutter = StopCutter([BEGIN])
        self._inside = ""
        self._searched = 0  # characters of what is inside before which no end is
        self._bare: BareReader | None = BareReader(names, max_calls)  # until the answer is known to begin otherwise
        self._white = ""  # between content and what comes next; at the beginning and the end it is dropped beside calls
        self._behind_call = self._has_content = False

    def push(self, text: str) -> Found:
        if self._bare is not None:
            text, _ = self._bare.push(text)
            if self._bare.may_be_calls:
                return "", []
            self._bare = None
        while text:
            if not self._cutter.ended:
                before = len(self._cutter.held)
                content = self._cutter.push(text)
                self._write(content)
                text = text[len(content) - before + len(BEGIN) :] if self._cutter.ended else ""
            else:
                self._inside += text
                text = self._close(self._inside)
        return self._found()

    def finish(self, is_whole: bool = True) -> Found:
        if self._bare is not None:
            content, calls = self._bare.finish()
            if calls or not content:
                self.num_calls = self._bare.num_calls
                return content, calls
            self._bare = None
            self._content, self._calls = self.push(content)
        if self._cutter.ended and is_whole:
            try:
                call = self._call(_parsed(self._inside))
            except ValueError:
                call = None
            if call is not None:
                self._take_between(call)
                return self._found()
        self._write(f"{BEGIN}{self._inside}" if self._cutter.ended else self._cutter.finish())
        if not self.num_calls:
            self._content += self._white
        return self._found()

    def _close(self, inside: str) -> str:
        """Look for the end of a call. Returns the text behind what was none or is complete, "" if that is not clear yet."""
        if (begun := inside.lstrip()) and not begun.startswith("{"):
            return self._go_on(BEGIN, inside)  # the tag is only mentioned
        at = inside.find(END, self._searched)
        while at >= 0:
            try:
                call = self._call(_parsed(inside[:at]))
            except ValueError as error:
                unfinished = getattr(error, "pos", 0) >= len(inside[:at].rstrip()) or "Unterminated" in str(error)
                if unfinished and inside[:at].strip():
                    self._searched = at + 1  # this one is part of a string, whatever follows
                    at = inside.find(END, self._searched)
                    continue
                call = None
            if call is not None:
                self._take_between(call)
                return self._go_on("", inside[at + len(END) :])
            again = inside.find(BEGIN, 0, at)  # what was no call may have one in it
            if again >= 0:
                return self._go_on(BEGIN + inside[:again], inside[again:])
            return self._go_on(BEGIN + inside[: at + len(END)], inside[at + len(END) :])
        return ""

    def _go_on(self, content: str, rest: str) -> str:
        """Write content and look for the next call in the rest."""
        self._write(content)
        self._cutter, self._inside, self._searched = StopCutter([BEGIN]), "", 0
        return rest

    def _take_between(self, call: tuple[str, str]) -> None:
        self._behind_call = True
        if not self._has_content:
            self._white = ""
        self._take(call)

    def _write(self, text: str) -> None:
        if self._behind_call and not (text := text.lstrip()):
            return
        text = self._white + text
        self._behind_call = False
        content = text.rstrip()
        self._white = text[len(content) :]
        self._content += content
        self._has_content = self._has_content or bool(content)


class BareReader(CallReader):
    """An answer that is a call and nothing else, or several with a semicolon between them. Any other text is content."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        super().__init__(names, max_calls)
        self._held = ""
        self.may_be_calls = True

    def push(self, text: str) -> Found:
        if self.may_be_calls:
            self._held += text
            if _BARE.match(self._held):
                return "", []
            text, self._held, self.may_be_calls = self._held, "", False
        return text, []

    def finish(self, is_whole: bool = True) -> Found:
        for call in self._all_calls(self._held):
            self._take(call)
        return ("", self._calls) if self._calls else (self._held, [])

    def _all_calls(self, text: str) -> list[tuple[str, str]]:
        """Find the calls; none unless all of the text is calls."""
        found, place, decoder = [], 0, json.JSONDecoder(parse_constant=_refuse)
        text = text.strip()
        while place < len(text):
            try:
                value, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                return []
            call = self._call(value)
            if call is None or not {"arguments", "parameters"} & value.keys():
                return []
            found.append(call)
            behind = _SEPARATOR.match(text, place)
            assert behind is not None
            place = behind.end()
        return found


def _parsed(text: str) -> object:
    """Read the value of JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
