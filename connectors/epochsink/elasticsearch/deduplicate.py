"""Rows of one epoch that share an ``_id``: the last one counts, and which that is must be certain.

Equal versions overwrite each other in the order of arrival, which retries and parallel requests do not
keep. So an epoch writes each ``_id`` once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochsink.elasticsearch.rows_by_id import RowsById, last, ranks
from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from epochsink.sink import Rows

MOST_HASHED: Final = 10_000_000
"""Rows whose hashes are held at once, 8 bytes each, and as much again to sort them together."""

_SHOWN: Final = 5


def count(rows: Rows, tasks: Sequence[str], total: int) -> tuple[int, int]:
    """Return how many rows the tasks have, and how many of them a later row of the same ``_id`` replaces.

    ``total`` is how many rows the tasks said they have. Raises `RowsRejected` if it is uncertain which row is the last:
    rows without a rank that share an ``_id`` across tasks, whose order is unknown.
    """
    if total <= MOST_HASHED and (counted := _counted_if_different(rows, tasks)) is not None:
        return counted, 0
    by_id = RowsById(rows, tasks, total)
    distinct = across = 0
    shown: list[str] = []
    for table in by_id.tables():
        ids = pc.count_distinct(table["id"]).as_py()
        if ids < len(table) and not ranks(table.schema):
            shared = _shared_by_tasks(table)
            across += len(shared)
            shown += shared[: _SHOWN - len(shown)].to_pylist()
        distinct += ids
    if across:
        raise RowsRejected(
            f"{across} document(s) have rows in several tasks of this epoch, and nothing says which is the newest",
            hint="give order_by= (a column or expression; the highest value wins), or make the stream bring all "
            "rows of one id in one partition",
            values=", ".join("{" + text for text in shown),
        )
    return by_id.count, by_id.count - distinct


def _counted_if_different(rows: Rows, tasks: Sequence[str]) -> int | None:
    """Return how many rows the tasks have if each has an ``_id`` of its own; None if some share one, or may.

    As most epochs' have, and it takes a fifth of what grouping them does: texts of different hashes are different.
    """
    found = [np.zeros(0, np.int64)]
    for task in tasks:
        for batch in rows.read(task):
            ids = batch.column("id").to_pylist()
            found.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            if _repeats(found[-1]):
                return None
    hashes = np.concatenate(found)
    return None if _repeats(hashes) else len(hashes)


def _repeats(hashes: npt.NDArray[np.int64]) -> bool:
    hashes.sort()
    return bool((hashes[1:] == hashes[:-1]).any())


def survivors(rows: Rows, tasks: Sequence[str], total: int) -> npt.NDArray[np.bool_]:
    """Return for each row of the tasks, in order, whether it is the last of its ``_id``.

    The last is the one of the highest ``rank``, then ``rank_2``, ... (NULL is lowest), and among equals, or without
    ranks, the later in its task. The spooled columns say whether there are ranks, not the options of this run.
    """
    by_id = RowsById(rows, tasks, total)
    survives = np.zeros(0, np.bool_)
    for table in by_id.tables():
        if not len(survives):
            survives = np.zeros(by_id.count, np.bool_)
        survives[last(table, "id")["number"].to_numpy()] = True
    return survives


def _shared_by_tasks(table: pa.Table) -> pa.ChunkedArray:
    span = table.group_by("id").aggregate([("task", "min"), ("task", "max")])
    return span.filter(pc.not_equal(span["task_min"], span["task_max"]))["id"]
