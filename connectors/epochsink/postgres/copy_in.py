"""A COPY of Arrow rows into a table, in PostgreSQL's binary form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Final, Self

import pgpq
import psycopg
import pyarrow as pa
from psycopg import sql

from epochsink.postgres.errors import UnfitValue
from epochsink.postgres.server import Connection
from epochsink.postgres.types import Encoding

CHUNK_BYTES: Final = 4 << 20
"""How much Arrow data is encoded at a time; the encoded form is about as large."""


class CopyIn:
    """One ``COPY ... FROM STDIN`` from the first batch to the last. Raises `psycopg.Error`, `pyarrow.ArrowInvalid`."""

    def __init__(
        self,
        connection: Connection,
        relation: sql.Identifier,
        encodings: Sequence[Encoding],
    ) -> None:
        """Begin to copy columns ``encodings``."""
        self._encodings = encodings
        self._schema = pa.schema([encoding.field for encoding in encodings])
        builders = {encoding.field.name: encoding.builder() for encoding in encodings}
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(self._schema, builders)
        names = sql.SQL(", ").join(sql.Identifier(name) for name in self._schema.names)
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(relation, names)
        self._cursor = connection.cursor()
        self._stack = ExitStack()
        self._copy = self._stack.enter_context(self._cursor.copy(statement))
        self._copy.write(self._encoder.write_header())
        self.sent = 0

    def write(self, batch: pa.RecordBatch, *last: pa.Scalar | pa.Array) -> None:
        """Send a batch whose columns are the encodings'. The ``last`` ones have a value for all rows, or an array."""
        for start, piece in _pieces(batch):
            given = zip(self._encodings, piece.columns, strict=False)
            arrays = [_converted(encoding, column) for encoding, column in given]
            arrays += [
                value.slice(start, piece.num_rows) if isinstance(value, pa.Array) else pa.repeat(value, piece.num_rows)
                for value in last
            ]
            self._copy.write(self._encoder.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema)))
            self.sent += piece.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self.cancel()

    def finish(self) -> int:
        """End the COPY; return how many rows the server counted."""
        self._copy.write(self._encoder.finish())
        self._stack.close()
        return self._cursor.rowcount

    def cancel(self) -> None:
        """Give the COPY up, if it has not ended."""
        with suppress(psycopg.Error):
            # with an error psycopg sends CopyFail; without one it would end the COPY as if all rows had come
            given_up = psycopg.OperationalError("the task gave up")
            self._stack.__exit__(type(given_up), given_up, None)


def _converted(encoding: Encoding, column: pa.Array) -> pa.Array:
    try:
        return encoding.convert(column)
    except pa.ArrowInvalid as error:
        raise UnfitValue(encoding.field.name, str(error)) from error


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    rows = max(1, batch.num_rows * CHUNK_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield start, batch.slice(start, rows)
