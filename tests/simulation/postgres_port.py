"""PostgreSQL over the in-memory server: staged, or prepared."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import PrepareFailed, WentBack
from epochsink.identity import PreparedName, identity_key
from epochsink.sink import COMMITTED, Epoch, LastDone, Mark, Rows, Task, Verdict, verify_marks
from simulation.port import ABORTED, ANY_GENERATION, UNKNOWN, PortBase, read_rows, twice
from simulation.targets import PreparedRows, Staged, gid_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.sink import Committable
    from simulation.readers import Row
    from simulation.targets import Postgres


class PostgresPort(PortBase):
    """What both ways of PostgreSQL share: staging tables by attempt, marker rows."""

    repairs = True

    @property
    def target(self) -> Any:
        """Return the server."""
        return self._world.postgres[self.letter]

    def begin(self, task: Task, attempt_number: int = 0) -> StagingTask:
        """Open a COPY into the attempt's staging table."""
        return StagingTask(self, task)

    def stage(self, table: Staged, task: str, rows: list[Row]) -> int:
        """COPY rows; return the table's shape that they are for."""
        shape: int = self._step(f"{self.letter} stage", lambda: self.target.stage(table, task, rows))
        return shape

    def is_altered(self, part: Committable) -> bool:
        """Whether the table is not what rows were staged for: looked at in the transaction that merges them."""
        return bool(part["shapes"] != [self.target.shape])

    def table(self, part: Committable) -> Staged:
        """Return the staging table that a committable names."""
        return Staged(self._key, part["generation"], part["attempt"])

    def newest(self) -> int | None:
        """Read the newest marker row."""
        found: int = self._step(f"{self.letter} newest", lambda: self.target.newest(self._key), reads=True)
        return None if found < 0 else found

    def leftovers(self) -> list[str]:
        """Return prepared transactions and staging tables."""
        target = self.target
        return [*target.prepared_of(self._key, ANY_GENERATION), *map(str, target.staging_of(self._key, ANY_GENERATION))]

    def generations(self) -> list[int]:
        """Return those of prepared transactions and staging tables."""
        names = map(gid_of, self.target.prepared_of(self._key, ANY_GENERATION))
        staged = self.target.staging_of(self._key, ANY_GENERATION)
        return [*(name.generation for name in names if name), *(table.generation for table in staged)]

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the newest marker row with the ledger."""
        mark = twice(lambda: self._step(f"{self.letter} applied", lambda: self.target.mark(self._key), reads=True))
        verify_marks(f"sink {self.letter}", {} if mark is None else {"all": mark}, done, pending, marks_of)

    def judge(self, epoch: Epoch, part: Committable, evidence: str) -> Verdict:
        """Say what the marker row says of an epoch whose prepared part is gone."""
        attempt = self._step(f"{self.letter} marker", lambda: self.target.marker(self._key, epoch.number), reads=True)
        if attempt == part["attempt"]:
            return COMMITTED
        if attempt is None:
            return Verdict(ABORTED, f"{evidence}, and no marker")
        return Verdict(UNKNOWN, f"{evidence}, and the marker of attempt {attempt}")

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Drop the staging table."""
        for part in parts:
            self.drop(self.table(part))

    def drop(self, table: Staged) -> None:
        """Drop a staging table."""
        self._step(f"{self.letter} drop", lambda: self.target.drop_staging(table))

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
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

    def staged(self, epoch: Epoch, written: Sequence[Committable]) -> Committable:
        """Return the part that stands for what tasks have staged."""
        return {
            "attempt": epoch.attempt,
            "generation": self._identity.generation,
            "tasks": [part["task"] for part in written],
            "shapes": sorted({part["shape"] for part in written}),
        }

    def restage(self, rows: Rows, attempt: str) -> Committable:
        """Put spooled rows into a staging table of this generation."""
        table = Staged(self._key, self._identity.generation, attempt)
        shape = self.stage(table, attempt, read_rows(rows))
        return {"attempt": attempt, "generation": table.generation, "tasks": [attempt], "shapes": [shape]}


class StagingTask:
    """A task's COPY into staging."""

    def __init__(self, port: PostgresPort, task: Task) -> None:
        self._port = port
        self._task = task
        self._shape = 0

    def write(self, rows: list[Row]) -> None:
        """COPY."""
        table = Staged(identity_key(self._task.identity), self._task.identity.generation, self._task.epoch.attempt)
        self._shape = self._port.stage(table, self._task.uuid, rows)

    def prepare(self) -> Committable:
        """Name the task."""
        return {"task": self._task.uuid, "shape": self._shape}


class StagedPort(PostgresPort):
    """``commit="staged"``: the merge runs in phase 2."""

    letter = "S"

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Verify that every accepted task's rows are staged."""
        part = self.staged(epoch, written) | self.prepared_with(epoch)
        table = self.table(part)
        answer = self._step(
            "S count", lambda: self.is_altered(part) or self.target.staged_rows(table, part["tasks"]), reads=True
        )
        if answer is None or answer is True:
            raise PrepareFailed("staged rows are gone, or the table has changed")
        return [part]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """Merge, with the marker row in the same transaction."""
        self.apply_with(epoch, part)
        answer = twice(lambda: self.merge(epoch, part, mark_of(after)))
        if answer == "BEHIND":
            raise WentBack(f"the marker of the epoch before {epoch.number} is gone since it was looked for")
        return COMMITTED if answer == "OK" else self.judge(epoch, part, answer)

    def merge(self, epoch: Epoch, part: Committable, after: Mark | None) -> str:
        """Merge staged rows and the marker, and see the marker of the epoch before, in one transaction."""
        table, marker = self.table(part), (self._key, epoch.number)
        target: Postgres = self.target

        def apply() -> str:
            if marker not in target.markers and self.is_altered(part):
                return "ALTERED"
            return target.merge(table, part["tasks"], marker, part["attempt"], after)

        return self._step("S merge", apply)

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Stage the rows again."""
        self.apply_with(epoch, part)
        return self.restage(rows, attempt) | {"options": self.options_of(part)}


class PreparedPort(PostgresPort):
    """``commit="prepared"``: the merge runs in phase 1, COMMIT PREPARED in phase 2."""

    letter = "P"

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Merge and prepare."""
        return [self.prepare(epoch, self.staged(epoch, written) | self.prepared_with(epoch), after)]

    def prepare(self, epoch: Epoch, part: Committable, after: LastDone | None = None) -> Committable:
        """PREPARE TRANSACTION of the merge of staged rows and the marker row."""
        gid = str(PreparedName(self._key, part["generation"], epoch.number, part["attempt"]))
        table, marker = self.table(part), (self._key, epoch.number)

        def apply() -> str:
            if marker not in self.target.markers and self.is_altered(part):
                return "ALTERED"
            rows = self.target.staged_rows(table, part["tasks"])
            if rows is None:
                return "NOROWS"
            answer: str = self.target.prepare(gid, PreparedRows(marker, part["attempt"], rows), mark_of(after))
            if answer == "OK":
                self.target.verify_shape(table, part["tasks"])
            return answer

        answer = self._step(f"{self.letter} prepare", apply)
        self.refuse(epoch, answer)
        return {**part, "gid": gid}

    def refuse(self, epoch: Epoch, answer: str) -> None:
        """Raise what an answer to PREPARE TRANSACTION means."""
        if answer in ("23505", "BEHIND"):
            raise WentBack(f"the marker of epoch {epoch.number} exists, or that of the one before it does not")
        if answer != "OK":
            raise PrepareFailed(f"PREPARE TRANSACTION: {answer}")

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """COMMIT PREPARED; where the gid is gone, the marker row tells."""
        gid = part["gid"]
        answer = twice(lambda: self._step(f"{self.letter} commit", lambda: self.target.commit_prepared(gid)))
        return COMMITTED if answer == "OK" else self.judge(epoch, part, answer)

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Stage and prepare the rows again."""
        self.apply_with(epoch, part)
        return self.prepare(epoch, self.restage(rows, attempt) | {"options": self.options_of(part)}, after)

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        """Roll back the prepared transactions, then drop the staging tables, that ``keep`` does not name."""
        generation = self._identity.generation
        kept = {part["gid"] for part in keep}
        gids = self._step(f"{self.letter} list", lambda: self.gids(generation), reads=True)
        gone = [gid for gid in gids if gid not in kept]
        self.refuse_done(gone, done)
        for gid in gone:
            self._roll_back(gid)
        return gone + super().abort_orphans(keep, done)

    def gids(self, generation: int) -> Sequence[str]:
        """Return the prepared transactions of this identity, up to a generation."""
        found: list[str] = self.target.prepared_of(self._key, generation)
        return found

    def refuse_done(self, gone: Sequence[str], done: Sequence[Committable]) -> None:
        """Never roll back what a done epoch had."""
        if again := {part["gid"] for part in done}.intersection(gone):
            raise WentBack(f"{again} is prepared, and its epoch is done")

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the newest marker row with the ledger; commit what a failover has brought back as prepared."""
        try:
            super().verify_applied(done, pending)
        except WentBack:
            if done is None or not self.finish_again(done):
                raise
            super().verify_applied(done, pending)

    def finish_again(self, done: LastDone) -> bool:
        """COMMIT PREPARED what is prepared of a done epoch; return whether there was anything."""
        gids = self._step(f"{self.letter} list", lambda: set(self.target.prepared), reads=True)
        again = [part["gid"] for part in done.parts if part["gid"] in gids]
        for gid in again:
            self._step(f"{self.letter} commit again", partial(self.target.commit_prepared, gid))
        return bool(again)

    def _roll_back(self, gid: str) -> None:
        def apply() -> str:
            answer: str = self.target.rollback_prepared(gid)
            if answer == "OK":
                self._world.ended(self.letter, gid)
            return answer

        self._step(f"{self.letter} roll back", apply)


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the mark that an epoch leaves."""
    return {"all": Mark(last.epoch, last.parts[0]["attempt"])} if last.parts else {}


def mark_of(last: LastDone | None) -> Mark | None:
    """Return the newest mark that there must be, None if that is not known."""
    return marks_of(last).get("all") if last else None
