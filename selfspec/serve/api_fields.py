"""Which fields of a request are left out, ignored or refused, at every depth of its body.

What is null or asks for nothing counts as left out. What does not change the answer is ignored, and a header of the answer
names it. Any other field that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

UNSUPPORTED, WRONG = "unsupported_field", "wrong_field"
"""Types of validation errors that name a field themselves: one that is not supported, and one that others disagree with."""


def wrong_field(name: str, message: str) -> PydanticCustomError:
    """For a model's validator: what is wrong, and with which field."""
    return PydanticCustomError(WRONG, "{message}", {"name": name, "message": message})


class Strict(BaseModel):
    """Refuses fields it does not know, and values of another type.

    _harmless: fields that do not change the answer. _neutral: fields that are not supported, with the values that ask for
    what happens anyway. _reasons: what to say of a field that is refused. _kept_empty: fields of which "" is a value.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _harmless: ClassVar[frozenset[str]] = frozenset()
    _neutral: ClassVar[dict[str, tuple[object, ...]]] = {}
    _reasons: ClassVar[dict[str, str]] = {}
    _kept_empty: ClassVar[frozenset[str]] = frozenset()
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, fields: Any, handler: ModelWrapValidatorHandler[Strict]) -> Strict:
        if not isinstance(fields, dict):
            return handler(fields)
        kept: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            field = cls._field(name)
            may_be_empty = name in cls._kept_empty or (field is not None and field.is_required())
            if value is None or (not may_be_empty and _is_empty(value)):
                continue
            if field is not None:
                kept[name] = value
            elif name in cls._harmless:
                ignored.append(name)
            elif _among(value, cls._neutral.get(name, ())):
                continue
            elif name in cls._reasons:
                raise PydanticCustomError(UNSUPPORTED, "{message}", {"name": name, "message": cls._reasons[name]})
            else:
                kept[name] = value
        made = handler(kept)
        made._ignored = tuple(ignored)
        return made

    @classmethod
    def _field(cls, name: str) -> FieldInfo | None:
        """By the name that it has in a request."""
        field = cls.model_fields.get(name) or cls.model_fields.get(f"{name}_")
        return None if field is None or field.alias not in (None, name) else field

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that were ignored, here and in what this holds."""
        return sorted(set(_ignored_in(self)))

    @property
    def told(self) -> dict[str, str]:
        """The header of an answer that names them; none if nothing was ignored."""
        names = self.ignored
        return {"x-selfspec-ignored": ", ".join(names)} if names else {}


def _is_empty(value: object) -> bool:
    """Whether it is "", [] or {}, or a dict that holds nothing else."""
    if isinstance(value, dict):
        return all(one is None or one in ("", [], {}) for one in value.values())
    return value in ("", [])


def _among(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)


def _ignored_in(value: object) -> Iterator[str]:
    if isinstance(value, Strict):
        yield from value._ignored
        for name in type(value).model_fields:
            yield from _ignored_in(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], Strict):
        for item in value:
            yield from _ignored_in(item)
