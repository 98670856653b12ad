"""Whether a client's schema can be used: its references are looked at, then it is tried in a process that may end safely."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from layerskip_models.fork_safe import fork_safe

MAX_BYTES = 256 << 10
"""Limit on a schema as JSON."""
MAX_NESTING = 120
"""Most levels of nested values. The compiler reads JSON of up to 124."""
TRIAL_SECONDS = 1.0
"""Limit on the processor time of a trial."""
_WALL_SECONDS = 15.0  # for the same, on a busy machine
_TRIAL_BYTES = 1 << 30
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
        _check_keyword(key, item, is_root=depth == 1)
        if key != "uniqueItems" and (key != "format" or item in _FORMATS):
            found[key] = item if key in _DATA else _enforced(item, key not in _NAMED, depth + 1)
    return found


def _check_keyword(key: str, value: Any, *, is_root: bool) -> None:
    """Raise ValueError for a reference out of the schema, and for what clients may not use."""
    if key == "$ref" and isinstance(value, str) and value[:2] not in ("#", "#/"):
        raise ValueError(f"the schema refers to {value[:100]!r}: references must be within it, such as '#/$defs/name'")
    if key == "$id" and isinstance(value, str) and not is_root:
        raise ValueError("the schema has an $id inside: name its parts in $defs, and refer to them by '#/$defs/...'")
    if key in _UNSUPPORTED:
        raise ValueError(f"the schema has {key}, which is not supported")


class SchemaCheck:
    """Threads may share one; they take turns. The process starts with the first schema, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._process: subprocess.Popen[bytes] | None = None
        # By digest: why the schema cannot be used, if it cannot, and the seconds that compiling it took.
        self._known: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()

    def __call__(self, schema: dict[str, Any] | bool) -> str:
        """Write the schema as JSON. Raises ValueError that says in one line why it cannot be used."""
        compiled = as_compiled(schema)
        try:
            written, tried = json.dumps(schema), json.dumps(compiled)
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None
        if len(written) > MAX_BYTES:
            raise ValueError(f"the schema has {len(written)} bytes, at most {MAX_BYTES} are possible")
        key = sha256(written.encode()).digest()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._trial(tried)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            why, _ = self._known[key]
        if why is not None:
            raise ValueError(f"the schema cannot be used: {why}")
        return written

    def check_together(self, schemas: Sequence[dict[str, Any] | bool]) -> None:
        """Raise ValueError if one grammar of all these schemas, each of which was checked, would exceed the bounds of one."""
        written = [json.dumps(schema) for schema in schemas]
        if sum(map(len, written)) > MAX_BYTES:
            raise ValueError(f"the schemas have more than {MAX_BYTES} bytes together")
        known = [self._known.get(sha256(one.encode()).digest()) for one in written]
        if sum(one[1] for one in known if one is not None) > TRIAL_SECONDS:
            raise ValueError(f"the schemas take more than {TRIAL_SECONDS:g} s together to compile")

    def is_quick(self, schema: dict[str, Any] | bool) -> bool:
        """Whether the schema is known to compile quickly."""
        try:
            written = json.dumps(schema)
        except RecursionError:
            return False
        known = self._known.get(sha256(written.encode()).digest())
        return known is not None and known[1] < _QUICK_SECONDS

    def close(self) -> None:
        with self._lock:
            self._end()

    def _trial(self, written: str) -> tuple[str | None, float]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(written).encode() + b"\n")
            process.stdin.flush()
            line = _line(process, monotonic() + _WALL_SECONDS)
        except OSError:
            line = b""
        if not line:
            self._end()
            return f"it takes more than {TRIAL_SECONDS:g} s or {_TRIAL_BYTES >> 30} GiB to compile", 0.0
        answer = json.loads(line)
        return answer.get("refused"), answer.get("seconds", 0.0)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    found = find_spec("llguidance")
    assert found is not None and found.origin is not None
    folder, worker = Path(found.origin).parent.parent, Path(__file__).with_name("grammar_worker.py")
    command = [sys.executable, "-I", str(worker), str(folder), str(TRIAL_SECONDS), str(_TRIAL_BYTES)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Read the process's answer; empty if it ended or did not answer in time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        if not ready.select(max(0.0, deadline - monotonic())):
            return b""
    return process.stdout.readline()
