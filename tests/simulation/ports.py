"""The sinks over the in-memory targets: the decisions of the real committers, each request one step.

A port is a `SinkCommitter`, and also the maker of its tasks' writers: `begin` stands for `Sink.writer`. Rows are `Row`
tuples.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from epochsink.errors import PrepareFailed, SpoolMissing, WentBack
from epochsink.naming import PreparedName, TransactionalId, identity_key
from epochsink.protocol import COMMITTED, Epoch, Identity, Outcome, Rows, Task, Verdict
from simulation.world import PreparedRows, Row, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from epochsink.protocol import Committable, SinkCommitter
    from simulation.steps import Stepper
    from simulation.world import World

ABORTED = Outcome.ABORTED
UNKNOWN = Outcome.UNKNOWN


def read_rows(rows: Rows) -> list[Row]:
    """Return all spooled rows of an epoch in the order of the accepted tasks."""
    found: list[Any] = [row for task in rows.tasks() for row in rows.read(task)]
    return found


def twice(request: Callable[[], str]) -> str:
    """Make a request that is right to repeat, once more if its outcome is unknown."""
    try:
        return request()
    except OSError:
        return request()


class TaskWriter(Protocol):
    """One task attempt's side of a sink."""

    def write(self, rows: list[Row]) -> None: ...
    def prepare(self) -> Committable: ...


class Port(Protocol):
    """What the simulated driver and tasks need of a sink."""

    @property
    def committer(self) -> SinkCommitter: ...
    def begin(self, task: Task, attempt_number: int = 0) -> TaskWriter: ...


class PortBase:
    """What all ports share."""

    letter = "?"

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None:
        self._world = world
        self._step = step
        self._spool = spool
        self._key = ""
        self._identity = Identity("", "")

    @property
    def committer(self) -> SinkCommitter:
        """Return the driver's side, which is this object."""
        found: Any = self
        return found  # type: ignore[no-any-return]

    def check(self, _schema: object) -> list[str]:
        """Find nothing."""
        return []

    def found(self) -> dict[str, Any]:
        """Fix nothing."""
        return {}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is."""
        self._identity = identity
        self._key = identity_key(identity)

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Leave nothing."""

    def close(self) -> None:
        """Hold nothing."""


class KafkaPort(PortBase):
    """One transaction for each task attempt; phase 2 ends it from the driver."""

    letter = "K"

    def begin(self, task: Task, attempt_number: int = 0) -> KafkaTask:
        """Open a transaction under a bounded id; with a nonce where no spool could repair a zombie's abort."""
        nonce = "" if self._spool else task.uuid
        name = TransactionalId(
            identity_key(task.identity),
            task.identity.generation,
            task.slot,
            task.epoch.number % 2,
            attempt_number,
            nonce,
        )
        return KafkaTask(self, str(name), task)

    def initialise(self, name: str) -> int:
        """InitProducerId."""
        return self._step("K initialise", lambda: self._world.kafka.initialise(name))

    def send(self, part: Committable, key: str, rows: list[Row], number: int) -> None:
        """Produce and flush rows with the epoch's marker."""
        name, epoch, marker = part["id"], part["epoch"], (key, part["slot"], number)
        answer = self._step("K send", lambda: self._world.kafka.send(name, epoch, rows, marker))
        if answer != "OK":
            raise PrepareFailed(f"{name} was fenced")

    def newest(self) -> int | None:
        """Read the markers."""
        found = self._step("K newest", lambda: self._world.kafka.newest(self._key), reads=True)
        return None if found < 0 else found

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002
        """Verify that every transaction is open under the producer epoch that the task had."""
        names = [part["id"] for part in written]
        states = self._step("K describe all", lambda: [self._world.kafka.describe(name) for name in names], reads=True)
        for part, state in zip(written, states, strict=True):
            if state != (part["epoch"], "Ongoing"):
                raise PrepareFailed(f"{part['id']} is {state}")
        return list(written)

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - others need it
        """End the transaction; where its producer epoch has moved on, the marker tells."""
        name, producer = part["id"], part["epoch"]
        answer = twice(lambda: self._step("K commit", lambda: self._world.kafka.end(name, producer, commit=True)))
        if answer == "OK" or self.marker(part["slot"]) >= epoch.number:
            return COMMITTED
        return Verdict(ABORTED, f"{name}: {answer}, and no marker")

    def marker(self, slot: int) -> int:
        """Read one slot's marker."""
        return self._step("K marker", lambda: self._world.kafka.marker(self._key, slot), reads=True)

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:
        """Produce the slot's rows again in a new transaction."""
        spooled: list[Any] = list(rows.read(part["task"]))
        generation = self._identity.generation
        name = str(TransactionalId(self._key, generation, part["slot"], epoch.number % 2, 0, attempt))
        replayed = {**part, "id": name, "epoch": self.initialise(name)}
        self.send(replayed, self._key, spooled, epoch.number)
        return replayed

    def sweep(self, keep: Sequence[Committable]) -> list[str]:
        """Abort the open transactions that ``keep`` does not name."""
        generation = self._identity.generation
        kept = {(part["id"], part["epoch"]) for part in keep}
        open_ones = self._step("K list", lambda: self._world.kafka.ongoing(self._key, generation), reads=True)
        gone = [one for one in open_ones if one not in kept]
        for one in gone:
            self._abort(*one)
        return [name for name, _ in gone]

    def _abort(self, name: str, producer: int) -> None:
        answer = self._step("K abort", lambda: self._world.kafka.end(name, producer, commit=False))
        if answer != "OK":
            state = self._step("K describe", lambda: self._world.kafka.describe(name), reads=True)
            if state == (producer + 1, "CompleteCommit"):
                raise WentBack(f"{name}: what nobody recorded is committed")


class KafkaTask:
    """A task's transaction."""

    def __init__(self, port: KafkaPort, name: str, task: Task) -> None:
        self._port = port
        self._task = task
        self._part: Committable = {"id": name, "epoch": port.initialise(name), "slot": task.slot, "task": task.uuid}

    def write(self, rows: list[Row]) -> None:
        """Produce."""
        self._port.send(self._part, identity_key(self._task.identity), rows, self._task.epoch.number)

    def prepare(self) -> Committable:
        """Leave the transaction open."""
        return self._part


class PostgresPort(PortBase):
    """What both ways of PostgreSQL share: staging tables by attempt, marker rows."""

    @property
    def target(self) -> Any:
        """Return the server."""
        return self._world.postgres[self.letter]

    def begin(self, task: Task, attempt_number: int = 0) -> StagingTask:  # noqa: ARG002 - Kafka's ids need it
        """Open a COPY into the attempt's staging table."""
        return StagingTask(self, task)

    def stage(self, table: Staged, task: str, rows: list[Row]) -> None:
        """COPY rows."""
        self._step(f"{self.letter} stage", lambda: self.target.stage(table, task, rows))

    def table(self, part: Committable) -> Staged:
        """Return the staging table that a committable names."""
        return Staged(self._key, part["generation"], part["attempt"])

    def newest(self) -> int | None:
        """Read the newest marker row."""
        found: int = self._step(f"{self.letter} newest", lambda: self.target.newest(self._key), reads=True)
        return None if found < 0 else found

    def judge(self, epoch: Epoch, evidence: str) -> Verdict:
        """Say what the marker row says of an epoch whose prepared part is gone."""
        attempt = self._step(f"{self.letter} marker", lambda: self.target.marker(self._key, epoch.number), reads=True)
        if attempt == epoch.attempt:
            return COMMITTED
        if attempt is None:
            return Verdict(ABORTED, f"{evidence}, and no marker")
        return Verdict(UNKNOWN, f"{evidence}, and the marker of attempt {attempt}")

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:  # noqa: ARG002 - the protocol's
        """Drop the staging table."""
        for part in parts:
            self.drop(self.table(part))

    def drop(self, table: Staged) -> None:
        """Drop a staging table."""
        self._step(f"{self.letter} drop", lambda: self.target.drop_staging(table))

    def sweep(self, keep: Sequence[Committable]) -> list[str]:
        """Drop the staging tables that ``keep`` does not name."""
        generation = self._identity.generation
        kept = {self.table(part) for part in keep}
        tables = self._step(
            f"{self.letter} list staging", lambda: self.target.staging_of(self._key, generation), reads=True
        )
        gone = [table for table in tables if table not in kept]
        for table in gone:
            self.drop(table)
        return [table.attempt for table in gone]

    def restage(self, rows: Rows, attempt: str) -> Committable:
        """Put spooled rows into a staging table of this generation."""
        table = Staged(self._key, self._identity.generation, attempt)
        self.stage(table, attempt, read_rows(rows))
        return {"attempt": attempt, "generation": table.generation, "tasks": [attempt]}


class StagingTask:
    """A task's COPY into staging."""

    def __init__(self, port: PostgresPort, task: Task) -> None:
        self._port = port
        self._task = task

    def write(self, rows: list[Row]) -> None:
        """COPY."""
        table = Staged(identity_key(self._task.identity), self._task.identity.generation, self._task.epoch.attempt)
        self._port.stage(table, self._task.uuid, rows)

    def prepare(self) -> Committable:
        """Name the task."""
        return {"task": self._task.uuid}


class StagedPort(PostgresPort):
    """``commit="staged"``: the merge runs in phase 2."""

    letter = "S"

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002
        """Verify that every accepted task's rows are staged."""
        tasks = [part["task"] for part in written]
        part = {"attempt": epoch.attempt, "generation": self._identity.generation, "tasks": tasks}
        table = self.table(part)
        if self._step("S count", lambda: self.target.staged_rows(table, tasks), reads=True) is None:
            raise PrepareFailed("staged rows are gone")
        return [part]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        """Merge, with the marker row in the same transaction."""
        table, marker = self.table(part), (self._key, epoch.number)
        answer = twice(
            lambda: self._step("S merge", lambda: self.target.merge(table, part["tasks"], marker, epoch.attempt))
        )
        return COMMITTED if answer == "OK" else self.judge(epoch, answer)

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:  # noqa: ARG002
        """Stage the rows again."""
        return self.restage(rows, attempt)


class PreparedPort(PostgresPort):
    """``commit="prepared"``: the merge runs in phase 1, COMMIT PREPARED in phase 2."""

    letter = "P"

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002
        """Merge and prepare."""
        tasks = [part["task"] for part in written]
        part = {"attempt": epoch.attempt, "generation": self._identity.generation, "tasks": tasks}
        return [self.prepare(epoch, part)]

    def prepare(self, epoch: Epoch, part: Committable) -> Committable:
        """PREPARE TRANSACTION of the merge of staged rows and the marker row."""
        gid = str(PreparedName(self._key, part["generation"], epoch.number, part["attempt"]))
        table, marker = self.table(part), (self._key, epoch.number)

        def apply() -> str:
            rows = self.target.staged_rows(table, part["tasks"])
            answer: str = (
                "NOROWS" if rows is None else self.target.prepare(gid, PreparedRows(marker, epoch.attempt, rows))
            )
            return answer

        answer = self._step("P prepare", apply)
        if answer == "23505":
            raise WentBack(f"the marker of epoch {epoch.number} exists")
        if answer != "OK":
            raise PrepareFailed(f"PREPARE TRANSACTION: {answer}")
        return {**part, "gid": gid}

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        """COMMIT PREPARED; where the gid is gone, the marker row tells."""
        gid = part["gid"]
        answer = twice(lambda: self._step("P commit", lambda: self.target.commit_prepared(gid)))
        return COMMITTED if answer == "OK" else self.judge(epoch, answer)

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:  # noqa: ARG002
        """Stage and prepare the rows again."""
        return self.prepare(epoch, self.restage(rows, attempt))

    def sweep(self, keep: Sequence[Committable]) -> list[str]:
        """Roll back the prepared transactions, then drop the staging tables, that ``keep`` does not name."""
        generation = self._identity.generation
        kept = {part["gid"] for part in keep}
        gids = self._step("P list", lambda: self.target.prepared_of(self._key, generation), reads=True)
        gone = [gid for gid in gids if gid not in kept]
        for gid in gone:
            self._roll_back(gid)
        return gone + super().sweep(keep)

    def _roll_back(self, gid: str) -> None:
        self._step("P roll back", lambda: self.target.rollback_prepared(gid))


class SearchPort(PortBase):
    """Elasticsearch: the spool is what is prepared; phase 2 applies it. Without keys, ids come from the position."""

    letter = "E"

    @property
    def target(self) -> Any:
        """Return the index."""
        return self._world.search[self.letter]

    def found(self) -> dict[str, Any]:
        """Fix the base of versions above whatever the index holds."""
        return {"base": self._step(f"{self.letter} found", self.target.new_base, reads=True)}

    def begin(self, task: Task, attempt_number: int = 0) -> SearchTask:  # noqa: ARG002 - Kafka's ids need it
        """Write nothing: the spool does."""
        return SearchTask(task)

    def newest(self) -> int | None:
        """Read the marker document."""
        found: int = self._step(f"{self.letter} newest", lambda: self.target.newest(self._key), reads=True)
        return None if found < 0 else found

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002
        """Name the epoch; its rows are in the spool."""
        return [{"attempt": epoch.attempt}]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        """Apply the spool in two bulk requests, the marker document last."""
        try:
            spooled = read_rows(rows)
        except SpoolMissing as gone:
            newest = self.newest()
            done = newest is not None and newest >= epoch.number
            return COMMITTED if done else Verdict(UNKNOWN, f"{gone}, and no marker")
        version = self._identity.origin["base"] + epoch.number
        documents = self.documents(epoch, spooled)
        for some in (documents[:1], documents[1:]):
            twice(partial(self._bulk, version, some))
        key = self._key
        twice(lambda: self._step(f"{self.letter} mark", lambda: self.target.mark(key, epoch.number)))
        return COMMITTED

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> str:
        answer: str = self._step(f"{self.letter} bulk", lambda: self.target.bulk(version, some))
        return answer

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        """Return documents under ids that no other query or epoch uses."""
        return [(f"{self._key}-{epoch.number}-{position}", row) for position, row in enumerate(rows)]

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:
        """Never: nothing prepared can be lost but the spool itself."""
        raise NotImplementedError

    def sweep(self, keep: Sequence[Committable]) -> list[str]:  # noqa: ARG002 - the protocol's
        """Sweep nothing: the coordinator sweeps the spool."""
        return []


class SearchTask:
    """A task's share: the spool holds it."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, rows: list[Row]) -> None:
        """Do nothing."""

    def prepare(self) -> Committable:
        """Name the task."""
        return {"task": self._task.uuid}


class KeyedSearchPort(SearchPort):
    """Elasticsearch with a natural key."""

    letter = "F"

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:  # noqa: ARG002 - keyless ids use it
        """Return the newest row of each key: every epoch updates the same documents."""
        return [(f"key-{row.source % 2}", row) for row in newest_of_each_key(rows)]


def newest_of_each_key(rows: list[Row]) -> list[Row]:
    """Return one row for each of the two keys, the one that came last from the source."""
    newest = {row.source % 2: row for row in sorted(rows, key=lambda row: row.source)}
    return list(newest.values())


PORTS: dict[str, type[PortBase]] = {
    port.letter: port for port in (KafkaPort, PreparedPort, StagedPort, SearchPort, KeyedSearchPort)
}
