"""Rows of one epoch that share an ``_id``: the last one counts, and which that is must be certain.

Equal versions overwrite each other in the order of arrival, which retries and parallel requests do not
keep. So an epoch writes each ``_id`` once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from epochsink.sink import Rows


def count(rows: Rows, tasks: Sequence[str]) -> tuple[int, int]:
    """Return how many rows the tasks have, and how many of them a later row of the same ``_id`` replaces."""
    ids = pa.chunked_array(_column(rows, tasks, "id"), pa.string())
    return len(ids), len(ids) - pc.count_distinct(ids).as_py()


def survivors(rows: Rows, tasks: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return for each row of the tasks, in order, whether it is the last of its ``_id``.

    The last is the one of the highest ``rank``, then ``rank_2``, ... (NULL is lowest), and among equals, or without
    ranks, the later in its task. The spooled columns say whether there are ranks, not the options of this run.
    Raises `RowsRejected` if rows without a rank share an ``_id`` across tasks: their order is unknown.
    """
    table = _numbered(rows, tasks)
    ranks = _ranks(table.schema)
    if not ranks:
        _refuse_across_tasks(table)
    keys = [(name, "descending") for name in ranks]
    # Best first: nulls are sorted to the end, whatever the direction.
    order = pc.sort_indices(table, sort_keys=[*keys, ("number", "descending")]).to_numpy()
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    placed = table.append_column("place", pa.array(place))
    best = placed.group_by("id").aggregate([("place", "min")])["place_min"].to_numpy()
    survives = np.zeros(len(order), np.bool_)
    survives[order[best]] = True
    return survives


def _ranks(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name == "rank" or name.startswith("rank_")]


def _numbered(rows: Rows, tasks: Sequence[str]) -> pa.Table:
    parts = []
    for partition, task in enumerate(tasks):
        table = pa.Table.from_batches(batch.select(["id", *_ranks(batch.schema)]) for batch in rows.read(task))
        parts.append(table.append_column("task", pa.array(np.full(len(table), partition))))
    table = pa.concat_tables(parts)
    return table.append_column("number", pa.array(np.arange(len(table))))


def _refuse_across_tasks(table: pa.Table) -> None:
    span = table.group_by("id").aggregate([("task", "min"), ("task", "max")])
    shared = span.filter(pc.not_equal(span["task_min"], span["task_max"]))
    if len(shared):
        shown = ", ".join("{" + text for text in shared["id"][:5].to_pylist())
        raise RowsRejected(
            f"{len(shared)} document(s) have rows in several tasks of this epoch, and nothing says which is the "
            f"newest: {shown}",
            hint="give order_by= (a column or expression; the highest value wins), or make the stream bring all "
            "rows of one id in one partition",
        )


def _column(rows: Rows, tasks: Sequence[str], name: str) -> Iterator[pa.Array]:
    for task in tasks:
        for batch in rows.read(task):
            yield batch.column(name)
