"""Check that Spark's executors can run the tasks of a query.

One task checks each application before any row moves. Executors that join later have not been checked: so each task
compares the version of epochsink before it unpickles what the driver sent.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochsink import __version__
from epochsink.errors import ConfigurationError
from epochsink.spark.error_translation import reason_of
from epochsink.spark.write_task import other_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# applications and their Pythons: the check is a Spark job, too slow for each start
_checked: set[tuple[str, str]] = set()


def refuse_bare_executors(session: SparkSession) -> None:
    """Raise `ConfigurationError` if the Python of an executor lacks what a task needs."""
    context = session.sparkContext
    python_key = str(context.applicationId), str(context.pythonExec)
    if python_key in _checked:
        return
    try:
        [(python, missing, version)] = context.parallelize([0], 1).map(_probe()).collect()
    except (Py4JError, PySparkException) as failure:
        raise ConfigurationError(
            f"the executors cannot run Python ({context.pythonExec}): {reason_of(str(failure))[:1000]}",
            hint="set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that every executor has",
        ) from failure
    if missing:
        raise ConfigurationError(
            f"the executors' Python {python} lacks {' and '.join(missing)}, so that no task could write a row",
            hint="on a cluster, install epochsink with the extras of your sinks in that Python on every host; if the "
            "executors run on this machine, type this and start again:\n"
            f"export PYSPARK_PYTHON={shlex.quote(sys.executable)}",
        )
    if version != __version__:
        raise other_version(f"the executors' Python {python}", version)
    _checked.add(python_key)


def _probe() -> Callable[[int], tuple[str, list[str], str]]:
    def look(_: int) -> tuple[str, list[str], str]:
        # pickled as code, as above
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
