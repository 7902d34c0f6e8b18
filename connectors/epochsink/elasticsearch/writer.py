"""Check the rows of a task. Nothing is written to the server, because the spool is the redo log."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from epochsink.elasticsearch import bulk_body
from epochsink.elasticsearch.committable import WrittenTask
from epochsink.elasticsearch.config import MARKERS, MOST_INDICES, NAME_RULE, is_index_name
from epochsink.elasticsearch.unfit import unfit_ids, unfit_routings, unfit_values
from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from epochsink.elasticsearch.preflight import Validator
    from epochsink.sink import Committable, Task

_ID_HINT: Final = (
    "leave such rows out with where=, give a key= expression that is never NULL, or a digest of long ones, e.g. "
    "key='sha2(url, 256)'; or set them aside with on_rejected=\"dead_letter\""
)
_ROUTING_HINT: Final = (
    "leave such rows out with where=, or give routing= an expression that is never NULL, e.g. "
    'routing="coalesce(region, \'none\')"; or set them aside with on_rejected="dead_letter"'
)
_VALUE_HINT: Final = (
    "leave such rows out with where=, or correct the column in select=, e.g. a text with make_valid_utf8(t), a map "
    "with map_filter(m, (k, v) -> ...) or to_json(m), a VARIANT with CAST(v AS STRING); or set such rows aside with "
    'on_rejected="dead_letter"'
)


class ElasticsearchWriter:
    """Counts one task's rows and refuses those that no server would accept.

    ``validator`` asks the server; None means that it is not asked. ``by_task`` as in `WrittenTask`. Rows with an
    invalid id, routing, key of a map or name of an index are accepted only if they can become ``dead_letters``, which
    is the name of their index.
    """

    def __init__(
        self,
        task: Task,
        validator: Validator | None = None,
        *,
        by_task: bool = False,
        dead_letters: str | None = None,
    ) -> None:
        self._task = task
        self._by_task = by_task
        self._validator = validator
        self._dead_letters = dead_letters
        self._indices: dict[str, None] = {}
        self._rows = 0
        self._unfit = 0
        self._largest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Check a record batch. Raises `RowsRejected` and, with a validator, `PrepareFailed`."""
        self._take_unfit(batch)
        if "index" in batch.schema.names:
            self._take_indices(batch.column("index"))
        if self._validator is not None:
            self._validate(self._validator, batch)
        self._rows += batch.num_rows
        self._largest = max(self._largest, pc.max(pc.binary_length(batch.column("source"))).as_py() or 0)

    def prepare(self) -> Committable:
        """Return the committable for the spooled rows."""
        indices = tuple(self._indices)
        return WrittenTask(self._task.uuid, self._rows, self._largest, self._by_task, indices, self._unfit).to_json()

    def abort(self) -> None:
        """Do nothing: only the spool was written."""

    def _take_unfit(self, batch: pa.RecordBatch) -> None:
        """Count the rows that no request can hold, or refuse them if they cannot become dead letters."""
        wrong: set[int] = set()
        for name, unfit, hint in (
            ("source", unfit_values, _VALUE_HINT),
            ("id", unfit_ids, _ID_HINT),
            ("routing", unfit_routings, _ROUTING_HINT),
        ):
            for row in unfit(batch.column(name)) if name in batch.schema.names else ():
                if self._dead_letters is None:
                    raise RowsRejected(row.reason, hint=hint, values=row.value)
                wrong.add(row.place)
        self._unfit += len(wrong)

    def _take_indices(self, names: pa.Array) -> None:
        for value in pc.unique(names):
            name = bulk_body.shown_text(value)
            if name is not None and is_index_name(name) and name not in (self._dead_letters, MARKERS):
                self._indices[name] = None
            elif self._dead_letters is None:
                raise RowsRejected(
                    "index_by= gives NULL, or a text that is not the name of an index for documents",
                    hint=f"{NAME_RULE}; leave such rows out with where=, correct index_by= (lower(...), "
                    'coalesce(...)), or set them aside with on_rejected="dead_letter"',
                    values=f"index {name!r}",
                )
        # here and not at the vote: a task that goes on would spool millions of rows for an epoch that cannot be
        # recorded
        if len(self._indices) > MOST_INDICES:
            raise too_many_indices(self._indices)

    def _validate(self, validator: Validator, batch: pa.RecordBatch) -> None:
        indexed = batch.filter(pc.is_valid(batch.column("source")))
        if indexed.num_rows == 0:
            return
        keyed = "id" in batch.schema.names
        ids = indexed.column("id") if keyed else bulk_body.position_ids("row ", self._rows, len(indexed))
        if "routing" in batch.schema.names:
            ids = bulk_body.routed(indexed.column("routing"), ids)
        validator.validate(ids, indexed.column("source"))


def too_many_indices(names: Collection[str]) -> RowsRejected:
    """Return the error for an epoch that touches more indices than its record may name."""
    return RowsRejected(
        f"one epoch touches more than {MOST_INDICES} indices",
        hint="make epochs smaller (for example with maxOffsetsPerTrigger), or let index_by= give fewer names, e.g. one "
        "for each month instead of each day",
        values=", ".join(sorted(names)[:5]),
    )
