"""A committer whose vote can take rows from the spool, so that tasks need not prepare what they have spooled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from epochsink.sink.contract import SinkCommitter

if TYPE_CHECKING:
    import pyarrow as pa


@runtime_checkable
class SpoolReadingCommitter(SinkCommitter, Protocol):
    """The committer of a sink whose writers heed `Task.from_spool`."""

    def votes_from_spool(self, schema: pa.Schema) -> bool:
        """Whether tasks may leave rows of this attempt to the spool, from which `vote` takes them.

        Asked by the stream's thread just before the write job, for a sink whose rows are spooled and that votes alone;
        ``schema`` as in `check`. Must not raise: what is not known speaks against it.
        """
