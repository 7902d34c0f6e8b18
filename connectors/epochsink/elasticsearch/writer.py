"""The executor's side: the redo log is the spool, so a task only looks at its rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.elasticsearch import bulk_body, dry_run
from epochsink.elasticsearch.backoff import GaveUp
from epochsink.errors import PrepareFailed, RowsRejected

if TYPE_CHECKING:
    from epochsink.elasticsearch.bulk_request import Poster
    from epochsink.sink import Committable, Task

_LONGEST_ID: Final = 512
_ENVELOPE: Final = len('"_id":""}')


class ElasticsearchWriter:
    """Counts one task's rows and refuses those that no server would take.

    ``validator`` posts to the target without writing; None where the server is not asked.
    """

    def __init__(self, task: Task, validator: Poster | None, bulk_bytes: int) -> None:
        self._task = task
        self._validator = validator
        self._bulk_bytes = bulk_bytes
        self._rows = 0
        self._largest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Look at a record batch. Raises `RowsRejected` and, with a validator, `PrepareFailed`."""
        if "id" in batch.schema.names:
            check_ids(batch.column("id"))
        if self._validator is not None:
            self._validate(self._validator, batch)
        self._rows += batch.num_rows
        self._largest = max(self._largest, pc.max(pc.binary_length(batch.column("source"))).as_py() or 0)

    def prepare(self) -> Committable:
        """Name what the machine has spooled."""
        return {"task": self._task.uuid, "rows": self._rows, "largest": self._largest}

    def abort(self) -> None:
        """Do nothing: nothing was written but the spool."""

    def _validate(self, validator: Poster, batch: pa.RecordBatch) -> None:
        indexed = batch.filter(pc.is_valid(batch.column("source")))
        if indexed.num_rows == 0:
            return
        ids = (
            indexed.column("id")
            if "id" in batch.schema.names
            else bulk_body.position_ids("row ", self._rows, len(indexed))
        )
        try:
            for request in bulk_body.cut(dry_run.request(ids, indexed.column("source")), self._bulk_bytes):
                if refused := dry_run.refused(validator, request):
                    raise rejected(refused, "validate=True found it before the checkpoint; nothing was written")
        except GaveUp as error:
            raise PrepareFailed(f"the server could not validate the rows: {error}") from error


def rejected(refused: list[Any], state: str) -> RowsRejected:
    """Return the error that shows the first refused documents, and how many more there are."""
    shown = "\n".join(f"    _id {each.id!r}: {each.kind}: {each.reason}" for each in refused[:5])
    return RowsRejected(
        f"Elasticsearch refuses {len(refused)} document(s) for good:\n{shown}\n  {state}",
        hint="correct the mapping (or the rows, by select= or where=) and start the query again, or give "
        'on_rejected="dead_letter" with dead_letter_index= to set such documents aside',
        ids=[each.id for each in refused[:100]],
    )


def check_ids(ids: pa.Array) -> None:
    """Refuse ids that are NULL, empty or too long. Raises `RowsRejected`."""
    lengths = pc.fill_null(pc.binary_length(ids), arrow_buffers.number(0, "int32"))
    shortest, longest = (arrow_buffers.number(_ENVELOPE + length, "int32") for length in (0, _LONGEST_ID))
    unusual = pc.or_(pc.less_equal(lengths, shortest), pc.greater(lengths, longest))
    for text in ids.filter(unusual).to_pylist():
        found = json.loads("{" + (text or "}")).get("_id")
        if not found or len(found.encode()) > _LONGEST_ID:
            raise RowsRejected(
                f"a row has the _id {found!r}; it must have 1 to {_LONGEST_ID} bytes",
                hint="leave such rows out with where=, give an id= expression that is never NULL, "
                "or a digest of long ones, e.g. id='sha2(url, 256)'",
            )
