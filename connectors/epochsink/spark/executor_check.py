"""Can the executors' Python run the tasks? Asked once an application, by a task of its own, before any row moves."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochsink.errors import ConfigurationError
from epochsink.spark.error_translation import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

_checked: set[tuple[str, str]] = set()


def refuse_bare_executors(session: SparkSession) -> None:
    """Raise `ConfigurationError` if the Python of an executor lacks what a task needs."""
    context = session.sparkContext
    asked = str(context.applicationId), str(context.pythonExec)
    if asked in _checked:
        return
    try:
        [(python, missing)] = context.parallelize([0], 1).map(_probe()).collect()
    except (Py4JError, PySparkException) as failure:
        raise ConfigurationError(
            f"the executors cannot run Python ({context.pythonExec}): {reason_of(str(failure))[:1000]}",
            hint="set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that every executor has",
        ) from failure
    if missing:
        raise ConfigurationError(
            f"the executors' Python {python} has no {' and no '.join(missing)}, so that no task could write a row",
            hint="on a cluster, install epochsink with the extras of your sinks in that Python on every host; if the "
            "executors run on this machine, type this and start again:\n"
            f"export PYSPARK_PYTHON={shlex.quote(sys.executable)}",
        )
    _checked.add(asked)


def _probe() -> Callable[[int], tuple[str, list[str]]]:
    def look(_: int) -> tuple[str, list[str]]:
        # a function inside a function travels as code: to be found by name, it would need this very package there
        import importlib  # noqa: PLC0415
        import sys  # noqa: PLC0415

        missing = []
        for name in ("epochsink", "pyarrow", "numpy"):
            try:
                importlib.import_module(name)
            except ImportError:
                missing.append(name)
        return sys.executable, missing

    return look
