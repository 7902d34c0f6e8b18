"""What an epoch does to its index: the bulk requests of one task's rows, the same in each run and each process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from epochsink.elasticsearch import bulk_body
from epochsink.identity import document_id_prefix, identity_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.sink import Epoch, Identity, Rows


class Operations:
    """Renders the rows of one task. ``seen`` and ``keyed``, known once all are rendered, are its rows and their kind.

    ``partition`` is the task's place in the epoch, ``size`` the bytes of a request.
    """

    def __init__(self, identity: Identity, epoch: Epoch, partition: int, task: str, *, size: int) -> None:
        self._prefix = f"{document_id_prefix(identity_key(identity), epoch.number)}{partition}-"
        self._version = identity.origin["base"] + epoch.number
        self._task = task
        self._size = size
        self.seen = 0
        self.keyed = False

    def requests(self, rows: Rows, survives: npt.NDArray[np.bool_] | None) -> Iterator[Request]:
        """Yield requests; of the rows only those that survive, one flag for each, where not all do."""
        heads = bulk_body.action_heads(version=self._version, version_type="external_gte")
        for batches in _gathered(rows.read(self._task), self._size):
            count = sum(map(len, batches))
            sources = pa.concat_arrays([batch.column("source") for batch in batches])
            # The spool says whether there is a key: a later start with other options must not change that.
            self.keyed = "id" in batches[0].schema.names
            if self.keyed:
                ids = pa.concat_arrays([batch.column("id") for batch in batches])
            else:
                ids = bulk_body.position_ids(self._prefix, self.seen, count)
            if survives is not None:
                mask = pa.array(survives[self.seen : self.seen + count])
                ids, sources = ids.filter(mask), sources.filter(mask)
            yield from bulk_body.cut(bulk_body.render(ids, sources, heads), self._size)
            self.seen += count


def _gathered(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield small batches together, at least ``size`` bytes of them."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(each.nbytes for each in gathered) >= size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
