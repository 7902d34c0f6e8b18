"""Frozen values from their JSON, by the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Value = TypeVar("_Value")


def from_json(kind: type[_Value], content: Mapping[str, Any]) -> _Value:
    """Return the value of a dataclass whose JSON is an object of its fields.

    A field that is missing, or null and never None, has its default: an older epochsink has not written it. What a
    newer one has added is left out. Raises TypeError, ValueError for JSON of another form.
    """
    return kind(
        **{
            name: _read(hint, content[name])
            for name, hint in _hints(kind).items()  # type: ignore[arg-type] # a class can be hashed
            if name in content and (content[name] is not None or type(None) in get_args(hint))
        }
    )


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _read(hint: Any, content: Any) -> Any:
    """Return the value of a field or of a part of it. Numbers, texts and objects of any content stay as they are."""
    if is_dataclass(hint):
        return from_json(hint, content)  # type: ignore[arg-type] # a dataclass, not an object of one
    kind, of = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return None if content is None else _read(of[0], content)
    if kind is tuple:
        kinds = of[:1] * len(content) if of[-1] is ... else of
        return tuple(_read(each, part) for each, part in zip(kinds, content, strict=True))
    if kind is Mapping:
        return {name: _read(of[1], part) for name, part in dict(content).items()}
    return content
