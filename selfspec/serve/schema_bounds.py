"""Bounds on a client's JSON schema, checked before it is compiled: a compiler's stack and memory are finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_NODES = 20_000
"""Most values in a schema, not counting keys."""
MOST_DEPTH = 256
"""Most levels of nesting on a path through the schema, following references."""
MOST_REFERENCES = 64
"""Most references on such a path."""
MOST_CHOICES = 5_000
"""Most values of one `enum`, and properties of one object."""
MOST_CHARACTERS = 4_096
"""Most characters of one string: a name, a constant, a pattern."""
MOST_MULTIPLE = 10_000
"""Largest `multipleOf`, which becomes an automaton with as many states."""
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def check_schema(schema: dict[str, Any] | bool) -> None:
    """Raise ValueError that names the bound which the schema exceeds, or what it holds that clients may not use."""
    if not isinstance(schema, bool):
        _Ways(_Definitions(schema).found).check()


@dataclass(slots=True)
class _Definition:
    """The target of a reference. depth: its own levels of nesting. to: pointers of the references in it."""

    depth: int = 0
    to: set[str] = field(default_factory=set)


class _Definitions:
    """All reachable definitions by JSON pointer; the schema itself is "#"."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.found: dict[str, _Definition] = {}
        self._schema, self._nodes = schema, 0
        self._walk_data(schema)  # all values count, even those that no reference leads to
        open_pointers = ["#"]
        while open_pointers:
            pointer = open_pointers.pop()
            if pointer not in self.found:
                self.found[pointer] = definition = _Definition()
                self._walk(self._at(pointer), definition)
                open_pointers += definition.to

    def _walk_data(self, root: object) -> None:
        """Sizes of all values, whatever they mean."""
        for value, depth in _values(root):
            self._nodes += 1
            if self._nodes > MOST_NODES:
                raise ValueError(f"the schema has more than {MOST_NODES} values")
            if depth > MOST_DEPTH:
                raise ValueError(f"the schema is nested more than {MOST_DEPTH} levels deep")
            if isinstance(value, dict):
                _check_size("properties", value)
                for key in value:
                    _check_text(key)
            elif isinstance(value, str):
                _check_text(value)

    def _walk(self, root: object, definition: _Definition) -> None:
        """A definition's own keywords, without what it refers to."""
        todo: list[tuple[object, int, bool]] = [(root, 1, True)]  # value, its depth, whether it is a schema
        while todo:
            value, depth, is_schema = todo.pop()
            definition.depth = max(definition.depth, depth)
            if isinstance(value, list):
                todo += [(item, depth + 1, is_schema) for item in value]
            elif isinstance(value, dict):
                if is_schema:
                    self._check_keywords(value, definition, value is self._schema)
                for key, item in value.items():
                    if not is_schema or key not in _DATA:
                        todo.append((item, depth + 1, not (is_schema and key in _NAMED)))

    def _check_keywords(self, schema: dict[str, Any], definition: _Definition, is_root: bool) -> None:
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                self._at(value)
                definition.to.add(value)
            elif key == "$id" and isinstance(value, str) and not is_root:
                raise ValueError(
                    "the schema has an $id inside: name its parts in $defs, and refer to them by '#/$defs/...'"
                )
            elif key in ("x-guidance", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"):
                raise ValueError(f"the schema has {key}, which is not supported")
            elif key == "enum" and isinstance(value, list):
                _check_size("values in enum", value)
            elif key == "multipleOf" and isinstance(value, (int, float)) and value > MOST_MULTIPLE:
                raise ValueError(f"multipleOf is above {MOST_MULTIPLE} in the schema")

    def _at(self, pointer: str) -> object:
        if pointer != "#" and not pointer.startswith("#/"):
            raise ValueError(f"the schema refers to {pointer!r}: references must be within it, such as '#/$defs/name'")
        value: object = self._schema
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise ValueError(f"the schema refers to {pointer!r}, which is not in it")
        return value


class _Ways:
    """An upper bound on the longest path through the definitions.

    Definitions that refer to each other in a circle may follow each other in any order, so all of them count.
    """

    def __init__(self, definitions: dict[str, _Definition]) -> None:
        self._definitions = definitions

    def check(self) -> None:
        group_of: dict[str, int] = {}
        longest: list[tuple[int, int]] = []  # references and levels of the longest path from each group
        for group in _circles({pointer: one.to for pointer, one in self._definitions.items()}):
            for pointer in group:
                group_of[pointer] = len(longest)
            beyond = [
                longest[group_of[to]]
                for pointer in group
                for to in self._definitions[pointer].to
                if group_of[to] != len(longest)
            ]
            references = len(group) + max((hops for hops, _ in beyond), default=0)
            levels = sum(self._definitions[pointer].depth for pointer in group)
            levels += max((deep for _, deep in beyond), default=0)
            longest.append((references, levels))
            if references > MOST_REFERENCES + 1:
                raise ValueError(f"the schema has more than {MOST_REFERENCES} references that follow each other")
            if levels > MOST_DEPTH:
                raise ValueError(f"the schema is more than {MOST_DEPTH} levels deep with its references followed")


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components, each after those it leads to. Tarjan's algorithm (1972), without recursion."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()
    for start in graph:
        if start in number:
            continue
        work = [(start, iter(graph[start]))]
        number[start] = low[start] = len(number)
        stack.append(start)
        waiting.add(start)
        while work:
            node, following = work[-1]
            for to in following:
                if to not in number:
                    number[to] = low[to] = len(number)
                    stack.append(to)
                    waiting.add(to)
                    work.append((to, iter(graph[to])))
                    break
                if to in waiting:
                    low[node] = min(low[node], number[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    group = [stack.pop()]
                    while group[-1] != node:
                        group.append(stack.pop())
                    waiting.difference_update(group)
                    yield group


def _values(root: object) -> Iterator[tuple[object, int]]:
    todo = [(root, 1)]
    while todo:
        value, depth = todo.pop()
        yield value, depth
        if isinstance(value, dict):
            todo += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            todo += [(item, depth + 1) for item in value]


def _check_size(what: str, values: dict[str, Any] | list[Any]) -> None:
    if len(values) > MOST_CHOICES:
        raise ValueError(f"the schema has {len(values)} {what}, at most {MOST_CHOICES} are possible")


def _check_text(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the schema has a string of {len(text)} characters, at most {MOST_CHARACTERS} are possible")
