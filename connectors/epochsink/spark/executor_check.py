"""Refuse executors whose Python cannot run the tasks.

One task checks that once for each application, before any row moves. Executors that join later are not seen by it: so
each task compares the version of epochsink before it unpickles what the driver sent.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Final, TypeVar

from py4j.protocol import Py4JError
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from epochsink import __version__
from epochsink.errors import ConfigurationError
from epochsink.spark.error_translation import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

Given = TypeVar("Given")
Answer = TypeVar("Answer")

_FOUND: Final = "<found>"

_checked: set[tuple[str, str]] = set()


def with_same_version(function: Callable[[Given], Answer]) -> Callable[[Given], Answer]:
    """Return a function for tasks that calls ``function`` in a process with the driver's version of epochsink.

    With another version it fails with `ConfigurationError`, in the text of the task's error.
    """
    # bytes, until the versions are compared: dataclasses are unpickled by the position of their fields, and a field
    # that only one version has would shift the others
    sealed = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    expected, unset = __version__, _FOUND
    refusal = _other_version("an executor", _FOUND).to_line()

    def run(given: Given) -> Answer:
        # a function inside a function is pickled as code, and so does not need this module on the executor
        import pickle  # noqa: PLC0415

        import epochsink  # noqa: PLC0415

        if epochsink.__version__ != expected:
            raise RuntimeError(refusal.replace(unset, epochsink.__version__))
        answer: Answer = pickle.loads(sealed)(given)  # noqa: S301 - the driver's own
        return answer

    return run


def _other_version(place: str, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"{place} has epochsink {found}, and the driver has {__version__}: a task would misread what the driver sends",
        hint=f"install epochsink {__version__} in the Python of every executor (PYSPARK_PYTHON), then start the query "
        "again; no row of the epoch is visible",
    )


def refuse_bare_executors(session: SparkSession) -> None:
    """Raise `ConfigurationError` if the Python of an executor lacks what a task needs."""
    context = session.sparkContext
    asked = str(context.applicationId), str(context.pythonExec)
    if asked in _checked:
        return
    try:
        [(python, missing, found)] = context.parallelize([0], 1).map(_probe()).collect()
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
    if found != __version__:
        raise _other_version(f"the executors' Python {python}", found)
    _checked.add(asked)


def _probe() -> Callable[[int], tuple[str, list[str], str]]:
    def look(_: int) -> tuple[str, list[str], str]:
        # a function inside a function travels as code: to be found by name, it would need this very package there
        import importlib  # noqa: PLC0415
        import sys  # noqa: PLC0415

        missing = []
        for name in ("epochsink", "pyarrow", "numpy"):
            try:
                importlib.import_module(name)
            except ImportError:
                missing.append(name)
        return sys.executable, missing, getattr(sys.modules.get("epochsink"), "__version__", "")

    return look
