"""Import the sinks of a query from the user's code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Final

from epochsink.errors import ConfigurationError
from epochsink.sink import Sink

_FORM: Final = "name an ExactlyOnce object or a dict of sinks, for example pipeline:sink for 'sink' in pipeline.py"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Sinks by name; the rest is that of an `ExactlyOnce` object, if one was named."""

    sinks: Mapping[str, Sink]
    checkpoint: str | None = None
    spool: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def load_sinks(reference: str) -> Loaded:
    """Import ``module:attribute``: an `ExactlyOnce` object, or a mapping of names to sinks.

    The current folder comes first on the import path, as for ``python -m``. To be called inside of
    `epochsink.spark.import_guard.no_queries`: a module may start its query when it is imported. Raises
    `ConfigurationError`.
    """
    value = imported(reference)
    if isinstance(value, Mapping):
        for name, sink in value.items():
            if not isinstance(name, str) or not callable(getattr(sink, "participant", None)):
                raise ConfigurationError(f"--sinks {reference}: {name!r} is not the name of a sink", hint=_FORM)
        if not value:
            raise ConfigurationError(f"--sinks {reference} is empty", hint=_FORM)
        return Loaded(value)
    from epochsink.spark.exactly_once import ExactlyOnce  # noqa: PLC0415 - imports Spark, which a mapping does not need

    if isinstance(value, ExactlyOnce):
        return Loaded(value.sinks, value.checkpoint, value.spool, value.storage_options)
    raise ConfigurationError(f"--sinks {reference} is of type {type(value).__name__}", hint=_FORM)


def imported(reference: str, option: str = "--sinks") -> Any:
    """Return what ``module:attribute`` names, which ``option`` gives. Raises `ConfigurationError`."""
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"{option} {reference!r} is not of the form module:attribute", hint=_FORM)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        resolve_name(f"{module}:")
    except ConfigurationError:
        # it names the mistake itself
        raise
    except (Exception, SystemExit) as failure:
        raise ConfigurationError(
            f"{option}: importing {module} failed: {type(failure).__name__}: {failure}",
            hint="run this in the folder that holds the module, or name that folder in PYTHONPATH; keep the sinks "
            "in a module that does nothing else when it is imported",
        ) from failure
    try:
        return resolve_name(reference)
    except (AttributeError, ValueError) as absent:
        raise ConfigurationError(f"{option} {reference}: {absent}", hint=_FORM) from absent
