"""Rows of a small task, which its answer carries to the driver (see `epochsink.postgres.answering_writer`)."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from epochsink.sink import Committable

STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """One task's rows, as a stream of Arrow. Only the vote sees it: what is needed later is the spool's copy."""

    task: str
    partition: int
    rows: int
    stream: bytes

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches, in the order written."""
        with pa.ipc.open_stream(self.stream) as batches:
            yield from batches

    @property
    def schema(self) -> pa.Schema:
        """The schema of the record batches."""
        with pa.ipc.open_stream(self.stream) as batches:
            return batches.schema

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        stream = base64.b64encode(self.stream).decode()
        return {"task": self.task, "partition": self.partition, "rows": self.rows, STREAM: stream}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `to_json` described."""
        return cls(**{**values, STREAM: base64.b64decode(values[STREAM])})
