"""Keep the marker index: the newest epoch that each sink has applied, and the document versions that it may use.

A version is ``base + epoch``. The base is the current time in seconds times 2^30. A sink claims it by creating a
document that only one sink can create. So the base is above every version that an earlier sink wrote (2^30 epochs take
34 years at one a second), above all internal versions, and above external versions that are timestamps in seconds,
milli-, micro- or nanoseconds, since 2^30 > 10^9. A version therefore also identifies its writer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from epochsink.elasticsearch.committable import incarnations
from epochsink.elasticsearch.config import MARKERS
from epochsink.elasticsearch.indices import ensure_index, refresh
from epochsink.elasticsearch.server import DocumentPlace, ElasticsearchServer
from epochsink.errors import LedgerCorrupt
from epochsink.identity import PREFIX, claim_document, marker_document
from epochsink.retry import Clock
from epochsink.sink import Epoch, Identity, LastDone, identity_key

INDEX: Final = MARKERS
VERSION: Final = 1
"""Of the markers' form."""
EPOCHS: Final = 2**30
"""Number of epochs that fit between two version bases."""

# hidden: patterns in searches of other programs do not match it
_SETTINGS: Final = {"number_of_shards": 1, "auto_expand_replicas": "0-1", "hidden": True}
_MAPPING: Final = {
    "dynamic": False,
    "properties": {"claimed": {"type": "long"}, "query_id": {"type": "keyword"}, "sink": {"type": "keyword"}},
}


@dataclass(frozen=True, slots=True)
class MarkerDocument:
    """The newest applied epoch, its attempt and run, and the uuid and history of the index at that time.

    The next write of the marker is conditional on its ``place``.
    ``placed_by`` as in `ElasticsearchConfig`. ``indices`` has uuid and history of each index that rows named.
    ``letters`` has the runs that have set rows aside, each with the newest epoch that it has applied: their letters
    count, those of any other run do not. A run that was broken off, or whose epoch was discarded, is not among them.
    """

    epoch: int
    attempt: str
    index: str
    index_uuid: str
    history: str
    run: str
    place: DocumentPlace
    placed_by: str = ""
    indices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    letters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """The attempt of an epoch that may be applied. Two drivers on two copies of a checkpoint cannot both claim it.

    ``place`` as in `MarkerDocument`.
    """

    epoch: int
    attempt: str
    place: DocumentPlace


def ensure(server: ElasticsearchServer) -> None:
    """Create the marker index if it is missing."""
    ensure_index(server, INDEX, mappings=_MAPPING, settings=_SETTINGS)


def claim_base(server: ElasticsearchServer, clock: Clock = time) -> int:
    """Return a version base that no other sink has or will get."""
    ensure(server)
    # A search finds only what was refreshed. If two drivers find the same newest claim, only one of them can create the
    # next one.
    refresh(server, INDEX)
    newest = server.highest(INDEX, "claimed")
    # from the clock too: if the marker index was deleted, a new base must still be above the versions of stored
    # documents
    second = max(int(clock.time()), (newest or 0) + 1)
    while not _claimed(server, second):
        second += 1
    return second * EPOCHS


def _claimed(server: ElasticsearchServer, second: int) -> bool:
    return server.write(INDEX, f"{PREFIX}-base-{second}", {"claimed": second}, over=None) is not None


def read(server: ElasticsearchServer, identity: Identity) -> MarkerDocument | None:
    """Return the marker of a sink, or None if no epoch was applied. Raises `LedgerCorrupt` for an unknown version."""
    document = server.read(INDEX, marker_document(identity_key(identity)))
    if document is None:
        return None
    kept = document.source
    if kept.get("version") != VERSION:
        raise LedgerCorrupt(
            f"the marker {marker_document(identity_key(identity))!r} in {INDEX!r} has version {kept.get('version')!r}, "
            f"and this epochsink reads version {VERSION} only",
            hint="run the epochsink version that wrote it",
        )
    return MarkerDocument(
        kept["epoch"],
        kept["attempt"],
        kept["index"],
        kept["index_uuid"],
        kept["history"],
        kept["run"],
        document.place,
        kept.get("placed_by", ""),
        incarnations(kept.get("indices", ())) or {},
        kept.get("letters", {}),
    )


def trusted(kept: MarkerDocument | None, last: LastDone | None) -> MarkerDocument | None:
    """Return the marker if the index must be the one that it names; None if an operator accepted the index."""
    accepted = kept is not None and last is not None and not last.parts and kept.epoch <= last.epoch
    return None if accepted else kept


def claim(server: ElasticsearchServer, identity: Identity, epoch: Epoch, known: Claim | None, *, done: int) -> Claim:
    """Claim an epoch for an attempt before its first document is written; return the claim in force afterwards.

    It is a different one if another attempt of this epoch, or any epoch after ``done``, was claimed before. ``done`` is
    the newest epoch of the sink that is applied or closed. ``known`` is the last claim that this driver saw: if it is
    still in force, no read is needed.
    """
    name = claim_document(identity_key(identity))
    while True:
        known = known or _read_claim(server, name)
        # A ledger claims an epoch only after those before it are done or closed. So a claim in between is of another
        # copy, which may be applying that epoch now. An operator may have closed a later epoch than this one.
        if known is not None and known.epoch > min(done, epoch.number - 1):
            return known
        # not "query_id", by which markers are found
        source = {
            "query": identity.query_id,
            "sink": identity.sink,
            "epoch": epoch.number,
            "attempt": epoch.attempt,
        }
        place = server.write(INDEX, name, source, over=known.place if known else None)
        if place is not None:
            return Claim(epoch.number, epoch.attempt, place)
        known = None


def _read_claim(server: ElasticsearchServer, name: str) -> Claim | None:
    document = server.read(INDEX, name)
    return None if document is None else Claim(document.source["epoch"], document.source["attempt"], document.place)


def write(
    server: ElasticsearchServer,
    identity: Identity,
    epoch: Epoch,
    *,
    after: MarkerDocument | None,
    applied: Mapping[str, object],
    clock: Clock = time,
) -> bool:
    """Record that an epoch is applied. Return False if the marker has changed since ``after`` was read.

    ``applied`` names the run that applied it, and the index with its uuid and history, or ``indices``. If two drivers
    apply one epoch, only one gets True; it deletes what the other one's run left.
    """
    source = {
        "version": VERSION,
        "query_id": identity.query_id,
        "sink": identity.sink,
        "epoch": epoch.number,
        "attempt": epoch.attempt,
        "base": identity.origin["base"],
        "applied_at": int(clock.time() * 1000),
        **applied,
    }
    name = marker_document(identity_key(identity))
    return server.write(INDEX, name, source, over=after.place if after else None) is not None


LOOK_EVERY = 10.0
"""Seconds between two checks, before sending, whether another driver has overtaken this run. After a long pause its
writes could restore documents whose deletion the server has forgotten (``gc_deletes``)."""


_BOOT_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def _clocks(clock: Clock) -> tuple[float, ...]:
    """Return the time in seconds by several clocks.

    The monotonic clock stands still while a machine is suspended, the clock since the boot while a virtual machine is
    paused, and the wall clock can be set back.
    """
    boot = () if _BOOT_CLOCK is None else (time.clock_gettime(_BOOT_CLOCK),)
    return clock.monotonic(), clock.time(), *boot


class Overtaken(Exception):
    """Another driver applied this epoch or a later one while this run applied it."""


class Lookout:
    """Reads the marker again every few seconds; used by several threads."""

    def __init__(self, server: ElasticsearchServer, identity: Identity, epoch: Epoch, clock: Clock = time) -> None:
        self._server = server
        self._clock = clock
        self._identity = identity
        self._epoch = epoch
        self._looked_at = _clocks(clock)

    def now_and_then(self) -> None:
        """Read the marker if the last read is more than `LOOK_EVERY` seconds ago by any clock. Raises `Overtaken`."""
        if max(now - then for now, then in zip(_clocks(self._clock), self._looked_at, strict=True)) > LOOK_EVERY:
            self.now()

    def now(self) -> None:
        """Read the marker. Raises `Overtaken`."""
        begin = _clocks(self._clock)
        kept = read(self._server, self._identity)
        # Only now: a read that failed has seen nothing.
        self._looked_at = begin
        if kept is not None and kept.epoch >= self._epoch.number:
            raise Overtaken
