"""The PostgreSQL sinks of one database, whose rows of an epoch go into one transaction; or one sink alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epochsink.postgres.committable import WHOLE, read_part
from epochsink.postgres.committer import PostgresCommitter
from epochsink.sink import Epoch, Keeping, Outcome, Participant, one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from epochsink.postgres.config import PostgresConfig
    from epochsink.sink import Ballot, Ballots, Committable, Committables, Identity, LastDone, Parts, Verdict


class PostgresParticipant(Participant):
    """Votes and commits for its tables; what the tables have prepared as one is one part, which each sink records."""

    def __init__(self, members: Mapping[str, PostgresConfig]) -> None:
        super().__init__(members)
        self._tables = {name: PostgresCommitter(config) for name, config in members.items()}

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare configuration, row and live table; create the marker table. Return the findings."""
        return self._tables[sink].check(schema)

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Insert the mark of joining; return it, the markers' schema and the database."""
        return self._tables[sink].initial_state()

    def open(self, identity: Identity) -> None:
        """Take a sink's identity. Raises `ConfigurationError` if its markers are in another schema."""
        self._tables[identity.sink].open(identity)

    def newest(self, sink: str) -> int | None:
        """Return the newest epoch whose marker is committed. Raises `EpochsinkError`."""
        return self._tables[sink].newest()

    def leftovers(self, sink: str) -> list[str]:
        """Return prepared transactions and staging tables of a sink."""
        return self._tables[sink].leftovers()

    def newest_generation(self, sink: str) -> int:
        """Return the highest generation in the names that a sink has left."""
        return self._tables[sink].newest_generation()

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the marker rows with the ledger; commit what a failover has made prepared again."""
        self._tables[sink].verify_applied(done, pending)

    def keeping(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, Keeping]:
        """Leave rows to the spool alone, unless each task commits its own."""
        return {
            name: Keeping.IN_SPOOL_ALONE if keeping is Keeping.IN_SPOOL and self.members[name].atomic else keeping
            for name, keeping in super().keeping(epoch, schemas).items()
        }

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Prepare the rows of all sinks as one part; if each task has prepared its own, verify that they are there."""
        (first, ballot), *_ = ballots.items()
        table = self._tables[first]
        if not self.members[first].atomic:
            return {first: [part.to_json() for part in table.vote_by_task(epoch, ballot)]}
        part = table.vote(epoch, {name: self._tables[name].share(epoch, ballots[name]) for name in ballots}).to_json()
        return {name: [part] for name in ballots}

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Commit prepared transactions, or merge staged rows; passing failures are retried."""
        verdicts: dict[str, Sequence[Verdict]] = {}
        # for all sinks: the merge of one sink's part writes the rows of those that share it
        after = {name: ballot.after for name, ballot in ballots.items() if ballot.after is not None}
        committed: list[Committable] = []
        for name, ballot in ballots.items():
            # a part that another sink's commit has made visible needs no second commit
            known = {index for index, part in enumerate(ballot.parts) if part in committed}
            verdicts[name] = self._commit_table(self._tables[name], epoch, ballot, after, known)
            for part, verdict in zip(ballot.parts, verdicts[name], strict=True):
                if verdict.outcome is Outcome.COMMITTED:
                    committed.append(part)
        return verdicts

    def _commit_table(
        self,
        table: PostgresCommitter,
        epoch: Epoch,
        ballot: Ballot,
        after: Mapping[str, LastDone],
        committed: set[int],
    ) -> Sequence[Verdict]:
        at_once = table.commit_at_once(ballot.parts)

        def commit(part: Committable) -> Verdict:
            return table.commit(epoch, part, ballot.rows, after)

        return one_by_one(ballot.parts, commit, at_once | committed)

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Copy the spooled rows again and prepare them as ``attempt``, as one for all sinks that share the part."""
        (first, ballot), *_ = ballots.items()
        table, known, again = self._tables[first], read_part(part), Epoch(epoch.number, attempt)
        if known.name != WHOLE:
            return table.replay_task(again, known.members[first], ballot.rows)
        shares = {name: self._tables[name].share_again(known.members[name], ballots[name]) for name in ballots}
        return table.replay(again, shares).to_json()

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """End sessions, prepared transactions and staging tables that ``keep`` does not name."""
        return [line for table in self._tables.values() for line in table.abort_orphans(keep, done)]

    def describe(self, part: Committable) -> str:
        """Return the prepared transaction's name, or the tables in which rows are staged."""
        prepared = read_part(part)
        return prepared.gid or f"rows staged in {', '.join(sorted(prepared.tables))}"

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Drop the epoch's staging tables, and from time to time old markers."""
        for name, ballot in ballots.items():
            self._tables[name].finish(epoch, ballot.parts)

    def close(self) -> None:
        """Release the sessions."""
        for table in self._tables.values():
            table.close()
