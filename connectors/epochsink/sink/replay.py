"""Write the rows of one task again, in the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from epochsink.sink.contract import SinkWriter
    from epochsink.sink.values import Committable


def write_all(writer: SinkWriter, batches: Iterable[pa.RecordBatch]) -> Committable:
    """Write and prepare the rows of one task, for example in `Participant.replay`; abort if that fails."""
    try:
        for batch in batches:
            writer.write(batch)
        return writer.prepare()
    except BaseException:
        writer.abort()
        raise
