"""PostgreSQL with ``atomic=False`` over the in-memory server: each task prepares a transaction of its own.

So an epoch has a part for each task, and they become visible, or are lost, one by one; and before them a seal.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import PrepareFailed, WentBack
from epochsink.identity import PreparedName, identity_key
from epochsink.sink import COMMITTED, Epoch, LastDone, Mark, Outcome, Rows, Task, Verdict, verify_marks
from simulation.port import ABORTED, UNKNOWN, twice
from simulation.postgres_port import PreparedPort
from simulation.targets import Postgres, PreparedRows, Staged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from epochsink.sink import Ballot, Committable
    from simulation.readers import Row


SEAL = "all"
"""What the marker of a whole epoch calls its part."""


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

    def agrees(self, key: str, done: LastDone | None, pending: LastDone | None) -> bool:
        """Whether the marker rows are those of the newest epoch that is done, or of the pending one."""
        found = self.marks(key, done.epoch if done else None, marks_of(done) if done else ())
        try:
            verify_marks("sink T", found, done, pending, marks_of)
        except WentBack:
            return False
        return True

    def seal(self, gid: str, prepared: PreparedRows, after: LastDone | None, own: LastDone | None) -> str:
        """PREPARE TRANSACTION of a seal, which sees the markers of the epoch before and of its ``own`` at the most."""
        there = after is None or self.agrees(prepared.marker[0], after, own)
        return self.prepare(gid, prepared) if there else "BEHIND"

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
    _is_sealed = True

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
        parts = [self.prepare_seal(epoch, after), *written]
        return [{**part, **self.prepared_with(epoch)} for part in parts]

    def prepare_seal(self, epoch: Epoch, after: LastDone | None, own: LastDone | None = None) -> Committable:
        """PREPARE TRANSACTION of a marker and no rows."""
        gid = str(PreparedName(self._key, self._identity.generation, epoch.number, epoch.attempt, SEAL))
        empty = PreparedRows((self._key, epoch.number, SEAL), epoch.attempt, [])
        self.refuse(epoch, self._step("T seal", lambda: self.target.seal(gid, empty, after, own)))
        return {"gid": gid, "attempt": epoch.attempt, "task": SEAL}

    def commit_at_once(
        self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None
    ) -> Collection[int]:
        """COMMIT PREPARED of all parts, each in a session of its own; return those of which the server has said so.

        The seal first: without it none of them.
        """
        self._is_sealed = parts[0]["task"] != SEAL or self.is_committed(parts[0])
        if not self._is_sealed:
            return ()
        return [index for index, part in enumerate(parts) if part["task"] == SEAL or self.is_committed(part)]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """COMMIT PREPARED, unless the seal that came with the part is not committed: then it waits for that."""
        gid = part["gid"]
        if part["task"] == SEAL or self._is_sealed:
            verdict = super().commit(epoch, part, rows, after)
            self._is_sealed = verdict.outcome is Outcome.COMMITTED or part["task"] != SEAL
            return verdict
        if self.is_prepared(gid):
            return Verdict(ABORTED, f"{gid} waits for its seal")
        return self.judge(epoch, part, "42704")

    def is_prepared(self, gid: str) -> bool:
        """Look for a prepared transaction."""
        return bool(self._step("T look", lambda: gid in self.target.prepared, reads=True))

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

    def replay_of(self, epoch: Epoch, part: Committable, ballot: Ballot, attempt: str) -> Committable:
        """Prepare the seal or one task's rows again, unless these are there and only waited for the seal."""
        self.apply_with(epoch, part)
        again = Epoch(epoch.number, attempt)
        if part["task"] == SEAL:
            after, own = ballot.after, LastDone(epoch.number, epoch.attempt, tuple(ballot.parts))
            made = self.prepare_seal(again, after if after and after.parts else None, own)
            return made | {"options": self.options_of(part)}
        if self.is_prepared(part["gid"]):
            return part
        kept = list[Any](ballot.rows.read(part["task"]))
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

    def finish_again(self, done: LastDone) -> bool:
        """Commit nothing unless each part, and so the seal, is prepared or has its marker."""
        there = self._step("T list", lambda: set(self.target.prepared), reads=True)
        if any(self.lacks(done, part) for part in done.parts if part["gid"] not in there):
            return False
        return super().finish_again(done)

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
