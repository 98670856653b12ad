"""Check a client's schema or grammar: first its size and depth, then by compiling it in a process that may end safely.

llguidance's compiler is foreign code whose time, memory and stack depend on what a client sent. The process that tries it
imports this module and nothing that is large.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as TrialTimeoutError  # before Python 3.11 not the built-in one
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from hashlib import sha256
from types import ModuleType
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from layerskip_models.fork_safe import fork_safe

Grammar = dict[str, Any] | bool | str
"""A JSON schema, or a grammar in Lark's form or llama.cpp's (GBNF)."""

MAX_BYTES = 256 << 10  # limit on a schema as JSON, and on a grammar
_MAX_GBNF = 8 << 10  # limit on a grammar that has to be rewritten, which no trial bounds
MAX_NESTING = 120
"""Most levels of nested values. The compiler reads JSON of up to 124."""
TRIAL_SECONDS = 1.0  # limit on the processor time of a trial
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000, "step_lexer_fuel": 30_000, "step_max_items": 20_000, "max_lexer_states": 50_000,
    "verbose_errors": False,
}  # fmt: skip
"""Limits on a grammar, in llguidance's units. A core does about 20 of them in a microsecond."""
COMPACT: Any = {"whitespace_flexible": False}
"""No white space between JSON tokens: a weak model might write spaces forever."""
_WALL_SECONDS = 15.0  # for a trial on a busy machine, the start of its process included
_TRIAL_BYTES = 1 << 30
_STACK_BYTES = 2 << 20  # less than a thread of the server has, so that what fits here fits there
_STEPS = 48
_REMEMBERED = 256
_QUICK_SECONDS = 0.05
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_UNSUPPORTED = ("x-guidance", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor")


def as_compiled(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Make the schema one the compiler takes: without formats that it does not know, which are no condition, and uniqueItems.

    Raises ValueError for a reference that leads out of the schema, for what clients may not use, and for one that no text
    follows. How large and circular a schema may be is for the trial to say.
    """
    if schema is False:
        raise ValueError("the schema is false, which no text follows")
    found: dict[str, Any] = _enforced({} if schema is True else schema, True, 1)
    return found


def _enforced(value: Any, is_schema: bool, depth: int) -> Any:
    if depth > MAX_NESTING:
        raise ValueError(f"the schema is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, list):
        return [_enforced(item, is_schema, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if not is_schema:  # a name, of a property or a definition
            found[key] = _enforced(item, True, depth + 1)
            continue
        if key == "$ref" and isinstance(item, str) and item[:2] not in ("#", "#/"):
            raise ValueError(f"the schema refers to {item[:100]!r}: references must be within it, as '#/$defs/name'")
        if key == "$id" and isinstance(item, str) and depth > 1:
            raise ValueError("the schema has an $id inside: name parts in $defs, and refer to them by '#/$defs/...'")
        if key in _UNSUPPORTED:
            raise ValueError(f"the schema has {key}, which is not supported")
        if key != "uniqueItems" and (key != "format" or item in _FORMATS):
            found[key] = item if key in _DATA else _enforced(item, key not in _NAMED, depth + 1)
    return found


def compiled_form(grammar: Grammar) -> str:
    """Write a schema as JSON, or a grammar in Lark's form. Raises ValueError as `as_compiled`."""
    if not isinstance(grammar, str):
        return json.dumps(as_compiled(grammar))
    if not re.search(r"^[\w-]+[ \t]*::=", grammar, re.MULTILINE):
        return grammar
    if len(grammar) > _MAX_GBNF:
        raise ValueError(f"a grammar of more than {_MAX_GBNF} characters must be in Lark's form")
    try:
        return gbnf_to_lark("\n".join(filter(str.strip, grammar.splitlines())))  # it is slow at empty lines
    except Exception as error:  # the library has several kinds for a wrong one, and deep ones exceed Python's stack
        raise ValueError(f"the grammar cannot be used: {one_line(str(error))}") from None


def compile_grammar(form: str) -> str:
    """Compile a `compiled_form`. A schema is an object, with which no grammar begins."""
    if form.startswith("{"):
        return str(llguidance.LLMatcher.grammar_from_json_schema(form, defaults=COMPACT))
    return str(llguidance.LLMatcher.grammar_from_lark(form))


class SchemaCheck:
    """Threads may share one; they take turns. The process starts with the first schema, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._pool: ProcessPoolExecutor | None = None
        # By digest: why the schema cannot be used, if it cannot, and the seconds that compiling it took.
        self._known: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()

    def __call__(self, schema: Grammar) -> None:
        """Raise ValueError that says in one line why the schema cannot be used."""
        tried = compiled_form(schema)
        try:
            written = json.dumps(schema)
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None
        if len(written) > MAX_BYTES:
            raise ValueError(f"the schema has {len(written)} bytes, at most {MAX_BYTES} are possible")
        key = _digest(written)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._trial(tried)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            why, _ = self._known[key]
        if why is not None:
            raise ValueError(f"the schema cannot be used: {why}")

    def check_together(self, schemas: Sequence[Grammar]) -> None:
        """Raise ValueError if one grammar of all these schemas, each of which was checked, would exceed the bounds of one."""
        written = [json.dumps(schema) for schema in schemas]
        if sum(map(len, written)) > MAX_BYTES:
            raise ValueError(f"the schemas have more than {MAX_BYTES} bytes together")
        known = [self._known.get(_digest(one)) for one in written]
        if sum(one[1] for one in known if one is not None) > TRIAL_SECONDS:
            raise ValueError(f"the schemas take more than {TRIAL_SECONDS:g} s together to compile")

    def is_quick(self, schema: Grammar) -> bool:
        """Say whether the schema is known to compile quickly."""
        try:
            known = self._known.get(_digest(json.dumps(schema)))
        except RecursionError:
            return False
        return known is not None and known[1] < _QUICK_SECONDS

    def close(self) -> None:
        with self._lock:
            self._end()

    def _trial(self, written: str) -> tuple[str | None, float]:
        try:
            return self._submit(written).result(_WALL_SECONDS)
        except (BrokenProcessPool, TrialTimeoutError):
            self._end()
            return f"it takes more than {TRIAL_SECONDS:g} s or {_TRIAL_BYTES >> 30} GiB to compile", 0.0

    def _submit(self, written: str) -> Future[tuple[str | None, float]]:
        if self._pool is None:
            new = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, new, _limit_process, (_TRIAL_BYTES, _STACK_BYTES))
        program = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else a new process would import all of the program first
        try:
            return self._pool.submit(try_schema, written, TRIAL_SECONDS)
        except BrokenProcessPool:  # it has died since the last trial
            self._end()
        finally:
            sys.modules["__main__"] = program
        return self._submit(written)

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in [*(pool._processes or {}).values()]:  # a trial that hangs would be waited for
                process.kill()
            pool.shutdown(cancel_futures=True)


def _digest(written: str) -> bytes:
    return sha256(written.encode()).digest()


def one_line(text: str) -> str:
    """Put the compiler's error in a line. A pattern's has several: the pattern, a mark below it, and the reason."""
    lines = text.splitlines() or ["no reason was given"]
    if lines[0] == "NoExtensionBias":  # what the library says of this
        return "it refers to itself and to nothing else"
    if not lines[0].endswith("regex parse error:") or len(lines) < 4:
        return lines[0][:200]
    place = max(0, len(lines[2]) - len(lines[2].lstrip()) - 4)
    part, reason = lines[1][4:][place : place + 20], next(filter(re.compile("error: ").match, lines), lines[-1])
    return f"at character {place + 1} of a pattern, {part!r}: {reason.removeprefix('error: ')}"[:200]


def _limit_process(max_bytes: int, stack_bytes: int) -> None:
    """Prepare the process of the trials: it may take little, says nothing, and ends when the server does."""
    import resource

    _byte_tokenizer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.nice(5)
    limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_STACK, stack_bytes))
    for kind, most in limits:
        resource.setrlimit(kind, (most, most))
    threading.Thread(target=_end_with_server, daemon=True).start()


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(0)


def try_schema(schema: str, seconds: float) -> tuple[str | None, float]:
    """Say why llguidance cannot use the schema, or None, and what processor time that took. More ends the process."""
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        why = _refusal(schema)
    except BaseException as error:  # a panic in the library, or no memory
        why = one_line(f"{type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    return why, time.process_time() - started


def _refusal(schema: str) -> str | None:
    """Compile the schema and write the beginning of a text."""
    tokenizer = _byte_tokenizer()
    try:
        grammar = compile_grammar(schema)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    except ValueError as error:
        return one_line(str(error))
    for step in range(_STEPS):
        if matcher.is_error():
            return one_line(matcher.get_error())
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(tokenizer.vocab_size) if mask[token // 8] >> (token % 8) & 1]
        if matcher.is_error() or not allowed:
            continue
        token = allowed[step * 7 % len(allowed)]
        if token == tokenizer.eos_token:
            break
        matcher.consume_token(token)
    return one_line(matcher.get_error()) if matcher.is_error() else None


@cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")  # all bytes, an end token and some that no schema allows
