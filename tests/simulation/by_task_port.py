"""PostgreSQL with ``atomic=False`` over the in-memory server: each task prepares a transaction of its own.

So an epoch has as many parts as tasks, and they become visible, or are lost, one by one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import PrepareFailed, WentBack
from epochsink.identity import PreparedName, identity_key
from epochsink.sink import COMMITTED, Epoch, LastDone, Mark, Rows, Task, Verdict, verify_marks
from simulation.port import ABORTED, UNKNOWN, twice
from simulation.postgres_port import PreparedPort
from simulation.targets import Postgres, PreparedRows, Staged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from epochsink.sink import Committable
    from simulation.readers import Row


@dataclass(slots=True)
class ByTaskPostgres(Postgres):
    """Its marker rows are (identity key, epoch, part) -> attempt."""

    def marks(self, key: str, epoch: int | None, parts: Iterable[str]) -> dict[str, Mark]:
        """Return the marks of an epoch and of later ones; if it has none, the newest older one stands for its parts."""
        newest = self.newest(key)
        least = newest if epoch is None else min(epoch, newest)
        mine = sorted((number, part, by) for (owner, number, part), by in self.markers.items() if owner == key)
        found = {part: Mark(number, by) for number, part, by in mine if number >= least}
        if found and epoch is not None and newest < epoch:
            found |= dict.fromkeys(parts, next(iter(found.values())))
        return found

    def attempts(self, key: str, epoch: int) -> set[str]:
        """Return which attempts have applied something of an epoch."""
        return {by for (owner, number, _), by in self.markers.items() if (owner, number) == (key, epoch)}

    def newest(self, key: str) -> int:
        """Return the newest epoch with a marker row, -1 if none."""
        return max((number for owner, number, _ in self.markers if owner == key), default=-1)

    def alter_marker(self, by: Mark) -> bool:
        """Write a marker row at the newest or above; return whether it was possible."""
        for key, number, part in sorted(self.markers)[-1:]:
            marker = key, number + by.epoch, part
            if any(one.marks(marker) for one in self.prepared.values()):
                return False
            self.markers[marker] = by.attempt
        return bool(self.markers)


class ByTaskPort(PreparedPort):
    """Tasks prepare; the vote looks whether all is there."""

    letter = "T"

    def begin(self, task: Task, attempt_number: int = 0) -> PreparingTask:  # type: ignore[override] # another kind
        """Open a transaction."""
        return PreparingTask(self, task)

    def table(self, part: Committable) -> Staged:
        """Return what does not exist: nothing is staged."""
        return Staged(self._key, self._identity.generation, part["attempt"])

    def prepare_rows(self, key: str, generation: int, epoch: Epoch, task: str, rows: list[Row]) -> Committable:
        """PREPARE TRANSACTION of a task's rows with their marker."""
        gid = str(PreparedName(key, generation, epoch.number, epoch.attempt, task))
        prepared = PreparedRows((key, epoch.number, task), epoch.attempt, rows)
        self.refuse(epoch, self._step("T prepare", lambda: self.target.prepare(gid, prepared)))
        return {"gid": gid, "attempt": epoch.attempt, "task": task}

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """See the epoch before applied, this one by nobody else, and each task's transaction prepared."""
        if after is not None:
            self.compare(after, None)
        applied = self._step("T attempts", lambda: self.target.attempts(self._key, epoch.number), reads=True)
        if applied - {epoch.attempt}:
            raise WentBack(f"epoch {epoch.number} is applied by {applied}")
        there = self._step("T prepared", lambda: set(self.target.prepared), reads=True)
        if gone := [part["gid"] for part in written if part["gid"] not in there]:
            raise PrepareFailed(f"{gone} are not in pg_prepared_xacts")
        return [{**part, **self.prepared_with(epoch)} for part in written]

    def commit_at_once(
        self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None
    ) -> Collection[int]:
        """COMMIT PREPARED of all parts, each in a session of its own; return those of which the server has said so."""
        return [index for index, part in enumerate(parts) if self.is_committed(part)]

    def is_committed(self, part: Committable) -> bool:
        """Commit a part once; return whether that is certain."""
        commit = partial(self.target.commit_prepared, part["gid"])
        with suppress(OSError):
            return bool(self._step("T commit at once", commit) == "OK")
        return False

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Whether the part has no marker row."""
        marker = self._key, done.epoch, part["task"]
        return bool(self._step("T marker", lambda: self.target.markers.get(marker), reads=True) is None)

    def judge(self, epoch: Epoch, part: Committable, evidence: str) -> Verdict:
        """Say what the part's marker row says."""
        marker = self._key, epoch.number, part["task"]
        attempt = self._step("T marker", lambda: self.target.markers.get(marker), reads=True)
        if attempt == part["attempt"]:
            return COMMITTED
        return Verdict(ABORTED if attempt is None else UNKNOWN, f"{evidence}, and the marker of attempt {attempt}")

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Prepare one task's rows again."""
        self.apply_with(epoch, part)
        again, kept = Epoch(epoch.number, attempt), list[Any](rows.read(part["task"]))
        made = self.prepare_rows(self._key, self._identity.generation, again, part["task"], kept)
        return made | {"options": self.options_of(part)}

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Leave nothing: nothing is staged."""

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the parts' marker rows with the ledger; commit what a failover has brought back as prepared."""
        try:
            self.compare(done, pending)
        except WentBack:
            if done is None or not self.finish_again(done):
                raise
            self.compare(done, pending)

    def compare(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` unless the marker rows say what the ledger does."""
        wanted = (done.epoch, marks_of(done)) if done else (None, ())
        look = partial(self.target.marks, self._key, *wanted)
        found = twice(lambda: self._step("T applied", look, reads=True))
        verify_marks("sink T", found, done, pending, marks_of)


class PreparingTask:
    """A task's transaction."""

    def __init__(self, port: ByTaskPort, task: Task) -> None:
        self._port = port
        self._task = task
        self._rows: list[Row] = []

    def write(self, rows: list[Row]) -> None:
        """COPY: nobody sees it, and it goes with its session."""
        self._rows += rows

    def prepare(self) -> Committable:
        """PREPARE TRANSACTION."""
        who, task = self._task.identity, self._task
        return self._port.prepare_rows(identity_key(who), who.generation, task.epoch, task.uuid, self._rows)


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the mark that each part of an epoch leaves."""
    return {part["task"]: Mark(last.epoch, part["attempt"]) for part in last.parts}
