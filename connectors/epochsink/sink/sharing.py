"""Several sinks of one query that prepare an epoch in one transaction of their target, so that it commits as one.

What they prepare is one committable. Each of them records it, with ``members``: by the sink's name, that sink's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from epochsink.sink.contract import SinkCommitter

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from epochsink.sink.contract import Rows
    from epochsink.sink.values import Committable, Epoch, LastDone

MEMBERS: Final = "members"


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one of these sinks brings along: see `SinkCommitter.vote` and `SinkCommitter.replay`.

    ``written`` is empty where a part is prepared again.
    """

    committer: SinkCommitter
    written: Sequence[Committable]
    rows: Rows
    after: LastDone | None


class SharingCommitter(SinkCommitter, Protocol):
    """A committer whose share of an epoch may go into one transaction with the shares of others of its group.

    `commit` gets the same part once for each sink, and answers each time what became of that sink's share. Ballots come
    in the order in which the query names its sinks, the first one's committer is called.
    """

    @property
    def group(self) -> Hashable | None:
        """Equal for sinks that can share a transaction; None for one that never does."""

    def vote_together(self, epoch: Epoch, ballots: Mapping[str, Ballot]) -> Committable:
        """Turn what the accepted tasks of all these sinks wrote into one part: `SinkCommitter.vote` for several."""

    def replay_together(
        self, epoch: Epoch, part: Committable, ballots: Mapping[str, Ballot], attempt: str
    ) -> Committable:
        """Prepare an aborted part of several sinks again, as one part: `SinkCommitter.replay` for several."""


def sharers(part: Committable, sink: str) -> Sequence[str]:
    """Return the names of the sinks whose rows a part of ``sink`` holds, in their order; mostly that one alone."""
    return list(part.get(MEMBERS, (sink,)))
