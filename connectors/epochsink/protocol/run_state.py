"""What every step of one run of a query works on, and the rule under which any of them may conclude something."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from epochsink.errors import EpochsinkError, Fenced
from epochsink.protocol import consistency
from epochsink.protocol.applied_check import AppliedCheck
from epochsink.protocol.commit_queue import CommitQueue
from epochsink.protocol.two_threads import TwoThreads
from epochsink.sink import Ballot

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Concatenate, ParamSpec, TypeVar

    from epochsink.protocol.ledger import Ledger
    from epochsink.protocol.ledger_entries import Share
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import CheckpointReader, Committable, Epoch, Identity, LastDone, Participant, SpoolKeeper

    Of = TypeVar("Of", bound="RunState")
    Given = ParamSpec("Given")
    Answer = TypeVar("Answer")


def addressed(step: Callable[Concatenate[Of, Given], Answer]) -> Callable[Concatenate[Of, Given], Answer]:
    """Let the commands in a step's errors name the checkpoint: who raises them does not know where it is."""

    @functools.wraps(step)
    def told(run: Of, *given: Given.args, **named: Given.kwargs) -> Answer:
        try:
            return step(run, *given, **named)
        except EpochsinkError as failure:
            failure.address(run._location)  # noqa: SLF001 - a method's wrapper
            raise

    return cast("Callable[Concatenate[Of, Given], Answer]", told)


class RunState(TwoThreads):
    """The ledger, checkpoint, spool and participants of one run, and what its steps remember."""

    def __init__(
        self,
        *,
        query_id: str,
        ledger: Ledger,
        checkpoint: CheckpointReader,
        spool: SpoolKeeper,
        participants: Sequence[Participant],
        join_running: bool = False,
        monitor: threading.Condition | None = None,
        pipeline: str = "",
        location: str = "",
    ) -> None:
        self._query_id, self._pipeline, self._location = query_id, pipeline, location
        self._ledger, self._checkpoint = ledger, checkpoint
        self._spool = spool
        self._participants = participants
        self._of = {name: participant for participant in participants for name in participant.members}
        """Each sink's participant."""
        self._join_running = join_running
        self._check = AppliedCheck(ledger, self._of)
        self._queue = CommitQueue(monitor)
        self._begun = False
        self._attempted = -1
        self._owed = -1
        """The epoch that Spark has given to this run and that could not be prepared so far, -1 if there is none."""
        self._recorded_here: set[int] = set()
        self._until_spool_sweep = 0
        self._identities: dict[str, Identity] = {}

    def _refuse_undocumented(self, history: History) -> None:
        """Everything that is decided is in the ledger."""
        decided = self._checkpoint.newest_decided()
        if decided > history.newest:
            spooled = [attempt.number for attempt in self._spool.attempts(self._query_id)]
            raise self._conclude(self._check.why_undocumented(history.newest, decided, self._attempted, spooled))

    def fail(self, failure: BaseException) -> None:
        """Remember the commit thread's failure for the stream thread."""
        if isinstance(failure, EpochsinkError):
            failure.address(self._location)
        super().fail(failure)

    def _by_participant(self, sinks: Iterable[str]) -> list[tuple[Participant, list[str]]]:
        """Return the participants of some sinks with these, all in the order of the query. KeyError if it lacks one."""
        wanted = {self._of[name]: name for name in sinks}.keys(), set(sinks)
        return [
            (participant, [name for name in participant.members if name in wanted[1]])
            for participant in self._participants
            if participant in wanted[0]
        ]

    def _ballot(
        self, name: str, epoch: Epoch, share: Share, parts: Sequence[Committable], applied: Mapping[str, LastDone]
    ) -> Ballot:
        """Return what a sink's participant needs for some parts of its share of an epoch."""
        rows = self._spool.rows(self._identities[name], epoch, share.tasks, share.files)
        return Ballot(parts, rows, applied.get(name))

    @contextmanager
    def _if_ours(self, participant: Participant) -> Iterator[None]:
        """Let a participant's conclusion pass, with its sinks' names, if the ledger is ours; else raise `Fenced`."""
        try:
            yield
        except Fenced:
            raise
        except EpochsinkError as conclusion:
            raise self._conclude(consistency.named(conclusion, ", ".join(participant.members))) from conclusion

    def _conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        """Return a conclusion if the ledger is still ours; raises `Fenced` if it is not."""
        self._ledger.verify()
        return conclusion
