"""Check the rows of a task. Nothing is written to the server, because the spool is the redo log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.elasticsearch import bulk_body, row_mapping
from epochsink.elasticsearch.committable import WrittenTask
from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    import pyarrow as pa

    from epochsink.elasticsearch.preflight import Validator
    from epochsink.sink import Committable, Task

_LONGEST_ID: Final = 512
_ENVELOPE: Final = len('"_id":""}')


class ElasticsearchWriter:
    """Counts one task's rows and refuses those that no server would accept.

    ``validator`` asks the server; None means that it is not asked. ``by_task`` as in `WrittenTask`.
    """

    def __init__(self, task: Task, validator: Validator | None = None, *, by_task: bool = False) -> None:
        self._task = task
        self._by_task = by_task
        self._validator = validator
        self._rows = 0
        self._largest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Check a record batch. Raises `RowsRejected` and, with a validator, `PrepareFailed`."""
        if "id" in batch.schema.names:
            check_ids(batch.column("id"))
        check_sources(batch.column("source"))
        if self._validator is not None:
            self._validate(self._validator, batch)
        self._rows += batch.num_rows
        self._largest = max(self._largest, pc.max(pc.binary_length(batch.column("source"))).as_py() or 0)

    def prepare(self) -> Committable:
        """Return the committable for the spooled rows."""
        return WrittenTask(self._task.uuid, self._rows, self._largest, self._by_task).to_json()

    def abort(self) -> None:
        """Do nothing: only the spool was written."""

    def _validate(self, validator: Validator, batch: pa.RecordBatch) -> None:
        indexed = batch.filter(pc.is_valid(batch.column("source")))
        if indexed.num_rows == 0:
            return
        keyed = "id" in batch.schema.names
        ids = indexed.column("id") if keyed else bulk_body.position_ids("row ", self._rows, len(indexed))
        validator.validate(ids, indexed.column("source"))


def check_ids(ids: pa.Array) -> None:
    """Refuse ids that are NULL, empty or too long. Raises `RowsRejected`."""
    lengths = pc.fill_null(pc.binary_length(ids), arrow_buffers.number(0, "int32"))
    shortest, longest = (arrow_buffers.number(_ENVELOPE + length, "int32") for length in (0, _LONGEST_ID))
    unusual = pc.or_(pc.less_equal(lengths, shortest), pc.greater(lengths, longest))
    for text in ids.filter(unusual).to_pylist():
        found = json.loads("{" + (text or "}")).get("_id")
        if not found or len(found.encode()) > _LONGEST_ID:
            missing = "a row has no _id: its key is NULL, or not valid UTF-8"
            what = missing if found is None else f"a row has an _id of {len(found.encode())} bytes"
            raise RowsRejected(
                f"{what}; it must have 1 to {_LONGEST_ID} bytes",
                hint="leave such rows out with where=, give a key= expression that is never NULL, "
                "or a digest of long ones, e.g. key='sha2(url, 256)'",
                values="" if found is None else f"_id {found!r}",
            )


def check_sources(sources: pa.Array) -> None:
    """Refuse rows whose ``source`` is not a document but the reason: a map has a key that no index accepts.

    Raises `RowsRejected`.
    """
    refused = sources.filter(pc.invert(pc.starts_with(sources, "{")))
    if len(refused):
        raise RowsRejected(
            f"{len(refused)} row(s) hold a map with a key that no index accepts: duplicate, with a NUL, not valid "
            f"UTF-8, or longer than {row_mapping.PATH_BYTES} bytes together with the keys around it",
            hint="remove such keys in select=, e.g. with map_filter(m, (k, v) -> ...) or transform_keys(...), or store "
            "the map as text with to_json(m)",
            values=str(refused[0]),
        )
