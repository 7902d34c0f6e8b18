"""Kafka over the in-memory broker: one transaction for each task attempt."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import Fenced, LogIncomplete, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.identity import TransactionalId, identity_key
from epochsink.sink import COMMITTED, Epoch, LastDone, Mark, Rows, Task, Verdict, verify_marks
from simulation.port import ABORTED, ANY_GENERATION, PortBase, twice
from simulation.targets import Marked, id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from epochsink.sink import Committable, Recorded
    from simulation.readers import Row


class KafkaPort(PortBase):
    """One transaction for each task attempt; phase 2 ends it from the driver."""

    letter = "K"
    repairs = True
    fenced_at = 0
    """The producer epoch under which this driver has taken the fence, 0 before it has."""
    _compared = False

    def fence(self) -> None:
        """Take the fence, unless a driver of a later generation has something open."""
        self.refuse_newer()
        self.fenced_at = twice(lambda: self._step("K fence", lambda: self._world.kafka.fence(self._key)))

    def refuse_newer(self) -> None:
        """Refuse to go on where another copy's driver, which was started more often, has something open."""
        generation = self._identity.generation
        newer = self._step("K list newer", lambda: self._world.kafka.newer(self._key, generation), reads=True)
        if newer:
            raise WentBack(f"{newer} are open, of a later generation than {generation}")

    def lost_fence(self, now: int) -> bool:
        """Whether another driver has taken the fence since."""
        return 0 < self.fenced_at < now

    def generations(self) -> list[int]:
        """Return those of transactional ids, whatever became of their transactions."""
        names = map(id_of, self._world.kafka.transactions)
        return [name.generation for name in names if name and name.key == self._key]

    def now_fenced_at(self) -> int:
        """Return under which producer epoch the fence was taken last."""
        return self._world.kafka.fences.get(self._key, 0)

    def begin(self, task: Task, attempt_number: int = 0) -> KafkaTask:
        """Open a transaction under a bounded id; with a nonce where no spool could repair a zombie's abort."""
        nonce = "" if self._spool else task.uuid
        name = TransactionalId(
            identity_key(task.identity),
            task.identity.generation,
            task.partition,
            task.epoch.number % 2,
            attempt_number,
            nonce,
        )
        return KafkaTask(self, str(name), task)

    def initialise(self, name: str) -> int:
        """InitProducerId."""
        return self._step("K initialise", lambda: self._world.kafka.initialise(name))

    def send(self, part: Committable, key: str, rows: list[Row], at: Epoch) -> None:
        """Produce and flush rows with the epoch's marker."""
        number, attempt = at.number, at.attempt
        name, epoch, marker = part["id"], part["epoch"], Marked(key, part["slot"], number, attempt)
        answer = self._step("K send", lambda: self._world.kafka.send(name, epoch, rows, marker))
        if answer != "OK":
            raise PrepareFailed(f"{name} was fenced")

    def newest(self) -> int | None:
        """Read the markers."""
        found = self._step("K newest", lambda: self._world.kafka.newest(self._key), reads=True)
        return None if found < 0 else found

    def leftovers(self) -> list[str]:
        """Return the open transactions."""
        return [name for name, _ in self._world.kafka.ongoing(self._key, ANY_GENERATION)]

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare each partition's marks, even and odd, with the ledger; first, what the sweep has left."""
        if self.fenced_at and not self._compared:
            self.refuse_newer()
            self._compared = True
        found = {group(partition, parity): mark for (partition, parity), mark in self.marks().items()}
        verify_marks("Kafka", found, done, pending, marks_of)

    def marks(self) -> dict[tuple[int, int], Mark]:
        """Read the marks by (partition, parity), in one request."""
        return twice(lambda: self._step("K applied", lambda: self._world.kafka.marks(self._key), reads=True))

    def await_visible(self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None) -> None:
        """See this epoch and the one before it in every partition: EndTxn could not be made conditional."""
        # a transaction that a set-back has opened again after its abort is the next sweep's
        blocking = [one for one in self.blocking(parts) if one not in self._world.reopened]
        names = map(id_of, (name for name, _ in blocking))
        losers = [name for name in names if name and name.parity == epoch.number % 2]
        if losers and not self.lost_fence(self.now_fenced_at()):
            self._world.kafka.readers.flag("LATE K")
        if torn := self.torn(parts):
            raise OutcomeUnknown(f"{torn} are committed, and their partitions have lost rows of them")
        self.expect_both(LastDone(epoch.number, epoch.attempt, tuple(parts)), after)

    def unblock(self, parts: Sequence[Committable], recorded: Callable[[], Recorded]) -> list[str]:
        """Abort what stands open before the rows of a committed epoch, and no epoch names."""
        blocking = self.blocking(parts)
        if not blocking:
            return []
        keep, done = recorded()
        return self.end_all(blocking, keep, done)

    def blocking(self, parts: Sequence[Committable]) -> list[tuple[str, int]]:
        """Ask the partitions for what is open before parts: without a step, as it changes nothing."""
        place = max((part["place"] for part in parts), default=0)
        return self._world.kafka.before(self._key, self._identity.generation, place)

    def torn(self, parts: Sequence[Committable]) -> list[str]:
        """Ask the partitions which committed transactions they do not have whole."""
        torn = self._world.kafka.torn
        return twice(
            lambda: self._step(
                "K ends", lambda: [part["id"] for part in parts if (part["id"], part["epoch"]) in torn], reads=True
            )
        )

    def holds(self, part: Committable) -> bool:
        """Ask a part's partition whether it has all rows of the open transaction."""
        name, producer, count = part["id"], part["epoch"], part["rows"]
        return twice(lambda: self._step("K look", lambda: self._world.kafka.holds(name, producer, count), reads=True))

    def expect_both(self, this: LastDone, after: LastDone | None) -> None:
        """Raise `WentBack` unless the marks of both epochs are there."""
        found = {group(partition, parity): mark for (partition, parity), mark in self.marks().items()}
        wanted = (marks_of(after) if after else {}) | marks_of(this)
        if wrong := {name: found.get(name) for name, mark in wanted.items() if found.get(name) != mark}:
            raise WentBack(f"Kafka shows {wrong} in place of {wanted}")

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Verify that every transaction is open under the producer epoch that the task had."""
        names = [part["id"] for part in written]

        def describe() -> tuple[int, list[tuple[int, str]]]:
            return self.now_fenced_at(), [self._world.kafka.describe(name) for name in names]

        now, states = self._step("K describe all", describe, reads=True)
        if self.lost_fence(now):
            self._end_own(written)
        for part, state in zip(written, states, strict=True):
            if state != (part["epoch"], "Ongoing") or not self.holds(part):
                raise PrepareFailed(f"{part['id']} is {state}, or its partition does not have it whole")
        places = [self._world.kafka.place_of(name) for name in names]
        return [{**part, **self.prepared_with(epoch), "place": at} for part, at in zip(written, places, strict=True)]

    def _end_own(self, parts: Sequence[Committable]) -> None:
        """End what this driver has prepared and will not record, and stop."""
        for part in parts:
            name, producer = part["id"], part["epoch"]
            with suppress(OSError):
                self._step("K abort own", partial(self._world.kafka.end, name, producer, commit=False))
        raise Fenced("another driver has taken the fence")

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """End the transaction; where its producer epoch has moved on, the marker tells."""
        name, producer = part["id"], part["epoch"]
        if self.holds(part):
            answer = twice(lambda: self._step("K commit", lambda: self._world.kafka.end(name, producer, commit=True)))
        elif (state := self.state(name)) == (producer, "Ongoing"):
            return Verdict(ABORTED, f"{name}: its partition does not have it whole")
        else:
            answer = f"{state}"
        if answer == "OK" or self.marker(part["slot"]) >= epoch.number:
            return COMMITTED
        return Verdict(ABORTED, f"{name}: {answer}, and no marker")

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Whether neither the marker of a part of a done epoch nor its rows are there; `WentBack` if one of them is."""
        marked = self.is_marked(done, part)
        if marked != self.is_in_log(part):
            raise WentBack(f"the marker of epoch {done.epoch} is {'' if marked else 'not '}there, and its rows differ")
        return not marked

    def is_marked(self, done: LastDone, part: Committable) -> bool:
        """Read a part's marker."""
        mark = self.marks().get((part["slot"], done.epoch % 2))
        return mark is not None and mark.epoch >= done.epoch

    def is_in_log(self, part: Committable) -> bool:
        """Read the log: a part is there if its transaction was committed at its place."""
        committed, one = self._world.kafka.committed, (part["id"], part["epoch"], part["place"])
        return self._step("K log of done", lambda: one in committed, reads=True)

    def state(self, name: str) -> tuple[int, str]:
        """Ask the coordinator for an id's producer epoch and state."""
        return twice(lambda: self._step("K describe", lambda: self._world.kafka.describe(name), reads=True))

    def marker(self, partition: int) -> int:
        """Read one partition's marker."""
        return self._step("K marker", lambda: self._world.kafka.marker(self._key, partition), reads=True)

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Produce the partition's rows again in a new transaction, once nobody can commit what is left of the old."""
        name, producer = part["id"], part["epoch"]
        answer = twice(lambda: self._step("K end lost", lambda: self._world.kafka.end(name, producer, commit=False)))
        if answer != "OK" and self.state(name) == (producer + 1, "CompleteCommit"):
            raise OutcomeUnknown(f"{name} was committed meanwhile")
        kept = self.kept(part, rows)
        self.apply_with(epoch, part)
        generation = self._identity.generation
        name = str(TransactionalId(self._key, generation, part["slot"], epoch.number % 2, 0, attempt))
        replayed = {**part, "id": name, "epoch": self.initialise(name)}
        self.send(replayed, self._key, kept, epoch)
        # the answers to what was sent say it: a failover may lose the transaction from here on
        place = self._world.kafka.place_of(name)
        if self.lost_fence(self._step("K describe fence", self.now_fenced_at, reads=True)):
            self._end_own([replayed])
        return {**replayed, "place": place}

    def kept(self, part: Committable, rows: Rows) -> list[Row]:
        """Return the rows of a lost part, out of the spool."""
        found: list[Any] = list(rows.read(part["task"]))
        return found

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        """Abort the open transactions that ``keep`` does not name."""
        generation = self._identity.generation
        open_ones = self._step("K list", lambda: self._world.kafka.ongoing(self._key, generation), reads=True)
        return self.end_all(open_ones, keep, done)

    def end_all(
        self, open_ones: Sequence[tuple[str, int]], keep: Sequence[Committable], done: Sequence[Committable]
    ) -> list[str]:
        """Abort those that ``keep`` does not name."""
        kept = {(part["id"], part["epoch"]) for part in keep}
        gone = [one for one in open_ones if one not in kept]
        if gone and self.lost_fence(self._step("K describe open", self.now_fenced_at, reads=True)):
            # the newest driver sweeps
            return []
        self.refuse_done(gone, done)
        for one in gone:
            self._abort(*one)
        return [name for name, _ in gone]

    def refuse_done(self, gone: Sequence[tuple[str, int]], done: Sequence[Committable]) -> None:
        """Never abort what a done epoch had."""
        if again := {(part["id"], part["epoch"]) for part in done}.intersection(gone):
            raise WentBack(f"{again} is open, and its epoch is done")

    def _abort(self, name: str, producer: int) -> None:
        def apply() -> str:
            answer = self._world.kafka.end(name, producer, commit=False)
            if answer == "OK":
                self._world.ended("K", name, producer)
            return answer

        answer = self._step("K abort", apply)
        if answer != "OK" and self.state(name) == (producer + 1, "CompleteCommit"):
            raise WentBack(f"{name}: what nobody recorded is committed")


class KafkaLogPort(KafkaPort):
    """Keeps rows in the topic's log alone: a replay takes them from there."""

    def kept(self, part: Committable, rows: Rows) -> list[Row]:
        """Return what the log holds of the lost transaction, if it is all."""
        del rows
        found = self.find(part)
        self.prove(part, found)
        return found

    def find(self, part: Committable) -> list[Row]:
        """Read the log, whatever became of the transactions in it, for what this producer has written."""
        name, epoch = part["id"], part["epoch"]
        return self._step("K log", lambda: self._world.kafka.records_of(name, epoch), reads=True)

    def prove(self, part: Committable, found: list[Row]) -> None:
        """Raise `LogIncomplete` unless these are all."""
        if len(found) != part["rows"]:
            raise LogIncomplete(f"{len(found)} of {part['rows']} records of {part['id']} are left")


class KafkaTask:
    """A task's transaction."""

    def __init__(self, port: KafkaPort, name: str, task: Task) -> None:
        self._port = port
        self._task = task
        self.part: Committable = {
            "id": name,
            "epoch": port.initialise(name),
            "slot": task.partition,
            "task": task.uuid,
            "rows": 0,
        }

    def write(self, rows: list[Row]) -> None:
        """Produce, and count the rows: their number is recorded."""
        self._port.send(self.part, identity_key(self._task.identity), rows, self._task.epoch)
        self.part["rows"] += len(rows)

    def prepare(self) -> Committable:
        """Leave the transaction open."""
        return self.part


def group(partition: int, parity: int) -> str:
    """Return the name of the group that keeps a partition's marks."""
    return f"{partition}.{parity}"


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the marks that an epoch leaves."""
    return {group(part["slot"], last.epoch % 2): Mark(last.epoch, last.attempt) for part in last.parts}
