"""How large the record batches are that the JVM hands to a task."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from epochsink.spark.compat import byte_limit_of_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_MAX_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT: Final = str(2**31 - 1)
_GROWTH: Final = 8


class ByteLimit:
    """Lifts Spark's limit on the bytes of a record batch while rows are far too small to reach it.

    Under a limit Spark 4 measures the batch anew after every row, which takes longer than converting the row does. The
    limit is there for rows of which ``maxRecordsPerBatch`` do not fit: it stays until a first epoch has told how wide
    rows are, and comes back as soon as rows a few times wider could reach it.
    """

    def __init__(self) -> None:
        self._row_bytes: float | None = None

    def learn(self, row_bytes: float) -> None:
        """Take in the average bytes of a row in some batch; the widest counts."""
        self._row_bytes = max(row_bytes, self._row_bytes or 0.0)

    @contextmanager
    def lifted(self, session: SparkSession) -> Iterator[None]:
        """Run the body without the limit if that is safe; the session is then as it was."""
        rows = int(session.conf.get(_MAX_ROWS) or 0)
        limit = byte_limit_of_batches(session)
        # no limit on the rows (zero or less): then the bytes are the only one
        if self._row_bytes is None or rows <= 0 or _GROWTH * rows * self._row_bytes > limit:
            yield
            return
        given = session.conf.get(_MAX_BYTES, None)
        session.conf.set(_MAX_BYTES, _NO_LIMIT)
        try:
            yield
        finally:
            if given is None:
                session.conf.unset(_MAX_BYTES)
            else:
                session.conf.set(_MAX_BYTES, given)
