"""Calls in what a model writes, found while it is written.

A call is passed on once it is complete: what looks like one and is none is content, and content cannot be taken back. It is
none if it is not JSON, lacks a name, or names a function that the request does not have.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from selfspec.detokenize import StopCutter, before_stop
from selfspec.serve.tools.tool_formats import BEGIN, END

_SEPARATOR = re.compile(r"[\s;,]*")
_WHITE = re.compile(r"\s*\Z")
_HALF = re.compile("[\ud800-\udfff]")
_BARE = re.compile(r'\s*(\Z|\{\s*(\Z|"([a-z]{0,10}\Z|(arguments|function|id|name|parameters|type)")))')
"""The beginning of an answer that may be calls and nothing else."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: a JSON object, as text. index: its place among the calls of the answer."""

    name: str
    arguments: str
    index: int
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


@dataclass(slots=True)
class Written:
    """What a piece of text turned out to be. reasoning: only with transformers' own parser."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.reasoning)

    def add(self, other: Written) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls


class CallReader(ABC):
    """Reads one answer. names: of the functions that may be called. max_calls: further calls are dropped."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        self._names, self._most = frozenset(names), max_calls
        self.num_calls = 0
        self._white = ""  # between content and what comes next; at the beginning and the end it is dropped beside calls
        self._behind_call = self._has_content = False

    @abstractmethod
    def push(self, text: str, tokens: Sequence[int]) -> Written:
        """Return what is certain with this text, and the tokens that it came from."""

    @abstractmethod
    def finish(self, is_whole: bool = True) -> Written:
        """Return the rest. is_whole: the model has ended the answer itself, so a call may lack its end tag."""

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
        return (name, _whole(written)) if written.startswith("{") else None

    def _take(self, written: Written, call: tuple[str, str]) -> None:
        self._behind_call = True
        if not self._has_content:
            self._white = ""
        if self._most is None or self.num_calls < self._most:
            written.calls.append(ToolCall(*call, self.num_calls))
            self.num_calls += 1

    def _write(self, written: Written, text: str) -> None:
        if self._behind_call and not (text := text.lstrip()):
            return
        text = self._white + text
        self._behind_call = False
        found = _WHITE.search(text)
        assert found is not None
        self._white = text[found.start() :]
        written.content += text[: found.start()]
        self._has_content = self._has_content or found.start() > 0


class TagReader(CallReader):
    """Calls between BEGIN and END, with content around them; or an answer that is nothing but calls, without the tags."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        super().__init__(names, max_calls)
        self._cutter = StopCutter([BEGIN])
        self._inside = ""
        self._searched = 0  # characters of what is inside before which no end is
        self._bare: BareReader | None = BareReader(names, max_calls)  # until the answer is known to begin otherwise

    def push(self, text: str, tokens: Sequence[int] = ()) -> Written:
        if self._bare is not None:
            text = self._bare.push(text).content
            if not self._bare.is_content:
                return Written()
            self._bare = None
        written = Written()
        while text:
            if not self._cutter.ended:
                before = len(self._cutter.held)
                content = self._cutter.push(text)
                self._write(written, content)
                text = text[len(content) - before + len(BEGIN) :] if self._cutter.ended else ""
                continue
            self._inside += text
            text = self._close(written, self._inside)
        return written

    def _close(self, written: Written, inside: str) -> str:
        """Look for the end of a call. Returns the text behind what was none or is complete, "" if that is not clear yet."""
        if (begun := inside.lstrip()) and not begun.startswith("{"):
            return self._go_on(written, BEGIN, inside)  # the tag is only mentioned
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
                self._take(written, call)
                return self._go_on(written, "", inside[at + len(END) :])
            again = inside.find(BEGIN, 0, at)  # what was no call may have one in it
            if again >= 0:
                return self._go_on(written, BEGIN + inside[:again], inside[again:])
            return self._go_on(written, BEGIN + inside[: at + len(END)], inside[at + len(END) :])
        return ""

    def _go_on(self, written: Written, content: str, rest: str) -> str:
        """Write content and look for the next call in the rest."""
        self._write(written, content)
        self._cutter, self._inside, self._searched = StopCutter([BEGIN]), "", 0
        return rest

    def finish(self, is_whole: bool = True) -> Written:
        written = Written()
        if self._bare is not None:
            written = self._bare.finish()
            if written.calls or not written.content:
                self.num_calls = self._bare.num_calls
                return written
            self._bare = None
            written = self.push(written.content)
        if self._cutter.ended and is_whole:
            try:
                call = self._call(_parsed(self._inside))
            except ValueError:
                call = None
            if call is not None:
                self._take(written, call)
                return written
        self._write(written, f"{BEGIN}{self._inside}" if self._cutter.ended else self._cutter.finish())
        if not self.num_calls:
            written.content += self._white
        return written


class BareReader(CallReader):
    """An answer that is a call and nothing else, or several with a semicolon between them. Any other text is content."""

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        super().__init__(names, max_calls)
        self._held = ""
        self.is_content = False

    def push(self, text: str, tokens: Sequence[int] = ()) -> Written:
        if not self.is_content:
            self._held += text
            if _BARE.match(self._held):
                return Written()
            text, self._held, self.is_content = self._held, "", True
        return Written(content=text)

    def finish(self, is_whole: bool = True) -> Written:
        calls = [] if self.is_content else self._calls(self._held)
        if not calls:
            return Written(content=self._held)
        written = Written()
        for call in calls:
            self._take(written, call)
        return written

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """All calls; none unless all of the text is calls."""
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


class OwnReader(CallReader):
    """With transformers' parser and the tokenizer's `response_template`, once the answer is complete.

    prompt: tokens, whose end may begin the answer. tools: as templates take them. stops: strings that end the text.
    """

    def __init__(
        self,
        names: Sequence[str],
        max_calls: int | None,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        tools: Sequence[dict[str, Any]],
        stops: Sequence[str],
    ) -> None:
        super().__init__(names, max_calls)
        self._tokenizer, self._prompt, self._tools, self._stops = tokenizer, [*prompt], [*tools], [*stops]
        self._text, self._tokens = "", list[int]()

    def push(self, text: str, tokens: Sequence[int]) -> Written:
        self._text += text
        self._tokens += tokens
        return Written()

    def finish(self, is_whole: bool = True) -> Written:
        raw = before_stop(str(self._tokenizer.decode(self._tokens)), self._stops)
        try:
            message = self._tokenizer.parse_response(
                raw, prefix=str(self._tokenizer.decode(self._prompt)), tools=self._tools
            )
            values = message.get("tool_calls") or []
            calls = [self._call(value.get("function", value)) for value in values]
        except Exception:  # the template is the checkpoint's, and what it reads is whatever was written
            return Written(content=self._text)
        written = Written()
        for call in calls:
            if call is None:
                return Written(content=self._text)
            self._take(written, call)
        content = message.get("content")
        written.content = _whole(content) if isinstance(content, str) else ""
        reasoning = message.get("reasoning_content") or message.get("thinking")
        written.reasoning = _whole(reasoning) if isinstance(reasoning, str) else ""
        return written


def _parsed(text: str) -> object:
    """Read the value of JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole(text: str) -> str:
    """Replace half characters in the text, which escapes in JSON can make and no answer can hold."""
    return _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
