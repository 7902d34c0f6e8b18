"""What must hold at the end of every history (early, duplicate and mixed rows are seen as they are published)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError, LogIncomplete, OutcomeUnknown, SpoolMissing, WentBack
from epochsink.identity import PreparedName
from epochsink.protocol.commit_engine import REPLAY_TURNS
from epochsink.protocol.ledger import FOLDER
from epochsink.protocol.retained import Term
from epochsink.sink import Epoch
from simulation.determinism import TURNS
from simulation.driver import EPOCHS, PASSING, parse_offsets
from simulation.postgres_server import Staged
from simulation.readers import OUTSIDER
from simulation.storage import ALTERED
from simulation.world import entry_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simulation.plans import Plan
    from simulation.readers import Row
    from simulation.simulation import Simulation
    from simulation.world import World

BACKWARDS = frozenset({"back", "failover", "unmark", "remark"})
"""Faults after which a target does not hold, or does not say that it holds, what it held."""
EXCUSES: dict[str, tuple[type[BaseException], ...]] = {
    **dict.fromkeys(BACKWARDS, (WentBack, OutcomeUnknown)),
    "restore": (WentBack,),
    "ledger": (WentBack,),
    "abandon": (ConfigurationError,),
    "rejoin": (WentBack, OutcomeUnknown, SpoolMissing),
    "copy": (WentBack, OutcomeUnknown),
    "async": (OutcomeUnknown,),
    "skip": (WentBack,),
    "swallow": (WentBack,),
    "double": (ConfigurationError,),
    "spool": (SpoolMissing, OutcomeUnknown),
    "log": (LogIncomplete, OutcomeUnknown),
    "holder": (OutcomeUnknown,),
}
"""The errors with which a query may stop for its operator once a kind of fault has struck."""


def check(simulation: Simulation) -> None:
    """Flag every anomaly of the end state."""
    stopped = simulation.loud is not None
    for sink in simulation.sinks:
        rows = visible(simulation, sink)
        _check_rows(simulation, sink, rows)
        seen = {(row.query, row.source) for row in rows}
        if sink == "F" and stopped:
            # a row that a later one of its key has replaced is not missing
            seen |= {(row.query, at) for row in rows for at in range(row.source % 2, row.source, 2)}
        missing = _wanted(simulation, sink) - seen - simulation.excepted_rows()
        if simulation.abandoned_at is not None and any(row.source >= simulation.abandoned_at for row in rows):
            simulation.flag(f"DOUBLED BY A SUCCESSOR {sink}")
        if not stopped or simulation.twin.is_whole or simulation.abandoned_at is not None:
            if missing:
                simulation.flag(f"LOST {sink}")
        elif not simulation.faults & (BACKWARDS | {"rejoin", "spool", "log", "copy"} | _kept_by_holder(simulation)):
            # what another program has changed is no loss of ours
            theirs = {(simulation.query, row.source) for row in rows if row.query == OUTSIDER}
            _check_recoverable(simulation, sink, missing - theirs)
    ended = not stopped or simulation.abandoned_at is not None
    if ended and simulation.query == "query-1" and "copy" not in simulation.faults:
        _check_leftovers(simulation)


def _kept_by_holder(simulation: Simulation) -> set[str]:
    """Return the fault after which rows are nowhere, where their partition alone keeps them."""
    return {"holder"} if simulation.variant.kept else set()


def _wanted(simulation: Simulation, sink: str) -> set[tuple[str, int]]:
    """Return what has to be visible: all rows, or where each epoch updates both keys, the last ones."""
    total = simulation.source_rows
    if simulation.abandoned_at is not None:
        # a successor reads from there
        total = simulation.abandoned_at
    elif simulation.loud is not None and simulation.twin.is_whole:
        # what came from the source after the query on the copy had ended is the other one's to write
        total = EPOCHS * simulation.variant.rows
    elif sink == "F" and simulation.loud is not None:
        total = simulation.decided_rows()
    first = max(0, total - 2) if sink == "F" else 0
    return {(simulation.query, at) for at in range(first, total)}


def visible(simulation: Simulation, sink: str) -> list[Row]:
    """Return what a reader of a sink sees."""
    return newest_rows(simulation.world, sink)


def newest_rows(world: World, sink: str) -> list[Row]:
    """Return what a reader of a sink sees by now."""
    if sink in "EF":
        return world.search[sink].rows
    return list(world.readers.visible.get(sink, {}).values())


def _check_rows(simulation: Simulation, sink: str, rows: list[Row]) -> None:
    readers = simulation.world.readers
    if any(row.attempt.startswith("loser") for row in rows):
        simulation.flag(f"ABORTED READ {sink}")
    if any(row.attempt == ALTERED for row in rows):
        simulation.flag(f"ALTERED {sink}")
    if sink not in "EF":
        return
    if any(count > 1 for count in Counter((row.query, row.source) for row in rows).values()):
        simulation.flag(f"DUPLICATE {sink}")
    attempts: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        attempts.setdefault((row.query, row.epoch), set()).add(row.attempt)
    if any(len(some) > 1 for some in attempts.values()) and not readers.went_back:
        simulation.flag(f"MIXED ATTEMPTS {sink}")
    stale = any(row.query != simulation.query for row in rows)
    if sink == "F" and stale and simulation.loud is None:
        simulation.flag("SWALLOWED F")


def _check_recoverable(simulation: Simulation, sink: str, missing: set[tuple[str, int]]) -> None:
    """Flag what is decided, not visible, and does not exist anywhere else: the query stopped with an error."""
    world = simulation.world
    offsets = {int(name): parse_offsets(data) for name, data in world.files.get("offsets", {}).items()}
    kept: set[tuple[str, int]] = set()
    for folder in world.spool.values():
        kept |= {(row.query, row.source) for rows in folder.values() for row in rows}
    if sink == "K":
        kept |= world.brokers.rows(open_only=not simulation.variant.kept)
    if sink in world.postgres:
        target = world.postgres[sink]
        kept |= {(row.query, row.source) for one in target.prepared.values() for row in one.rows}
        kept |= {
            (row.query, row.source) for table in target.staging.values() for rows in table.values() for row in rows
        }
    for query, source in missing:
        number = next((n for n, (start, end) in offsets.items() if start <= source < end), None)
        committed = number is not None and str(number) in world.files.get("commits", {})
        if (query, number) in world.readers.decided and committed and (query, source) not in kept:
            simulation.flag(f"UNRECOVERABLE {sink}")


def _check_leftovers(simulation: Simulation) -> None:
    world = simulation.world
    if world.brokers.open_ids():
        simulation.flag("ORPHAN K: an open transaction pins readers")
    for sink, target in world.postgres.items():
        if _left(simulation, map(PreparedName.parse, target.prepared)):
            simulation.flag(f"ORPHAN {sink}: prepared transactions")
        if _left(simulation, target.staging):
            simulation.flag(f"ORPHAN {sink}: staging tables")
    # that of a withdrawn record goes at the next start, or when the stream idles
    kept = {term.epoch for name in world.spool.records if (term := Term.parse(name))}
    left = [key for key in world.spool if Epoch(key[1], key[2]) not in kept]
    if left and "double" not in simulation.faults:
        simulation.flag("ORPHAN spool")


def _left(
    simulation: Simulation, prepared: Iterable[PreparedName | Staged | None]
) -> list[PreparedName | Staged | None]:
    """Return what a driver should have ended, of all that is prepared.

    If the ledger does not know the generation of a driver whose clock was ahead, because it was lost or is an older
    copy: what that driver has prepared looks like the work of a newer one to its successor. It stays, as it would if a
    newer one were there.
    """
    found = list(prepared)
    if "clock" not in simulation.faults or not simulation.faults & {"ledger", "restore"}:
        return found
    entries = map(entry_of, simulation.world.files[FOLDER].values())
    newest = max(entry["generation"] for entry in entries if entry["entry"] == "take")
    return [one for one in found if one is not None and one.generation <= newest]


def _is_right(error: str, faults: set[str], plan: Plan) -> bool:
    """Whether an error is right, of which no fault's own excuse says so.

    After an older copy was restored, Spark itself misses its offsets, or a marker names the replay of which the older
    ledger has no record. And who takes away what is prepared as often as epochsink prepares it again is told so. A
    transaction that a late request has opened again cannot be told from one that a failover has brought back. A server
    that answers no attempt at a commit within `timeout=`, which are some turns here, leaves its outcome unknown.
    """
    unanswered = sum(fault[0] in {"lost", "delay", "err"} for _, fault in plan)
    if unanswered >= TURNS and "whether sink" in error and "outcome unknown" in error:
        return True
    if faults & {"delay", "twice"} and "'K': transaction" in error and "its epoch is done" in error:
        # brokers of that protocol open a transaction again for a task's request that comes after its commit
        return True
    taken = sum(fault[0] in {"rollback", "timeout"} for _, fault in plan)
    if taken >= REPLAY_TURNS and "lost each time" in error:
        return True
    return bool(faults & {"restore", "ledger"}) and ("offsets" in error or "the marker of attempt" in error)


def _of_copies(simulation: Simulation) -> tuple[str, ...]:
    """Return the anomalies that two queries may bring about if one of them says that it has noticed the other.

    Each ends what the other has prepared.
    """
    if "copy" not in simulation.faults or not simulation.faults & (BACKWARDS | {"skip", "swallow", "double"}):
        return ()
    return ("DUPLICATE", "MIXED", "ROLLED BACK", "OUT OF ORDER", "STALE", "LOST", "STUCK")


def _beyond_knowing(faults: set[str]) -> tuple[str, ...]:
    """Return the anomalies that nothing is left to tell of: each comes of two mistakes about the same epochs."""
    lost_and_set_back = "rejoin" in faults and faults & (BACKWARDS | {"timeout", "rollback"})
    # killed after the first of two calls was recorded, and then no call at all: nobody knows of the other rows
    half_recorded = {"double", "skip"} <= faults
    # with the target, the other query's fence and what it had written went back: the two meet only at a later epoch
    went_back = "copy" in faults and faults & BACKWARDS
    # brokers that have lost the task's producer and rows give the same producer to another attempt, with the same rows
    twins = "loser" in faults and faults & {"back", "failover"}
    # brokers have lost an end that they had acknowledged, and the coordinator takes it for written
    end_lost = "leaderless" in faults and faults & {"back", "failover"}
    return (
        *(("LOST",) if lost_and_set_back or half_recorded else ()),
        *(("LOST K",) if end_lost else ()),
        *(("MIXED", "DUPLICATE") if went_back else ()),
        *(("ABORTED READ K", "MIXED") if twins else ()),
    )


def verdict(simulation: Simulation, plan: Plan) -> list[str]:
    """Return the violations of a history, among them errors that the faults which struck do not excuse."""
    excused = tuple({error for fault in simulation.faults for error in EXCUSES.get(fault, ())})
    if simulation.faults & BACKWARDS and simulation.faults & {"restore", "ledger"}:
        # an epoch that an older ledger takes for pending, and a target that has forgotten it
        excused += (SpoolMissing,)
    if simulation.faults & BACKWARDS and simulation.variant.kept:
        # what the target keeps goes back with it
        excused += (LogIncomplete,)
    if "holder" in simulation.faults and simulation.variant.kept:
        excused += (LogIncomplete,)
    if simulation.faults >= {"leaderless", "loser"}:
        # the loser has the producer, so its rows are a part of the committed transaction that was left open
        excused += (OutcomeUnknown,)
    stops = [stop for stop in (simulation.loud, simulation.twin.loud) if stop is not None]
    # one that has failed so may still wait for its other thread as the history ends
    heard = [*stops, *(one.failure for one in simulation.processes if isinstance(one.failure, excused))]
    pardoned = _beyond_knowing(simulation.faults) + (_of_copies(simulation) if heard else ())
    if simulation.repaired:
        # the command has said that readers get these rows after all that was written since the topic was set back
        pardoned += ("OUT OF ORDER K",)
    found = [anomaly for anomaly in simulation.anomalies if not anomaly.startswith(pardoned)]
    found += [
        f"ZOMBIE CONCLUDES {stop!r}"
        for stop in simulation.zombies
        if not isinstance(stop, excused) and not _is_right(str(stop), simulation.faults, plan)
    ]
    found += [
        f"LOUD {type(stop).__name__}: {stop}"
        for stop in stops
        if not isinstance(stop, excused) and not _is_right(str(stop), simulation.faults, plan)
    ]
    # what a copy of the query has prepared stays where its generation is the newer one: an operator has to end it
    waits = {"copy", "clock"} <= simulation.faults
    if simulation.healthy and isinstance(simulation.active.failure, PASSING) and not waits:
        found.append("STUCK: the healthy run failed")
    return found
