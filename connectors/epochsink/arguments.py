"""Check the arguments of all sinks: an error names the argument, its value, the rule and what to write."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from epochsink.errors import ConfigurationError

_Owner = TypeVar("_Owner")
_NAMED = re.compile(r"(.+)\s+as\s+(`?)(.+?)\2\s*", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(r"(\w+)|`((?:[^`]|``)+)`|\*")


def expressions(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one or several SQL expressions as a tuple; a string is one expression, None is none.

    Raises `ConfigurationError`.
    """
    if value is None:
        return ()
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, (bytes, Mapping)):
        raise _wrong(name, value, "a string or a list of strings", f"{name}='order_id' or {name}=['a', 'b']")
    texts = tuple(given)
    for each in texts:
        if not isinstance(each, str) or not each.strip():
            raise _wrong(name, value, "a string or a list of strings, none of them empty", f"{name}=['a', 'b']")
    if not texts:
        raise ConfigurationError(f"{name}=[] is empty", hint=f"leave {name}= out, or name at least one")
    return texts


def origin(select: Sequence[str], column: str) -> str | None:
    """Return the expression over the stream's columns that ``select`` names ``column``; None if none is named so."""
    quoted = f"`{column.replace('`', '``')}`"
    for expression in select:
        named = _NAMED.fullmatch(expression)
        if named and named[3].replace("``", "`") == column:
            return named[1]
        if _PLAIN.fullmatch(expression.strip()) and expression.strip() in (column, quoted, "*"):
            return quoted
    return None


def says_all_names(select: Sequence[str]) -> bool:
    """Return whether each expression is only a name, or has a name by AS."""
    return all(_NAMED.fullmatch(expression) or _PLAIN.fullmatch(expression.strip()) for expression in select)


def text(name: str, value: str) -> str:
    """Return a string that is not blank. Raises `ConfigurationError`."""
    if not isinstance(value, str) or not value.strip():
        raise _wrong(name, value, "a string that is not empty", f"{name}='...'")
    return value


def optional_text(name: str, value: str | None) -> str | None:
    """Return a string that is not blank, or None. Raises `ConfigurationError`."""
    return None if value is None else text(name, value)


def flag(name: str, value: bool) -> bool:  # noqa: FBT001 - it checks a flag
    """Return a bool; "no", 0 and the like are refused. Raises `ConfigurationError`."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False", f"{name}=True")
    return value


def seconds(name: str, value: float) -> float:
    """Return a positive number of seconds. Raises `ConfigurationError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise _wrong(name, value, "a positive number of seconds", f"{name}=60")
    return float(value)


def duration(name: str, value: str | None) -> float:
    """Return the seconds of a text such as "90s", "30m", "24h" or "7d"; 0 for None. Raises `ConfigurationError`."""
    if value is None:
        return 0.0
    match = re.fullmatch(r"([1-9]\d{0,8})([smhd])", value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(name, value, 'a duration such as "90s", "30m", "24h" or "7d"', f'{name}="24h"')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def share(name: str, value: float) -> float:
    """Return a number from 0 to 1. Raises `ConfigurationError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _wrong(name, value, "a number from 0 to 1", f"{name}=0.01")
    return float(value)


def count(name: str, value: int, *, lowest: int = 1) -> int:
    """Return a whole number of at least ``lowest``. Raises `ConfigurationError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise _wrong(name, value, f"a whole number of at least {lowest}", f"{name}={max(lowest, 2)}")
    return value


def choice(name: str, value: str, allowed: Collection[str]) -> str:
    """Return one of the allowed words. Raises `ConfigurationError`."""
    if value not in allowed:
        quoted = ", ".join(f"'{each}'" for each in allowed)
        raise _wrong(name, value, f"one of {quoted}", f"{name}='{next(iter(allowed))}'")
    return value


def mapping(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with text keys as a dict. Raises `ConfigurationError`."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, "a dict with text keys", f"{name}={{'name': 'value'}}")
    return dict(value)


def checked_names(owner: type[_Owner]) -> type[_Owner]:
    """Decorate a class: a call of its constructor with unknown or missing names raises `ConfigurationError`.

    Type checkers and `inspect` still see the constructor's own signature.
    """
    construct: Callable[..., None] = vars(owner).get("__init__") or owner.__init__
    signature = inspect.signature(construct)
    known = tuple(signature.parameters)[1:]

    @functools.wraps(construct)
    def checked(self: _Owner, *positional: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise _unknown(owner.__name__, name, known)
        try:
            signature.bind(self, *positional, **given)
        except TypeError as wrong:
            raise ConfigurationError(f"{owner.__name__}(...): {wrong}", hint=_listed(known)) from None
        construct(self, *positional, **given)

    owner.__init__ = checked  # type: ignore[method-assign, assignment] # the same signature, checked first
    return owner


def _unknown(owner: str, name: str, known: Sequence[str]) -> ConfigurationError:
    near = [f"{each}=" for each in difflib.get_close_matches(name, known, 2)]
    hint = f"did you mean {' or '.join(near)}?" if near else _listed(known)
    # people pass settings of the vendor's client beside the arguments: password=, api_key=, ...
    setting = f"; settings of the client go into options={{'{name}': ...}}" if "options" in known else ""
    return ConfigurationError(f"{owner}({name}=...): there is no such argument", hint=hint + setting)


def _listed(known: Sequence[str]) -> str:
    return f"the arguments are: {', '.join(sorted(known))}"


def require_package(owner: str, extra: str, *packages: str) -> None:
    """Raise `ConfigurationError`, which names the extra to install, if a package is missing here."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigurationError(
            f"{owner} needs the package(s) {', '.join(missing)}, which this Python lacks",
            hint=f'pip install "epochsink[{extra}]", on the driver and on every executor',
        )


def _wrong(name: str, value: object, rule: str, example: str) -> ConfigurationError:
    return ConfigurationError(f"invalid {name}={value!r}: expected {rule}", hint=f"for example {example}")
