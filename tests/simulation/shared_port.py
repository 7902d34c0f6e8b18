"""Two PostgreSQL sinks of one database, whose rows of an epoch go into one transaction, over the in-memory server.

A and B merge and prepare in phase 1, C and D merge in phase 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from epochsink.errors import PrepareFailed, WentBack
from epochsink.identity import PreparedName
from epochsink.sink import COMMITTED, Ballot, Epoch, LastDone, Rows, Verdict
from simulation.port import twice
from simulation.postgres_port import PostgresPort, PreparedPort, StagedPort, mark_of
from simulation.targets import Postgres, PreparedRows, Staged, gid_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from epochsink.sink import Committable, Mark
    from simulation.readers import Row


Voters = Mapping[str, tuple[Any, Ballot]]
"""Ports with their ballots, by letter."""


class SharedRows(NamedTuple):
    """What a prepared transaction holds of each sink, by its letter."""

    shares: dict[str, PreparedRows]

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [row for one in self.shares.values() for row in one.rows]

    def marks(self, marker: tuple[Any, ...]) -> bool:
        """Whether it inserts this marker row."""
        return any(one.marks(marker) for one in self.shares.values())


MEMBERS = "members"
OTHER = {"A": "B", "C": "D"}
"""The sink that has its tables in the same database."""


@dataclass(slots=True)
class SharedPostgres(Postgres):
    """The database of two sinks, both of which get every row: readers see as many in each, at any time."""

    def prepare_together(self, gid: str, shares: dict[str, PreparedRows], after: Mapping[str, Mark | None]) -> str:
        """PREPARE TRANSACTION of what several sinks have staged."""
        for name, one in shares.items():
            refused = self.refusal(gid, one, after[name])
            if refused:
                return refused
        self.prepared[gid] = SharedRows(shares)
        return "OK"

    def commit_prepared(self, gid: str) -> str:
        """COMMIT PREPARED."""
        if gid not in self.prepared:
            return "42704"
        self._show(self.prepared.pop(gid).shares)
        return "OK"

    def merge_together(
        self, shares: dict[str, PreparedRows], wanted: Collection[str], marker: tuple[str, int], after: Mark | None
    ) -> str:
        """Merge rows and markers of the ``wanted`` sinks in one transaction, for the one that ``marker`` is of."""
        if marker in self.markers:
            return "23505"
        if after is not None and self.mark(marker[0]) != after:
            return "BEHIND"
        if len(shares) < len(wanted):
            return "NOROWS"
        if any(one.marker in self.markers for one in shares.values()):
            return "23505"
        self._show(shares)
        return "OK"

    def _show(self, shares: dict[str, PreparedRows]) -> None:
        self.readers.before_commit(self.sink)
        for name, one in shares.items():
            self.readers.publish(name, one.rows)
            self.markers[one.marker] = one.attempt
        shown = [self.readers.visible.get(name, {}).keys() for name in (self.sink, OTHER[self.sink])]
        if shown[0] != shown[1]:
            self.readers.flag("TORN: one table of a database is ahead of the other")


def shares_of(target: SharedPostgres, epoch: Epoch, part: Committable) -> dict[str, PreparedRows]:
    """Return the staged rows of each sink with its marker; without those whose rows are gone."""
    found = {}
    for name, member in part[MEMBERS].items():
        table = Staged(member["key"], part["generation"], part["attempt"])
        rows = target.staged_rows(table, member["tasks"])
        if rows is not None:
            found[name] = PreparedRows((member["key"], epoch.number), part["attempt"], rows)
    return found


def as_one(generation: int, attempt: str, voters: Voters, tasks: Sequence[str] = ()) -> Committable:
    """Return the part that several sinks record: with the tasks that each accepted, or with ``tasks``."""
    members = {
        name: {"key": port.key, "tasks": [*tasks] or [part["task"] for part in one.parts]}
        for name, (port, one) in voters.items()
    }
    return {"attempt": attempt, "generation": generation, MEMBERS: members}


class Sharing(PostgresPort):
    """What the two have in common that merge before the decision and the two that merge after it."""

    group: str | None = "database"

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Vote on this sink's rows alone."""
        return [self.vote_together(epoch, {self.letter: (self, Ballot(written, rows, after))})]

    def vote_together(self, epoch: Epoch, voters: Voters) -> Committable:
        """Turn what the tasks of each sink have staged into one part."""
        raise NotImplementedError

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Prepare this sink's rows alone again."""
        return self.replay_together(epoch, part, {self.letter: (self, Ballot((), rows, after))}, attempt)

    def replay_together(self, epoch: Epoch, part: Committable, voters: Voters, attempt: str) -> Committable:
        """Stage the rows of each sink again; return the part that stands for them."""
        self.apply_with(epoch, part)
        for port, one in voters.values():
            port.restage(one.rows, attempt)
        again = as_one(self._identity.generation, attempt, voters, [attempt])
        return again | {"options": self.options_of(part)}


class SharedPort(Sharing, PreparedPort):
    """One of the two: they vote, commit and replay as one."""

    letter = "A"

    def vote_together(self, epoch: Epoch, voters: Voters) -> Committable:
        """Merge what the tasks of each sink have staged, and prepare that."""
        part = as_one(self._identity.generation, epoch.attempt, voters)
        return self.prepare_together(epoch, part | self.prepared_with(epoch), voters)

    def prepare_together(self, epoch: Epoch, part: Committable, voters: Voters) -> Committable:
        """PREPARE TRANSACTION, under the name of the first sink."""
        gid = str(PreparedName(self._key, part["generation"], epoch.number, part["attempt"]))

        def apply() -> str:
            shares = self.rows_to_prepare(shares_of(self.target, epoch, part))
            if len(shares) < len(part[MEMBERS]):
                return "NOROWS"
            after = {name: mark_of(one.after) for name, (_, one) in voters.items()}
            answer: str = self.target.prepare_together(gid, shares, after)
            return answer

        self.refuse(epoch, self._step(f"{self.letter} prepare", apply))
        return {**part, "gid": gid}

    def rows_to_prepare(self, shares: dict[str, PreparedRows]) -> dict[str, PreparedRows]:
        """Return what of the members' rows and markers goes into the transaction: everything."""
        return shares

    def replay_together(self, epoch: Epoch, part: Committable, voters: Voters, attempt: str) -> Committable:
        """Stage and prepare the rows of each sink again."""
        return self.prepare_together(epoch, super().replay_together(epoch, part, voters, attempt), voters)

    def gids(self, generation: int) -> Sequence[str]:
        """Return, too, what bears the other sink's name, if rows of this one are staged for it."""
        attempts = {table.attempt for table in self.target.staging_of(self._key, generation)}
        names = {gid: gid_of(gid) for gid in self.target.prepared}
        shared = [gid for gid, name in names.items() if name and name.attempt in attempts]
        return sorted({*super().gids(generation), *shared})


class OtherSharedPort(SharedPort):
    """The other one."""

    letter = "B"


class SharedStagedPort(Sharing, StagedPort):
    """One of two that merge their staged rows as one, once the epoch is decided."""

    letter = "C"

    def vote_together(self, epoch: Epoch, voters: Voters) -> Committable:
        """See the rows of each sink staged."""
        part = as_one(self._identity.generation, epoch.attempt, voters)
        staged = self._step("C count", lambda: shares_of(self.target, epoch, part), reads=True)
        if len(staged) < len(voters):
            raise PrepareFailed("staged rows are gone")
        return part | self.prepared_with(epoch)

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """Merge the rows of all, with their marker rows, in one transaction."""
        self.apply_with(epoch, part)

        def apply() -> str:
            answer: str = self.target.merge_together(
                shares_of(self.target, epoch, part), part[MEMBERS], (self._key, epoch.number), mark_of(after)
            )
            return answer

        answer = twice(lambda: self._step("C merge", apply))
        if answer == "BEHIND":
            raise WentBack(f"the marker of the epoch before {epoch.number} is gone since it was looked for")
        return COMMITTED if answer == "OK" else self.judge(epoch, part, answer)


class OtherSharedStagedPort(SharedStagedPort):
    """The other one."""

    letter = "D"
