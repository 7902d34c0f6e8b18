"""Refuse to start queries where user's code is only looked at: by the command line, or by a declarative pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from epochsink.errors import ConfigurationError, UnsupportedQuery

# of the whole process: Spark calls foreachBatch in a thread of its own, where a context variable would not be seen
_forbidden: list[str] = []


@contextmanager
def no_queries(reason: str) -> Iterator[None]:
    """Refuse to start or to serve a query in this process; ``reason`` completes "this process ..."."""
    _forbidden.append(reason)
    try:
        yield
    finally:
        _forbidden.remove(reason)


def refuse_query() -> None:
    """Raise `ConfigurationError` inside of `no_queries`, and `UnsupportedQuery` in the definitions of a pipeline."""
    if _defines_pipeline():
        raise UnsupportedQuery(
            "a streaming query is started in the definitions of a declarative pipeline, which run for a dry run too, "
            "and whose session would end the query; no row has moved",
            hint="start it in a program of its own, which may read the pipeline's tables: spark.readStream.table(...)",
        )
    if _forbidden:
        raise ConfigurationError(
            f"a streaming query is started where none may run: this process {_forbidden[-1]}; no row has moved",
            hint='start the query below `if __name__ == "__main__":` or in a function, so that importing the module '
            "does not run the pipeline",
        )


def _defines_pipeline() -> bool:
    # PySpark has it from 4.1 on, and running a declarative pipeline imports it
    pipelines = sys.modules.get("pyspark.pipelines.graph_element_registry")
    if pipelines is None:
        return False
    from pyspark.errors import PySparkException  # noqa: PLC0415 - commands that start no query run without PySpark

    try:
        pipelines.get_active_graph_element_registry()
    except PySparkException:
        return False
    return True
