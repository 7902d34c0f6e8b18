"""Elasticsearch over the in-memory index: with keys, or without."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import OutcomeUnknown, PrepareFailed, RowsRejected, SpoolDamaged, SpoolMissing, WentBack
from epochsink.sink import COMMITTED, Epoch, LastDone, Mark, Rows, Task, Verdict, verify_marks
from simulation.port import UNKNOWN, PortBase, read_rows, twice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.sink import Committable
    from simulation.readers import Row
    from simulation.search_target import Elasticsearch


WRITERS = 4
"""How often a document may be changed by others while one epoch is applied."""


class SearchPort(PortBase):
    """Elasticsearch: the spool is what is prepared; phase 2 applies it. Without keys, ids come from the position."""

    letter = "E"
    repairs = True
    takes_any_setting = False
    _claimed: Mark | None = None

    @property
    def target(self) -> Any:
        """Return the index."""
        return self._world.search[self.letter]

    def initial_state(self) -> dict[str, Any]:
        """Fix the base of versions above whatever the index holds."""
        return {"base": self._step(f"{self.letter} found", self.target.new_base, reads=True)}

    def begin(self, task: Task, attempt_number: int = 0) -> SearchTask:
        """Write nothing: the spool does."""
        return SearchTask(task)

    def newest(self) -> int | None:
        """Read the marker document."""
        found: int = self._step(f"{self.letter} newest", lambda: self.target.newest(self._key), reads=True)
        return None if found < 0 else found

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the marker document, and the incarnation of the index that it names, with the ledger."""
        mark = self._marker()
        verify_marks(f"index {self.letter}", {} if mark is None else {"all": mark[0]}, done, pending, marks_of)
        if mark is not None and mark[1] != self._incarnation():
            raise WentBack("the index is another incarnation than the one that its marker names")

    def _marker(self) -> tuple[Mark, int] | None:
        found: tuple[Mark, int] | None = twice(
            lambda: self._step(f"{self.letter} applied", lambda: self.target.markers.get(self._key), reads=True)
        )
        return found

    def _incarnation(self) -> int:
        """Look at the index. Raises `OutcomeUnknown` if its settings are such that a crash would lose documents."""
        target = self.target
        look = partial(self._step, f"{self.letter} index", lambda: (target.incarnation, target.durable), reads=True)
        incarnation, durable = look()
        if not (durable or self.takes_any_setting):
            raise OutcomeUnknown("the index acknowledges documents that are not on disk", hint="set it back")
        found: int = incarnation
        return found

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Name the epoch; its rows are in the spool."""
        try:
            self._incarnation()
        except OutcomeUnknown as error:
            raise PrepareFailed(str(error), hint=error.hint, may_pass=False) from error
        return [{"attempt": epoch.attempt, **self.prepared_with(epoch)}]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """Apply the spool in two bulk requests, the marker document last."""
        marker = self._marker()
        seen = None if marker is None else marker[0]
        if seen is not None and seen.epoch >= epoch.number:
            return _told(seen, epoch)
        if after is not None:
            verify_marks(f"index {self.letter}", {} if seen is None else {"all": seen}, after, None, marks_of)
        incarnation = self._incarnation()
        try:
            spooled = read_rows(rows)
        except SpoolMissing as gone:
            return self._without_rows(epoch, gone)
        self.apply_with(epoch, part)
        self.claim(Mark(epoch.number, epoch.attempt), _done(seen, after))
        version = self._identity.origin["base"] + epoch.number
        documents = self.documents(epoch, spooled)
        for some in (documents[:1], documents[1:]):
            conflicts = twice(partial(self._bulk, version, some))
            if conflicts and not self._overwrite(epoch, version, [one for one in some if one[0] in conflicts]):
                break
        if self._incarnation() != incarnation:
            raise WentBack("the index was set back while the epoch was applied")
        mark = Mark(epoch.number, epoch.attempt)
        answer = twice(lambda: self.write_mark(mark, incarnation, seen))
        if answer == "409":
            again = self._marker()
            if again is None or again[0].epoch < epoch.number:
                raise WentBack("the marker has moved since it was read")
            return _told(again[0], epoch)
        return COMMITTED

    def _without_rows(self, epoch: Epoch, gone: SpoolMissing) -> Verdict:
        """Return what the marker says of an epoch whose rows are gone: another driver may have applied it."""
        marker = self._marker()
        if marker is not None and marker[0].epoch >= epoch.number:
            return _told(marker[0], epoch)
        if isinstance(gone, SpoolDamaged):
            raise gone
        return Verdict(UNKNOWN, f"{gone}, and no marker")

    def claim(self, mark: Mark, done: int) -> None:
        """Claim the epoch for this attempt; stop if another attempt has claimed it, or any epoch after ``done``."""
        while True:
            known = self._claimed = self._claimed or self._read_claim()
            if known is not None and known.epoch > min(done, mark.epoch - 1):
                break
            request = partial(self.target.claim, self._key, mark, known)
            answer = twice(partial(self._step, f"{self.letter} claim", request))
            self._claimed = mark if answer == "OK" else None
        if known != mark:
            raise WentBack(f"{known} is being applied, by another attempt than {mark}")

    def _read_claim(self) -> Mark | None:
        found: Mark | None = twice(
            lambda: self._step(f"{self.letter} read claim", lambda: self.target.claims.get(self._key), reads=True)
        )
        return found

    def write_mark(self, mark: Mark, incarnation: int, seen: Mark | None) -> str:
        """Write the marker document if it still is what was seen."""
        key = self._key
        answer: str = self._step(f"{self.letter} mark", lambda: self.target.mark(key, mark, incarnation, seen))
        return answer

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> list[str]:
        answer: list[str] = self._step(f"{self.letter} bulk", lambda: self.target.bulk(version, some))
        return answer

    def _overwrite(self, epoch: Epoch, version: int, refused: list[tuple[str, Row]]) -> bool:
        """Write over documents that somebody else has changed since; False if a later driver has applied the epoch."""
        target: Elasticsearch = self.target
        for name, row in refused:
            for _ in range(WRITERS):
                stored = self._step(f"{self.letter} stored", partial(target.version, name), reads=True)
                if stored and stored // 100 != version // 100:
                    raise RowsRejected(f"{name} was written by another sink", hint="")
                # after the look: what a later epoch has written in between would be taken for a stranger's
                if self._is_overtaken(epoch):
                    return False
                self.require_ours()
                newer = partial(target.write_newer, max(stored, version) + 1, name, row)
                if twice(partial(self._step, f"{self.letter} newer", newer)):
                    break
        return True

    def _is_overtaken(self, epoch: Epoch) -> bool:
        newest = self.newest()
        return newest is not None and newest >= epoch.number

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        """Return documents under ids that no other query or epoch uses."""
        return [(f"{self._key}-{epoch.number}-{position}", row) for position, row in enumerate(rows)]

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Never: nothing prepared can be lost but the spool itself."""
        raise NotImplementedError

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
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

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        """Return the newest row of each key: every epoch updates the same documents."""
        return [(f"key-{row.source % 2}", row) for row in newest_of_each_key(rows)]


def newest_of_each_key(rows: list[Row]) -> list[Row]:
    """Return one row for each of the two keys, the one that came last from the source."""
    newest = {row.source % 2: row for row in sorted(rows, key=lambda row: row.source)}
    return list(newest.values())


def _told(seen: Mark, epoch: Epoch) -> Verdict:
    if seen == Mark(epoch.number, epoch.attempt):
        return COMMITTED
    return Verdict(UNKNOWN, f"the marker of attempt {seen.attempt}")


def _done(seen: Mark | None, after: LastDone | None) -> int:
    return max(seen.epoch if seen else -1, after.epoch if after else -1)


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the mark that an epoch leaves."""
    return {"all": Mark(last.epoch, last.attempt)} if last.parts else {}
