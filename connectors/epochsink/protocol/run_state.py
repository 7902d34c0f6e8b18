"""The state of one run of a query, which its two threads share.

The stream thread adds recorded epochs and waits for them; the commit thread removes the committed ones. A sweep, a
replay and an attempt exclude one another, because a sweep ends whatever the ledger does not name, and what a replay or
an attempt has just prepared is not named yet. An attempt that was under way before a replay is *overtaken*: in a target
that keeps rows in the order of writing, its rows are ordered before those of the earlier epoch.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from epochsink.errors import Addresses, EpochsinkError, Fenced
from epochsink.identity import pipeline_name
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Prepared
from epochsink.protocol.progress_tracker import ProgressTracker
from epochsink.protocol.retained import Retention
from epochsink.protocol.spool import Spool
from epochsink.sink import Ballot, Identity, Participant


class CommitQueue:
    """The epochs to commit, the first failure, and which thread may sweep. ``monitor`` guards it."""

    def __init__(self, monitor: threading.Condition | None = None) -> None:
        self._monitor = monitor or threading.Condition()
        self._pending: list[int] = []
        self._failure: BaseException | None = None
        self._occupied = False
        self._attempting = False
        self._overtaken = False
        self._running = -1

    @property
    def pending(self) -> tuple[int, ...]:
        """Recorded epochs that this run has yet to commit, oldest first."""
        return tuple(self._pending)

    @property
    def running(self) -> int:
        """The epoch that Spark runs, or ran last."""
        return self._running

    @property
    def overtaken(self) -> bool:
        """Whether an earlier epoch was prepared again since the attempt under way began."""
        return self._overtaken

    @property
    def failed(self) -> bool:
        """Whether there is a failure."""
        return self._failure is not None

    def add(self, number: int) -> None:
        """Append a recorded epoch."""
        with self._monitor:
            self._pending.append(number)
            self._monitor.notify_all()

    def remove_first(self) -> None:
        """Remove the oldest pending epoch: it is committed."""
        with self._monitor:
            self._pending.pop(0)
            self._monitor.notify_all()

    def run_epoch(self, number: int) -> None:
        """Note which epoch Spark runs now: it has decided those before it."""
        with self._monitor:
            self._running = number
            self._monitor.notify_all()

    def wait_settled(self) -> None:
        """Wait until no epoch is pending; raises the commit thread's failure."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._pending or self._failure is not None)
        self.raise_failure()

    def wait_run(self, seconds: float) -> None:
        """Wait until Spark runs an epoch after the oldest pending one, for at most ``seconds``."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._pending or self._running > self._pending[0], seconds)

    def wait_pending(self, seconds: float) -> None:
        """Wait until an epoch is pending, for at most ``seconds``."""
        with self._monitor:
            self._monitor.wait_for(lambda: bool(self._pending), seconds)

    def fail(self, failure: BaseException) -> None:
        """Keep the first failure, and wake the thread that waits."""
        with self._monitor:
            # the first one: what comes after it is mostly its consequence
            self._failure = self._failure or failure
            self._monitor.notify_all()

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def begin_attempt(self) -> None:
        """Wait for the end of a sweep or a replay; from here on `alone_if_idle` gives False.

        Raises the commit thread's failure if a replay has failed.
        """
        with self._monitor:
            self._wait_vacant()
            # under the monitor, where alone_if_idle looks at it: no sweep begins from here on
            self._attempting = True
            self._overtaken = False

    def end_attempt(self) -> None:
        """Note that the attempt is recorded or ended."""
        with self._monitor:
            self._attempting = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nothing else sweeps or replays, and keep it so.

        Raises the commit thread's failure if a replay has failed.
        """
        self._occupy()
        try:
            yield
        finally:
            self._vacate()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Like `alone`, for a replay, which overtakes the attempt under way.

        If it fails, nothing in this run sweeps any more: what is prepared again may be recorded.
        """
        self._occupy()
        # before anything is prepared again: a vote that ends meanwhile has to see it
        self._overtaken = True
        try:
            yield
        except Fenced:
            # the one error that says that nothing was written
            self._vacate()
            raise
        # after any other error the place stays taken
        self._vacate()

    @contextmanager
    def alone_if_idle(self) -> Iterator[bool]:
        """Like `alone`, without waiting: give False if an epoch is pending, an attempt runs, or the run has failed."""
        with self._monitor:
            # an attempt whose append had an unknown outcome never ends here, so that nothing sweeps it
            idle = not (self._pending or self._attempting or self._occupied or self.failed)
            self._occupied = self._occupied or idle
        try:
            yield idle
        finally:
            if idle:
                self._vacate()

    def _occupy(self) -> None:
        with self._monitor:
            self._wait_vacant()
            self._occupied = True

    def _wait_vacant(self) -> None:
        """Wait, under the monitor, until nothing sweeps or replays."""
        self._monitor.wait_for(lambda: not self._occupied or self.failed)
        if self._occupied:
            self.raise_failure()

    def _vacate(self) -> None:
        with self._monitor:
            self._occupied = False
            self._monitor.notify_all()


class Phase(enum.Enum):
    """How far a run is with the epoch that Spark has given to it."""

    GIVEN = "its input is to be compared with the ledger"
    COMPARED = "it is to be written"
    WRITING = "it is being written: Spark cannot decide it meanwhile"
    RECORDING = "it may be recorded"
    FAILED = "its attempt has failed"
    PREPARED = "it is recorded, if there is one"


@dataclass(frozen=True, slots=True)
class CurrentEpoch:
    """The epoch that Spark has given to a run, and the one ``before`` that; -1 if there is none."""

    number: int = -1
    phase: Phase = Phase.PREPARED
    before: int = -1

    @property
    def compared(self) -> int:
        """The newest epoch whose input this run has compared with the ledger."""
        return self.before if self.phase is Phase.GIVEN else self.number

    @property
    def is_owed(self) -> bool:
        """Whether Spark may decide it although it is not prepared: the user's function may catch our error."""
        return self.phase not in (Phase.WRITING, Phase.PREPARED)

    def followed_by(self, number: int) -> CurrentEpoch:
        """Return the epoch that Spark gives next; one that is owed stays the current one."""
        return self if self.is_owed else CurrentEpoch(number, Phase.GIVEN, self.number)


@dataclass
class RunState:
    """The places and participants of one run of a query, and what its steps remember."""

    query_id: str
    ledger: Ledger
    checkpoint: Checkpoint
    spool: Spool
    participants: Sequence[Participant]
    queue: CommitQueue
    location: str = ""
    reference: str = ""
    """MODULE:ATTRIBUTE of the object that the pipeline starts, "" if it is not known: for the commands of errors."""
    progress: ProgressTracker = field(default_factory=ProgressTracker)
    retention: Retention = field(init=False)
    participant_of: dict[str, Participant] = field(init=False)
    """Each sink's participant, in the order of the query."""
    identities: dict[str, Identity] = field(default_factory=dict)
    current: CurrentEpoch = CurrentEpoch()
    recorded: set[int] = field(default_factory=set)
    """The epochs that this run has recorded and not committed yet."""

    def __post_init__(self) -> None:
        for participant in self.participants:
            participant.require_ours = self.ledger.verify
        self.participant_of = {name: one for one in self.participants for name in one.members}
        repaired = [name for name, one in self.participant_of.items() if one.operator().losses() is not None]
        self.retention = Retention(self.spool, self.query_id, repaired)

    @property
    def addresses(self) -> Addresses:
        """What completes the commands of errors and warnings."""
        spool = "" if self.spool.beside_ledger else self.spool.root
        return Addresses(self.location, self.reference, spool)

    @property
    def pipeline(self) -> str:
        """The query's name for people, in its targets."""
        return pipeline_name(self.location)

    def by_participant(self, sinks: Iterable[str]) -> list[tuple[Participant, list[str]]]:
        """Return the participants of some sinks, each with its own of them, in the order of the query.

        KeyError if the query lacks one of the sinks.
        """
        wanted = {name: self.participant_of[name] for name in sinks}
        return [
            (participant, [name for name in participant.members if name in wanted])
            for participant in self.participants
            # by identity: a sink's author may have defined equality
            if any(participant is one for one in wanted.values())
        ]

    def ballots(
        self, prepared: Prepared, sinks: Iterable[str], only: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Ballot]:
        """Return what a participant needs for some sinks' parts of an epoch: all, or those at the indices ``only``."""
        # what is applied changes only as the epoch in question is done
        applied = self.ledger.known().applied
        ballots = {}
        for name in sinks:
            share = prepared.shares[name]
            parts = share.parts if only is None else [share.parts[index] for index in only[name]]
            rows = self.spool.rows(self.identities[name], prepared.at, share.tasks, share.files)
            ballots[name] = Ballot(parts, rows, applied.get(name))
        return ballots

    @contextmanager
    def if_ours(self, participant: Participant) -> Iterator[None]:
        """Let a participant's conclusion pass, with its sinks' names, if the ledger is still ours.

        Raises `Fenced` if it is not.
        """
        try:
            yield
        except Fenced:
            # the participant has found it out itself
            raise
        except EpochsinkError as conclusion:
            conclusion.name_sink(", ".join(participant.members))
            raise self.conclude(conclusion) from conclusion

    def conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        """Return a conclusion if the ledger is still ours; raises `Fenced` if it is not."""
        self.ledger.verify()
        return conclusion
