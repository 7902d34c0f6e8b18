"""Mutants: the protocol with one part taken away, or one rule broken. Each must lose, double or pin rows in some plan.

A mutant is a small subclass of the production's class, or of a port. ``MUTANTS`` names for each the plan that is known
to kill it; the unmutated code (``control``) has to pass the same plan.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochsink.checkpoint import Checkpoint
from epochsink.coordinator import Coordinator, Plan
from epochsink.ledger import Entry, History, Prepared, Take, _decode, _encode, _name
from epochsink.naming import PreparedName
from epochsink.protocol import COMMITTED, Committable, Epoch, Rows, Task, Verdict
from simulation.driver import PRODUCTION, Variant
from simulation.ports import (
    ABORTED,
    KafkaPort,
    KafkaTask,
    KeyedSearchPort,
    PreparedPort,
    SearchPort,
    StagedPort,
    twice,
)
from simulation.storage import QuickLedger, StepwiseLedger, TrimmingLedger
from simulation.world import PreparedRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.errors import EpochsinkError
    from simulation.explorer import Case
    from simulation.world import Row

# ---- the ledger


class Unfenced(QuickLedger):
    """Appends at the next free number, whoever has taken the ledger."""

    def append(self, entry: Entry) -> None:
        while not self._create(self._end, entry):
            self.read()


class Overwriting(QuickLedger):
    """Writes its next number, whatever stands there."""

    def append(self, entry: Entry) -> None:
        files: Any = self._files
        folder, _, plain = _name(self._end).rpartition("/")
        files.step(f"put {plain}", lambda: files._folders[folder].update({plain: _encode(entry)}))
        self._remember(self._end, entry)


class Unchecked(QuickLedger):
    """Never asks whether the ledger is still its own."""

    def verify(self) -> History:
        return self.read()


class LaterOriginsWin(QuickLedger):
    """Lets a later take change what a sink fixed when it joined."""

    def take(self, query_id: str, origins: Mapping[str, Mapping[str, Any]], joined: int) -> Take:
        while True:
            owner = self.read().owner
            known = owner.origins if owner else {}
            generation = owner.generation + 1 if owner else 1
            entry = Take(generation, self._driver, query_id, {**known, **origins}, joined)
            if self._create(self._end, entry):
                return entry


class SharesItsEnd(StepwiseLedger):
    """Counts its reading in what both threads move on."""

    def _read_on(self) -> bool:
        start = self._end
        while (data := self._files.read(_name(self._end))) is not None:
            self._remember(self._end, _decode(data, self._end))
        return self._end > start


# ---- the checkpoint


class OffsetsUnseen(Checkpoint):
    """Takes any two inputs of an epoch for the same."""

    def offsets_digest(self, epoch: int) -> str:  # noqa: ARG002 - that is the mutation
        return ""


class DecidedAtOnce(Checkpoint):
    """Takes every recorded epoch for decided."""

    def has_commit(self, epoch: int) -> bool:  # noqa: ARG002 - that is the mutation
        return True

    def is_decided(self, epoch: int) -> bool:  # noqa: ARG002 - that is the mutation
        return True


# ---- the coordinator


class AbortsWhatIsRecorded(Coordinator):
    """Aborts a recorded, undecided epoch when Spark runs it again, and writes it anew."""

    def settle(self, number: int) -> Plan:
        history = self._ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        self.abort_recorded(number)
        return Plan.WRITE

    def abort_recorded(self, number: int) -> None:
        """End the parts of a recorded epoch."""
        others = [one for one in self._ledger.verify().pending if one.epoch != number]
        for name, sink in self._sinks.items():
            sink.sweep([part for one in others for part in one.parts_of(name)])
        for epoch in self._spool.attempts(self._query_id):
            if epoch.number == number:
                self._spool.drop(self._query_id, epoch)


class Supersedes(Coordinator):
    """Writes a recorded, undecided epoch anew: the later entry stands."""

    def settle(self, number: int) -> Plan:
        history = self._ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        return Plan.WRITE


class AbortsAtRecovery(AbortsWhatIsRecorded):
    """Aborts recorded epochs that are not decided when it starts, as a fresh start."""

    def recover(self) -> None:
        super().recover()
        for one in self._ledger.verify().pending:
            self.abort_recorded(one.epoch)

    def settle(self, number: int) -> Plan:
        return Coordinator.settle(self, number)


class IgnoresMarkers(Coordinator):
    """Does not compare the targets' markers with the ledger when it starts."""

    def _refuse_other_stories(self, history: History) -> None:
        class Silent:
            def newest(self) -> int | None:
                return None

        sinks = self._sinks
        self._sinks = dict.fromkeys(sinks, Silent())  # type: ignore[arg-type]
        try:
            super()._refuse_other_stories(history)
        finally:
            self._sinks = sinks


class IgnoresOlderLedger(Coordinator):
    """Does not compare the checkpoint's decisions with the ledger when it starts."""

    def _refuse_other_stories(self, history: History) -> None:
        class Undecided:
            def newest_decided(self) -> int:
                return -1

        checkpoint, self._checkpoint = self._checkpoint, Undecided()  # type: ignore[assignment]
        try:
            super()._refuse_other_stories(history)
        finally:
            self._checkpoint = checkpoint


class ConcludesFromMemory(Coordinator):
    """Draws conclusions from a target without reading the ledger again."""

    def _conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        return conclusion


class ConcludesBeforeReading(Coordinator):
    """Takes a target's answer about an epoch for the last word, whoever has finished the epoch meanwhile."""

    def _commit_part(self, prepared: Prepared, name: str, index: int) -> bool:
        known = self._ledger.verify()
        ledger: Any = self._ledger

        class Stale:
            def verify(self) -> History:
                return known

            def append(self, entry: Entry) -> None:
                ledger.append(entry)
                known.add(entry)

        self._ledger = Stale()  # type: ignore[assignment]
        try:
            return super()._commit_part(prepared, name, index)
        finally:
            self._ledger = ledger


class CommitsUnrecordedReplays(Coordinator):
    """Commits what it has prepared again without a record of it."""

    def _commit_part(self, prepared: Prepared, name: str, index: int) -> bool:
        epoch = Epoch(prepared.epoch, prepared.attempt)
        rows = self._spool.rows(self._identities[name], epoch, prepared.shares[name].tasks)
        part, sink = prepared.shares[name].parts[index], self._sinks[name]
        if sink.commit(epoch, part, rows) is not COMMITTED:
            sink.commit(epoch, sink.replay(epoch, part, rows, f"{epoch.number:032x}"), rows)
        return True


class SweepsByAnOldLedger(Coordinator):
    """Lists the spool after it has read the ledger."""

    def _end_unrecorded(self) -> None:
        class Kept:
            def attempts(self, _query_id: str) -> list[Epoch]:
                return []

        spool, self._spool = self._spool, Kept()  # type: ignore[assignment]
        try:
            super()._end_unrecorded()
        finally:
            self._spool = spool
        kept = {Epoch(one.epoch, one.attempt) for one in self._ledger.verify().pending}
        for epoch in self._spool.attempts(self._query_id):
            if epoch not in kept:
                self._spool.drop(self._query_id, epoch)


class SweepsAfterCommits(Coordinator):
    """Commits before it sweeps when it starts."""

    def recover(self) -> None:
        sweep = self._sweep
        self._sweep = lambda: None  # type: ignore[method-assign]
        try:
            super().recover()
        finally:
            self._sweep = sweep  # type: ignore[method-assign]
        self._sweep()


class ClearsWithoutAsking(Coordinator):
    """Reads what to clear from the ledger without asking whose it is."""

    def _commit(self, number: int) -> None:
        ledger, asked = self._ledger, iter((True, False))
        commit_part = self._commit_part

        class Careless:
            def verify(self) -> History:
                return ledger.verify() if next(asked, False) else ledger.read()

            def append(self, entry: Entry) -> None:
                ledger.append(entry)

            def trim(self) -> None:
                ledger.trim()

        def with_the_real_one(*part: Any) -> bool:
            self._ledger = ledger
            try:
                return commit_part(*part)
            finally:
                self._ledger = Careless()  # type: ignore[assignment]

        self._ledger = Careless()  # type: ignore[assignment]
        self._commit_part = with_the_real_one  # type: ignore[assignment,method-assign]
        try:
            super()._commit(number)
        finally:
            self._ledger = ledger
            del self._commit_part  # type: ignore[method-assign]


class TidiesAnyTime(Coordinator):
    """Sweeps from the watcher while an attempt is under way."""

    def tidy(self) -> None:
        self._end_unrecorded()


class AbandonsTheUnknown(Coordinator):
    """Aborts an attempt when appending its record has raised."""

    def record(self, epoch: Epoch, written: Mapping[str, Sequence[tuple[str, Committable]]]) -> None:
        try:
            super().record(epoch, written)
        except OSError:
            self._sinks_abort(epoch)
            raise

    def _sinks_abort(self, epoch: Epoch) -> None:
        for sink in self._sinks.values():
            sink.sweep([])
        self._spool.drop(self._query_id, epoch)


class DropsFirst(Coordinator):
    """Drops the spool before the ledger says done."""

    def _commit_part(self, prepared: Prepared, name: str, index: int) -> bool:
        committed = super()._commit_part(prepared, name, index)
        self._spool.drop(self._query_id, Epoch(prepared.epoch, prepared.attempt))
        return committed


# ---- Kafka


class KafkaWithoutMarker(KafkaPort):
    """Has no marker to tell a committed transaction from a lost one."""

    def marker(self, slot: int) -> int:  # noqa: ARG002 - that is the mutation
        return -1


class KafkaGuesses(KafkaPort):
    """Takes a time-out for an abort."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        name, producer = part["id"], part["epoch"]
        try:
            answer = self._step("K commit", lambda: self._world.kafka.end(name, producer, commit=True))
        except OSError:
            return Verdict(ABORTED, "timed out")
        if answer == "OK" or self.marker(part["slot"]) >= epoch.number:
            return COMMITTED
        return Verdict(ABORTED)


class KafkaMarkerApart(KafkaPort):
    """Writes the marker after the transaction, not in it."""

    def send(self, part: Committable, key: str, rows: list[Row], number: int) -> None:  # noqa: ARG002 - the port's
        name, epoch = part["id"], part["epoch"]
        self._step("K send", lambda: self._world.kafka.send(name, epoch, rows, None))

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:
        verdict = super().commit(epoch, part, rows)
        if verdict is COMMITTED:
            mark = {(self._key, part["slot"]): epoch.number}
            self._step("K mark", lambda: self._world.kafka.markers.update(mark))
        return verdict


class KafkaOldBroker(KafkaPort):
    """The production's port on a broker whose EndTxn leaves the producer epoch as it is (KAFKA-17754)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world.kafka.bumps_on_commit = False


class KafkaReusesProducer(KafkaOldBroker):
    """Keeps a producer for the next transaction."""

    def begin(self, task: Task, attempt_number: int = 0) -> KafkaTask:  # noqa: ARG002 - the mutation
        name = f"reused-{task.identity.generation}-{task.slot}"
        return KafkaTask(self, name, task)

    def initialise(self, name: str) -> int:
        known = self._world.kafka.transactions.get(name)
        if known is None:
            return super().initialise(name)
        if known.state != "Ongoing":
            known.rows, known.state = [], "Empty"
        return known.epoch


class KafkaSweepsNewer(KafkaPort):
    """Sweeps what newer generations have left, too."""

    def sweep(self, keep: Sequence[Committable]) -> list[str]:
        with _any_generation(self):
            return super().sweep(keep)


@contextmanager
def _any_generation(port: Any) -> Iterator[None]:
    identity = port._identity
    port._identity = type(identity)(identity.query_id, identity.sink, 10**6, identity.origin)
    try:
        yield
    finally:
        port._identity = identity


# ---- PostgreSQL


class TrustsMissing(PreparedPort):
    """Takes 42704 for done."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:
        super().commit(epoch, part, rows)
        return COMMITTED


class MissingIsAborted(PreparedPort):
    """Takes 42704 for aborted, without asking the marker."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        gid = part["gid"]
        answer = twice(lambda: self._step("P commit", lambda: self.target.commit_prepared(gid)))
        return COMMITTED if answer == "OK" else Verdict(ABORTED, answer)


class ReusesGid(PreparedPort):
    """Gives every attempt at an epoch the same gid."""

    def prepare(self, epoch: Epoch, part: Committable) -> Committable:
        same = {**part, "gid": str(PreparedName(self._key, 0, epoch.number, "0" * 32))}
        table, marker = self.table(part), (self._key, epoch.number)

        def apply() -> str:
            rows = self.target.staged_rows(table, part["tasks"])
            answer: str = self.target.prepare(same["gid"], PreparedRows(marker, epoch.attempt, rows or []))
            return answer

        answer = self._step("P prepare", apply)
        if answer not in ("OK", "42710"):
            raise OSError(answer)
        return same


class UpsertsMarker(StagedPort):
    """Merges whether or not the marker row exists."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        table, marker = self.table(part), (self._key, epoch.number)

        def apply() -> str:
            self.target.markers.pop(marker, None)
            answer: str = self.target.merge(table, part["tasks"], marker, epoch.attempt)
            return answer

        answer = twice(lambda: self._step("S merge", apply))
        return COMMITTED if answer == "OK" else self.judge(epoch, answer)


class MarksApart(StagedPort):
    """Merges in one transaction, and writes the marker row in the next."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        table, marker = self.table(part), (self._key, epoch.number)
        if self._step("S marker", lambda: self.target.marker(*marker), reads=True) == epoch.attempt:
            return COMMITTED

        def apply() -> str:
            answer: str = self.target.merge(table, part["tasks"], marker, epoch.attempt)
            self.target.markers.pop(marker, None)
            return answer

        answer = twice(lambda: self._step("S merge", apply))
        if answer != "OK":
            return self.judge(epoch, answer)
        self._step("S mark", lambda: self.target.markers.update({marker: epoch.attempt}))
        return COMMITTED


class MergesLosers(StagedPort):
    """Merges all that an attempt's tasks have staged, accepted or not."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:
        staged = self.target.staging.get(self.table(part), {})
        return super().commit(epoch, {**part, "tasks": list(staged) or part["tasks"]}, rows)


class StagedSweepsNewer(StagedPort):
    """Sweeps what newer generations have left, too."""

    def sweep(self, keep: Sequence[Committable]) -> list[str]:
        with _any_generation(self):
            return super().sweep(keep)


# ---- Elasticsearch


class SearchWithoutMarker(SearchPort):
    """Has no marker document."""

    def newest(self) -> int | None:
        return None


class SearchWithoutQuery(SearchPort):
    """Makes ids of keyless documents without the query id."""

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        return [(f"{epoch.number}-{position}", row) for position, row in enumerate(rows)]


class SearchAutomaticIds(SearchPort):
    """Lets the server choose the ids."""

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> str:
        def apply() -> str:
            first = len(self.target.documents)
            answer: str = self.target.bulk(version, [(f"auto-{first + i}", row) for i, (_, row) in enumerate(some)])
            return answer

        return self._step("E bulk", apply)


class SearchWithoutBase(KeyedSearchPort):
    """Takes the epoch alone for the version."""

    def found(self) -> dict[str, Any]:
        return {"base": 0}


class SearchWithoutVersion(KeyedSearchPort):
    """Writes whatever comes last."""

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> str:
        highest = max((known for known, _ in self.target.documents.values()), default=version)
        return super()._bulk(max(version, highest), some)


@dataclass(frozen=True)
class Mutant:
    """One mutation, the plan that kills it, and what must pass that plan."""

    name: str
    variant: Variant
    case: Case | None
    control: Variant = PRODUCTION


NO_SPOOL = Variant(spool=False)
TRIMMING = Variant(ledger=TrimmingLedger)
STEPWISE = Variant(ledger=StepwiseLedger)


def _kafka(port: type[KafkaPort], *, spool: bool = True) -> Variant:
    return Variant(ports={"K": port}, spool=spool)


MUTANTS = (
    Mutant("ledger without a fence", Variant(ledger=Unfenced), None),
    Mutant("ledger overwritten", Variant(ledger=Overwriting), None),
    Mutant("no generation check", Variant(ledger=Unchecked), None),
    Mutant("replay not recorded", Variant(coordinator=CommitsUnrecordedReplays), None),
    Mutant("a later take changes the version base", Variant(ledger=LaterOriginsWin), None),
    Mutant("no digest of the offsets", Variant(checkpoint=OffsetsUnseen), None),
    Mutant("commit before the decision", Variant(checkpoint=DecidedAtOnce), None),
    Mutant("abort at the re-run what is recorded", Variant(coordinator=AbortsWhatIsRecorded), None),
    Mutant("supersede what is recorded", Variant(coordinator=Supersedes), None),
    Mutant("abort at recovery what is recorded", Variant(coordinator=AbortsAtRecovery), None),
    Mutant("markers not compared at the start", Variant(coordinator=IgnoresMarkers), None),
    Mutant("older ledger not noticed at the start", Variant(coordinator=IgnoresOlderLedger), None),
    Mutant("conclusion without reading the ledger again", Variant(coordinator=ConcludesFromMemory), None),
    Mutant("outcome judged without reading the ledger again", Variant(coordinator=ConcludesBeforeReading), None),
    Mutant("spool listed after the ledger is read", Variant(coordinator=SweepsByAnOldLedger), None),
    Mutant("sweep after the commits of a recovery", Variant(coordinator=SweepsAfterCommits), None),
    Mutant(
        "what to clear read from another driver's ledger",
        Variant(coordinator=ClearsWithoutAsking, ledger=TrimmingLedger),
        None,
        TRIMMING,
    ),
    Mutant("two threads that share the end of a reading", Variant(ledger=SharesItsEnd), None, STEPWISE),
    Mutant("tidy beside an attempt", Variant(coordinator=TidiesAnyTime), None),
    Mutant("abort after an unknown append", Variant(coordinator=AbandonsTheUnknown), None),
    Mutant("spool dropped before done", Variant(coordinator=DropsFirst), None),
    Mutant("Kafka without markers", _kafka(KafkaWithoutMarker), None),
    Mutant("Kafka time-out taken as aborted", _kafka(KafkaGuesses), None),
    Mutant("Kafka marker outside the transaction", _kafka(KafkaMarkerApart), None),
    Mutant("Kafka producer re-used", _kafka(KafkaReusesProducer), None, _kafka(KafkaOldBroker)),
    Mutant("Kafka sweep takes newer generations", _kafka(KafkaSweepsNewer, spool=False), None, NO_SPOOL),
    Mutant("42704 taken as done", Variant(ports={"P": TrustsMissing}), None),
    Mutant("42704 taken as aborted", Variant(ports={"P": MissingIsAborted}), None),
    Mutant("gid re-used", Variant(ports={"P": ReusesGid}), None),
    Mutant("marker as upsert", Variant(ports={"S": UpsertsMarker}), None),
    Mutant("marker outside the transaction", Variant(ports={"S": MarksApart}), None),
    Mutant("the losers' attempts committed", Variant(ports={"S": MergesLosers}), None),
    Mutant(
        "staging sweep takes newer generations", Variant(ports={"S": StagedSweepsNewer}, spool=False), None, NO_SPOOL
    ),
    Mutant("no marker document", Variant(ports={"E": SearchWithoutMarker}), None),
    Mutant("keyless ids without the query id", Variant(ports={"E": SearchWithoutQuery}), None),
    Mutant("automatic document ids", Variant(ports={"E": SearchAutomaticIds}), None),
    Mutant("no version base", Variant(ports={"F": SearchWithoutBase}), None),
    Mutant("no external version", Variant(ports={"F": SearchWithoutVersion}), None),
)
