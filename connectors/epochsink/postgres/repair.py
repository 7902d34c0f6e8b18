"""Apply done epochs again to a database that was set back: each part once more, with its marker.

A restore or a failover takes back the newest transactions, and the marker rows are in the same ones. So a part without
its marker row is not in the table either. The rows are prepared again under the attempt that the ledger records, so
that the marker is as it was, and its primary key admits the part once, whoever repairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from epochsink.errors import WentBack
from epochsink.postgres.committable import read_part
from epochsink.postgres.table_identity import require_same_table
from epochsink.sink import Epoch, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.postgres.server import Connection
    from epochsink.postgres.table import Table
    from epochsink.sink import Ballots, Committable, LastDone, Participant, Verdict


def lacking(connection: Connection, table: Table, done: LastDone) -> list[Committable]:
    """Return the parts of a done epoch that have no marker row.

    Raises `WentBack` if rows may be there without their markers: in another database or table, or without any marker.
    """
    table.require_place(connection, done)
    require_same_table(connection, table, done, None)
    marker = table.marker
    if not marker.has_joined(connection):
        raise WentBack(
            f"table {table} has no marker of this query at all: whether its rows were taken back with the markers, or "
            "somebody deleted the markers alone, is unknown; what is applied again could be there twice",
            hint="restore the table and the markers from one and the same copy",
        )
    parts = {read_part(part): part for part in done.parts}
    table.refuse_applied(connection, Epoch(done.epoch, done.attempt), [part.attempt for part in parts])
    missing = {read: part for read, part in parts.items() if marker.attempt(connection, done.epoch, read.name) is None}
    seals = [read for read in missing if read.is_seal]
    if len(missing) < len(parts) and any(member.merge.key for seal in seals for member in seal.members.values()):
        raise WentBack(
            f"table {table} holds rows of epoch {done.epoch} without its seal: the server has failed over while they "
            "were committed, and rows of earlier epochs that are applied again now would replace later ones of a key",
            hint="load the rows that are missing with a query of its own (the input is in offsets/ of the checkpoint), "
            f"then say so: epochsink accept CHECKPOINT {done.epoch} --sink NAME",
        )
    return list(missing.values())


def reapply(participant: Participant, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
    """Commit parts that are still prepared; prepare all others again, under the recorded attempt, and commit them."""
    verdicts: dict[str, list[Verdict]] = {name: [] for name in ballots}
    read = {name: [read_part(part) for part in ballot.parts] for name, ballot in ballots.items()}
    # what several sinks have recorded is one part
    for part in dict.fromkeys(part for parts in read.values() for part in parts):
        recorded = part.to_json()
        shared = {name: replace(ballots[name], parts=[recorded]) for name, parts in read.items() if part in parts}
        found = participant.commit(epoch, shared)
        if any(verdict.outcome is Outcome.ABORTED for (verdict,) in found.values()):
            again = participant.replay(epoch, recorded, shared, part.attempt)
            shared = {name: replace(ballot, parts=[again]) for name, ballot in shared.items()}
            # Not before the replay, which may have reached another server: if a failover that comes later spares what
            # was prepared, it spares what was committed before that too.
            _require_before(participant, epoch, ballots)
            found = participant.commit(epoch, shared)
        for name, verdict in found.items():
            verdicts[name] += verdict
        if any(verdict.outcome is not Outcome.COMMITTED for (verdict,) in found.values()):
            # of an epoch whose seal is not there nothing is committed
            break
        # now, not at the end: the staged rows of all lacking epochs may fill the disk
        participant.finish(epoch, shared)
    return verdicts


def _require_before(participant: Participant, epoch: Epoch, ballots: Ballots) -> None:
    """Raise `WentBack` if a table has lost the epoch before this one again, which was there or has just been applied.

    This epoch's marker would hide that from every later comparison.
    """
    for name, ballot in ballots.items():
        newest = participant.newest(name)
        before = -1 if ballot.after is None else ballot.after.epoch
        if (-1 if newest is None else newest) < before:
            raise WentBack(
                f"sink '{name}': its table no longer holds epoch {before}, after which epoch {epoch.number} was to be "
                "applied again: the server has failed over, or was set back, since this repair began",
                hint="type the command again: it begins with what is missing now",
            )
