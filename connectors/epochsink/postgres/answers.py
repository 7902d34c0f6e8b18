"""What a task answers that has staged nothing: its rows, or that they are in the spool."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

from epochsink.errors import PrepareFailed, SpoolMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from epochsink.sink import Committable, Rows

STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """One task's rows, as a stream of Arrow, which holds their schema alone if they are only ``spooled``.

    Nobody but the vote sees it: what is needed later is the spool's copy.
    """

    task: str
    partition: int
    rows: int
    stream: bytes
    spooled: bool = False

    def read(self, spool: Rows) -> Iterator[pa.RecordBatch]:
        """Yield the record batches, in the order written. Raises `PrepareFailed` if the spool lacks them."""
        if self.spooled:
            try:
                yield from spool.read(self.task)
            except (OSError, SpoolMissing) as unread:
                raise PrepareFailed(
                    f"what task {self.task} has spooled cannot be read back: {unread}",
                    hint="Spark runs the epoch again, which writes it anew",
                ) from unread
            return
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
        return {
            "task": self.task,
            "partition": self.partition,
            "rows": self.rows,
            STREAM: stream,
            "spooled": self.spooled,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `to_json` described."""
        return cls(**{**values, STREAM: base64.b64decode(values[STREAM])})
