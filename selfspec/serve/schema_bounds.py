"""Bounds on a client's JSON schema, checked before it is compiled: a compiler's stack and memory are finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

MOST_NODES = 20_000
"""Most values in a schema, not counting keys."""
MOST_NESTING = 120
"""Most levels of nested values. The compiler reads JSON of up to 124."""
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
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def check_schema(schema: dict[str, Any] | bool) -> None:
    """Raise ValueError that names the bound which the schema exceeds, or what it holds that clients may not use."""
    if schema is False:
        raise ValueError("the schema is false, which no text follows")
    if schema is True:
        return
    _check_values(schema)  # all of them, even those that no reference leads to
    definitions: dict[str, _Definition] = {}
    pointers = ["#"]
    while pointers:
        pointer = pointers.pop()
        if pointer not in definitions:
            definitions[pointer] = _definition(_at(schema, pointer), schema)
            pointers += definitions[pointer].to
    _check_ways(definitions)


def as_compiled(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """The schema as the compiler takes it. Call `check_schema` before.

    A format that the compiler does not know is no condition, as in JSON Schema. Neither is uniqueItems.
    """
    found: dict[str, Any] = _enforced({} if schema is True else schema, True)
    return found


def _enforced(value: Any, is_schema: bool) -> Any:
    if isinstance(value, list):
        return [_enforced(item, is_schema) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if is_schema and key in _DATA else _enforced(item, not (is_schema and key in _NAMED))
        for key, item in value.items()
        if not (is_schema and (key == "uniqueItems" or (key == "format" and item not in _FORMATS)))
    }


@dataclass(slots=True)
class _Definition:
    """What a JSON pointer leads to; that of the whole schema is "#".

    depth: its own levels of nesting. to: pointers of the references in it.
    """

    depth: int = 0
    to: set[str] = field(default_factory=set)


def _check_values(schema: dict[str, Any]) -> None:
    """Check the sizes of all values, whatever they mean."""
    todo: list[tuple[object, int]] = [(schema, 1)]  # value, its depth
    nodes = 0
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if nodes > MOST_NODES:
            raise ValueError(f"the schema has more than {MOST_NODES} values")
        if depth > MOST_NESTING:
            raise ValueError(f"the schema is nested more than {MOST_NESTING} levels deep")
        if isinstance(value, dict):
            _check_size("properties", value)
            for key in value:
                _check_text(key)
            todo += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            todo += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            _check_text(value)


def _definition(root: object, schema: dict[str, Any]) -> _Definition:
    """A definition with its own keywords checked, without what it refers to. schema: the whole one."""
    definition = _Definition()
    todo: list[tuple[object, int, bool]] = [(root, 1, True)]  # value, its depth, whether it is a schema
    while todo:
        value, depth, is_schema = todo.pop()
        definition.depth = max(definition.depth, depth)
        if isinstance(value, list):
            todo += [(item, depth + 1, is_schema) for item in value]
        elif isinstance(value, dict):
            if is_schema:
                definition.to.update(_references(value, schema))
            for key, item in value.items():
                if not is_schema or key not in _DATA:
                    todo.append((item, depth + 1, not (is_schema and key in _NAMED)))
    return definition


def _references(part: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """Check the keywords of a part of the schema, and yield the pointer of its reference, if it has one."""
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str):
            _at(schema, value)
            yield value
        elif key == "$id" and isinstance(value, str) and part is not schema:
            raise ValueError(
                "the schema has an $id inside: name its parts in $defs, and refer to them by '#/$defs/...'"
            )
        elif key in ("x-guidance", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"):
            raise ValueError(f"the schema has {key}, which is not supported")
        elif key == "enum" and isinstance(value, list):
            _check_size("values in enum", value)
        elif key == "multipleOf" and isinstance(value, (int, float)) and value > MOST_MULTIPLE:
            raise ValueError(f"multipleOf is above {MOST_MULTIPLE} in the schema")


def _at(schema: dict[str, Any], pointer: str) -> object:
    """What a pointer leads to. Raises ValueError if that is not in the schema."""
    if pointer != "#" and not pointer.startswith("#/"):
        raise ValueError(f"the schema refers to {pointer!r}: references must be within it, such as '#/$defs/name'")
    value: object = schema
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise ValueError(f"the schema refers to {pointer!r}, which is not in it")
    return value


def _check_ways(definitions: dict[str, _Definition]) -> None:
    """Check an upper bound on the longest path through the definitions.

    Definitions that refer to each other in a circle may follow each other in any order, so all of them count.
    """
    graph = nx.DiGraph({pointer: list(definition.to) for pointer, definition in definitions.items()})
    longest: dict[str, tuple[int, int]] = {}  # references and levels of the longest path from each definition
    for circle in nx.strongly_connected_components(graph):  # Tarjan's algorithm: each comes after those it leads to
        beyond = [longest[to] for pointer in circle for to in definitions[pointer].to if to not in circle]
        references = len(circle) + max((hops for hops, _ in beyond), default=0)
        levels = sum(definitions[pointer].depth for pointer in circle) + max((deep for _, deep in beyond), default=0)
        longest |= dict.fromkeys(circle, (references, levels))
        if references > MOST_REFERENCES + 1:
            raise ValueError(f"the schema has more than {MOST_REFERENCES} references that follow each other")
        if levels > MOST_DEPTH:
            raise ValueError(f"the schema is more than {MOST_DEPTH} levels deep with its references followed")


def _check_size(what: str, values: dict[str, Any] | list[Any]) -> None:
    if len(values) > MOST_CHOICES:
        raise ValueError(f"the schema has {len(values)} {what}, at most {MOST_CHOICES} are possible")


def _check_text(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the schema has a string of {len(text)} characters, at most {MOST_CHARACTERS} are possible")
