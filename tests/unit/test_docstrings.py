"""Every public method says what it does, itself or in what it overrides; ruff's D102 knows no overriding."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import epochsink

OPTIONAL = "epochsink.metrics"
"""Needs an extra that the tests may lack."""


def classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(epochsink.__path__, "epochsink."):
        if module.name == OPTIONAL:
            continue
        for value in vars(import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name and not value.__name__.startswith("_"):
                yield value


def is_described(owner: type, name: str) -> bool:
    for base in owner.__mro__:
        member = vars(base).get(name)
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if getattr(function, "__doc__", None):
            return True
    return False


def test_every_public_method_is_described() -> None:
    bare = {
        f"{owner.__module__}.{owner.__name__}.{name}"
        for owner in classes()
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | staticmethod | classmethod))
        if not owner.__module__.startswith("epochsink.testing.sink_contract") and not is_described(owner, name)
    }
    assert bare == set()
