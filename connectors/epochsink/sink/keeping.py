"""A committer whose target may itself keep what tasks write, so that no copy of it has to be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from epochsink.sink.contract import SinkCommitter

if TYPE_CHECKING:
    import pyarrow as pa

    from epochsink.sink.values import Epoch


class KeepingCommitter(SinkCommitter, Protocol):
    """The committer of a sink whose `Sink.spool` may be None."""

    def keeps_rows(self, epoch: Epoch, schema: pa.Schema) -> bool:
        """Whether the target keeps what tasks are about to write in this attempt, until its epoch is done.

        Where it does, `vote` and `replay` need no spool. Asked by the stream's thread just before the write job, if
        `Sink.spool` is None; ``schema`` as in `check`. Must not raise: what is not known speaks for the spool.
        """
