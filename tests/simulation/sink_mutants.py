"""Mutants of the sinks: each port with one rule of its target broken."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from epochsink.identity import PreparedName, TransactionalId, identity_key
from epochsink.sink import COMMITTED, Committable, Epoch, LastDone, Mark, Recorded, Rows, Task, Verdict
from simulation.by_task_port import ByTaskPort
from simulation.kafka_port import KafkaLogPort, KafkaPort, KafkaTask
from simulation.port import ABORTED, ANY_GENERATION, twice
from simulation.postgres_port import PreparedPort, StagedPort
from simulation.search_port import KeyedSearchPort, SearchPort
from simulation.shared_port import MEMBERS, SharedPort, SharedStagedPort
from simulation.targets import Marked, PreparedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from simulation.readers import Row
    from simulation.shared_port import Voters

# ---- Kafka


class KafkaWithoutMarker(KafkaPort):
    """Has no marker to tell a committed transaction from a lost one."""

    def marker(self, partition: int) -> int:
        return -1


class KafkaGuesses(KafkaPort):
    """Takes a time-out for an abort."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        name, producer = part["id"], part["epoch"]
        self.holds(part)
        try:
            answer = self._step("K commit", lambda: self._world.kafka.end(name, producer, commit=True))
        except OSError:
            return Verdict(ABORTED, "timed out")
        if answer == "OK" or self.marker(part["slot"]) >= epoch.number:
            return COMMITTED
        return Verdict(ABORTED)


class KafkaMarkerApart(KafkaPort):
    """Writes the marker after the transaction, not in it."""

    def send(self, part: Committable, key: str, rows: list[Row], at: Epoch) -> None:
        name, epoch = part["id"], part["epoch"]
        self._step("K send", lambda: self._world.kafka.send(name, epoch, rows, None))

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        verdict = super().commit(epoch, part, rows, after)
        if verdict is COMMITTED:
            marked = Marked(self._key, part["slot"], epoch.number, epoch.attempt)
            self._step("K mark", lambda: self._world.kafka.mark(marked))
        return verdict


class KafkaOldBroker(KafkaPort):
    """The production's port on a broker whose EndTxn leaves the producer epoch as it is (KAFKA-17754)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world.kafka.bumps_on_commit = False


class KafkaReusesProducer(KafkaOldBroker):
    """Keeps a producer for the next transaction."""

    def begin(self, task: Task, attempt_number: int = 0) -> KafkaTask:
        name = TransactionalId(identity_key(task.identity), task.identity.generation, task.partition, 0, 0)
        return KafkaTask(self, str(name), task)

    def initialise(self, name: str) -> int:
        known = self._world.kafka.transactions.get(name)
        if known is None:
            return super().initialise(name)
        if known.state != "Ongoing":
            self._world.kafka.transactions[name] = known._replace(rows=(), state="Empty")
        return known.epoch


class KafkaBelievesTheLog(KafkaLogPort):
    """Takes what is left of a transaction in the log for all of it."""

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        # a copy: the part itself is the ledger's
        return super().replay(epoch, {**part}, rows, attempt, after)

    def prove(self, part: Committable, found: list[Row]) -> None:
        part["rows"] = len(found)


class KafkaTakesOthersRecords(KafkaLogPort):
    """Takes as many records of an id as there should be, whoever has written them."""

    def find(self, part: Committable) -> list[Row]:
        name, count = part["id"], part["rows"]
        return self._step("K log", lambda: self._world.kafka.records_of(name)[:count], reads=True)


class KafkaAsksTheCoordinatorAlone(KafkaPort):
    """Believes that a partition has what the coordinator calls open, and what it calls committed."""

    def holds(self, part: Committable) -> bool:
        super().holds(part)
        return self.state(part["id"]) == (part["epoch"], "Ongoing")

    def torn(self, parts: Sequence[Committable]) -> list[str]:
        super().torn(parts)
        return []


class KafkaLooksOnlyBefore(KafkaPort):
    """Does not ask the partitions again after the commit."""

    def torn(self, parts: Sequence[Committable]) -> list[str]:
        super().torn(parts)
        return []


class KafkaLeavesLosers(KafkaPort):
    """Leaves to the next sweep what a losing task has open before a committed epoch."""

    def unblock(self, parts: Sequence[Committable], recorded: Callable[[], Recorded]) -> list[str]:
        del parts, recorded
        return []


class KafkaSweepsNewer(KafkaPort):
    """Sweeps what newer generations have left, too."""

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        with _any_generation(self):
            return super().abort_orphans(keep, done)


@contextmanager
def _any_generation(port: Any) -> Iterator[None]:
    identity = port._identity
    port._identity = type(identity)(identity.query_id, identity.sink, ANY_GENERATION, identity.origin)
    try:
        yield
    finally:
        port._identity = identity


# ---- PostgreSQL


class TrustsMissing(PreparedPort):
    """Takes 42704 for done."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        super().commit(epoch, part, rows, after)
        return COMMITTED


class MissingIsAborted(PreparedPort):
    """Takes 42704 for aborted, without asking the marker."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        gid = part["gid"]
        answer = twice(lambda: self._step("P commit", lambda: self.target.commit_prepared(gid)))
        return COMMITTED if answer == "OK" else Verdict(ABORTED, answer)


class CastsPrepared(PreparedPort):
    """Merges whatever was staged into whatever columns there are now."""

    def is_altered(self, part: Committable) -> bool:
        return False


class CastsStaged(StagedPort):
    """Likewise, after the decision."""

    def is_altered(self, part: Committable) -> bool:
        return False


class ReusesGid(PreparedPort):
    """Gives every attempt at an epoch the same gid."""

    def prepare(self, epoch: Epoch, part: Committable, after: LastDone | None = None) -> Committable:
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


class SharesNothing(SharedPort):
    """Prepares a transaction for each sink of a database."""

    group = None


class OtherSharesNothing(SharesNothing):
    """Likewise."""

    letter = "B"


class MarksOne(SharedPort):
    """Marks the epoch as applied for one of the sinks whose rows are in the transaction."""

    def rows_to_prepare(self, shares: dict[str, PreparedRows]) -> dict[str, PreparedRows]:
        first, *others = shares
        return {
            first: shares[first],
            **{name: shares[name]._replace(marker=("", *shares[name].marker[1:])) for name in others},
        }


class ReplaysOne(SharedPort):
    """Prepares a lost transaction again for the first of its sinks alone."""

    def replay_together(self, epoch: Epoch, part: Committable, voters: Voters, attempt: str) -> Committable:
        first = dict(list(voters.items())[:1])
        return {**super().replay_together(epoch, part, first, attempt), MEMBERS: part[MEMBERS]}


class MergesOne(SharedStagedPort):
    """Merges the staged rows of the sink that is asked, and marks them, alone."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        own = {**part, MEMBERS: {self.letter: part[MEMBERS][self.letter]}}
        return super().commit(epoch, own, rows, after)


class OtherMergesOne(MergesOne):
    """Likewise."""

    letter = "D"


class SentIsCommitted(ByTaskPort):
    """Takes each commit that it has sent for carried out."""

    def is_committed(self, part: Committable) -> bool:
        super().is_committed(part)
        return True


class UpsertsMarker(StagedPort):
    """Merges whether or not the marker row exists."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        table, marker = self.table(part), (self._key, epoch.number)

        def apply() -> str:
            self.target.markers.pop(marker, None)
            answer: str = self.target.merge(table, part["tasks"], marker, part["attempt"])
            return answer

        answer = twice(lambda: self._step("S merge", apply))
        return COMMITTED if answer == "OK" else self.judge(epoch, part, answer)


class MarksApart(StagedPort):
    """Merges in one transaction, and writes the marker row in the next."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        table, marker = self.table(part), (self._key, epoch.number)
        if self._step("S marker", lambda: self.target.marker(*marker), reads=True) == part["attempt"]:
            return COMMITTED

        def apply() -> str:
            answer: str = self.target.merge(table, part["tasks"], marker, part["attempt"])
            self.target.markers.pop(marker, None)
            return answer

        answer = twice(lambda: self._step("S merge", apply))
        if answer != "OK":
            return self.judge(epoch, part, answer)
        self._step("S mark", lambda: self.target.markers.update({marker: part["attempt"]}))
        return COMMITTED


class MergesLosers(StagedPort):
    """Merges all that an attempt's tasks have staged, accepted or not."""

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        staged = self.target.staging.get(self.table(part), {})
        return super().commit(epoch, {**part, "tasks": list(staged) or part["tasks"]}, rows, after)


class StagedSweepsNewer(StagedPort):
    """Sweeps what newer generations have left, too."""

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        with _any_generation(self):
            return super().abort_orphans(keep, done)


# ---- Elasticsearch


class SearchWithoutMarker(SearchPort):
    """Has no marker document."""

    def newest(self) -> int | None:
        return None

    def _marker(self) -> tuple[Mark, int] | None:
        return None

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        pass

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        return super().commit(epoch, part, rows)

    def write_mark(self, mark: Mark, incarnation: int, seen: Mark | None) -> str:
        return "OK"


class SearchWithoutQuery(SearchPort):
    """Makes ids of keyless documents without the query id."""

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        return [(f"{epoch.number}-{position}", row) for position, row in enumerate(rows)]


class SearchAutomaticIds(SearchPort):
    """Lets the server choose the ids."""

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> list[str]:
        def apply() -> list[str]:
            first = len(self.target.documents)
            conflicts: list[str] = self.target.bulk(
                version, [(f"auto-{first + i}", row) for i, (_, row) in enumerate(some)]
            )
            return conflicts

        return self._step("E bulk", apply)


class SearchWithoutBase(KeyedSearchPort):
    """Takes the epoch alone for the version."""

    def initial_state(self) -> dict[str, Any]:
        return {"base": 0}


class SearchWithoutVersion(KeyedSearchPort):
    """Writes whatever comes last."""

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> list[str]:
        def apply() -> list[str]:
            highest = max((known for known, _ in self.target.documents.values()), default=version)
            conflicts: list[str] = self.target.bulk(max(version, highest), some)
            return conflicts

        return self._step("F bulk", apply)
