"""Frozen values from their JSON, by the types of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Value = TypeVar("_Value")
_Reader = Callable[[Any], Any]


def from_json(kind: type[_Value], content: Mapping[str, Any]) -> _Value:
    """Return the value of a dataclass whose JSON is an object of its fields.

    A field that is missing, or null and never None, has its default: an older epochsink has not written it. What a
    newer one has added is left out. Raises TypeError, ValueError for JSON of another form.
    """
    return kind(
        **{
            name: read(content[name])
            for name, (read, may_be_none) in _fields(kind).items()  # type: ignore[arg-type] # a class can be hashed
            if name in content and (content[name] is not None or may_be_none)
        }
    )


@cache
def _fields(kind: type) -> Mapping[str, tuple[_Reader, bool]]:
    """Return how each field is read, and whether it may be None: the types are looked at once, not for each value."""
    return {name: (_reader(hint), type(None) in get_args(hint)) for name, hint in get_type_hints(kind).items()}


def _reader(hint: Any) -> _Reader:
    """Return how a field or a part of it is read. Numbers, texts and objects of any content stay as they are."""
    if is_dataclass(hint):
        return partial(from_json, hint)  # type: ignore[arg-type] # a dataclass, not an object of one
    kind, of = get_origin(hint), get_args(hint)
    if kind not in (UnionType, tuple, Mapping):
        return lambda content: content
    readers = [_reader(each) for each in of if each is not ...]
    if kind is UnionType:
        return lambda content: None if content is None else readers[0](content)
    if kind is Mapping:
        return lambda content: {name: readers[1](part) for name, part in dict(content).items()}
    if of[-1] is ...:
        return lambda content: tuple(map(readers[0], content))
    return lambda content: tuple(read(part) for read, part in zip(readers, content, strict=True))
