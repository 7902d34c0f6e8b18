"""What the steps of one run share, and the rule under which one of them may draw a conclusion."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochsink.errors import EpochsinkError, Fenced
from epochsink.protocol import consistency
from epochsink.sink import Ballot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from epochsink.protocol.checkpoint import Checkpoint
    from epochsink.protocol.commit_queue import CommitQueue
    from epochsink.protocol.ledger import Ledger
    from epochsink.protocol.ledger_entries import Share
    from epochsink.protocol.spool import NoSpool, Spool
    from epochsink.sink import Committable, Epoch, Identity, LastDone, Participant


@dataclass
class RunState:
    """The places and participants of one run of a query, and what its steps remember."""

    query_id: str
    ledger: Ledger
    checkpoint: Checkpoint
    spool: Spool | NoSpool
    participants: Sequence[Participant]
    queue: CommitQueue
    pipeline: str = ""
    location: str = ""
    participant_of: dict[str, Participant] = field(init=False)
    """Each sink's participant, in the order of the query."""
    identities: dict[str, Identity] = field(default_factory=dict)
    attempted: int = -1
    """The newest epoch that this run has begun to write."""
    owed: int = -1
    """The epoch that Spark has given to this run and that it has not prepared yet; -1 if there is none."""
    recorded: set[int] = field(default_factory=set)
    """The epochs that this run has recorded and not committed yet."""

    def __post_init__(self) -> None:
        self.participant_of = {name: one for one in self.participants for name in one.members}

    def by_participant(self, sinks: Iterable[str]) -> list[tuple[Participant, list[str]]]:
        """Return the participants of some sinks, each with its own of them, in the order of the query.

        KeyError if the query lacks one of the sinks.
        """
        wanted = {name: self.participant_of[name] for name in sinks}
        return [
            (participant, [name for name in participant.members if name in wanted])
            for participant in self.participants
            if any(participant is one for one in wanted.values())
        ]

    def ballot(
        self, sink: str, epoch: Epoch, share: Share, parts: Sequence[Committable], applied: Mapping[str, LastDone]
    ) -> Ballot:
        """Return what a sink's participant needs for some parts of the sink's share of an epoch."""
        rows = self.spool.rows(self.identities[sink], epoch, share.tasks, share.files)
        return Ballot(parts, rows, applied.get(sink))

    @contextmanager
    def if_ours(self, participant: Participant) -> Iterator[None]:
        """Let a participant's conclusion pass, with its sinks' names, if the ledger is still ours.

        Raises `Fenced` if it is not.
        """
        try:
            yield
        except Fenced:
            raise
        except EpochsinkError as conclusion:
            raise self.conclude(consistency.named(conclusion, ", ".join(participant.members))) from conclusion

    def conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        """Return a conclusion if the ledger is still ours; raises `Fenced` if it is not."""
        self.ledger.verify()
        return conclusion

    def fail(self, failure: BaseException) -> None:
        """Keep the commit thread's failure for the stream thread."""
        if isinstance(failure, EpochsinkError):
            failure.address(self.location)
        self.queue.fail(failure)
