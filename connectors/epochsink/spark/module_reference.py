"""Find the name by which the command line reaches the sinks of a pipeline: ``--sinks MODULE:ATTRIBUTE``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_OWN: Final = __name__.partition(".")[0]


def reference_to(pipeline: object, sinks: Mapping[str, Any]) -> str:
    """Return MODULE:ATTRIBUTE of an `ExactlyOnce` object, else of a mapping with its sinks; "" if no module has one.

    An object that a function has made has no such name.
    """
    names = ""
    # other threads import modules meanwhile
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == _OWN:
            continue
        for attribute, value in list(vars(module).items()):
            if value is pipeline:
                return _reference(name, module, attribute)
            if not names and type(value) is dict and _same(value, sinks):
                names = _reference(name, module, attribute)
    return names


def _same(value: Mapping[Any, Any], sinks: Mapping[str, Any]) -> bool:
    # by identity: anything may be in a module's dict, and it may define equality
    return len(value) == len(sinks) and all(value.get(name) is sink for name, sink in sinks.items())


def _reference(name: str, module: ModuleType, attribute: str) -> str:
    """Return the name under which another process imports a module: what Python runs is ``__main__`` only here."""
    if name != "__main__":
        return f"{name}:{attribute}"
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return f"{spec.name}:{attribute}"
    stem = Path(file).stem if file else ""
    return f"{stem}:{attribute}" if stem.isidentifier() else ""
