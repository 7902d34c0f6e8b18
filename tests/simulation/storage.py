"""The in-memory checkpoint folder and spool, each call a step."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from epochsink.errors import SpoolDamaged, SpoolMissing
from epochsink.protocol.ledger import FOLDER, Ledger
from epochsink.sink import Epoch, Identity, SpoolFile
from simulation import kafka_sink, search_sink
from simulation.kafka_brokers import LETTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from simulation.readers import Row
    from simulation.steps import Stepper
    from simulation.world import Folders, Spooled, World


BY_DOCUMENT = "EF"
"""The sinks of Elasticsearch, whose rows are record batches."""
MOST_ROWS = 4
"""The rows of a record batch."""
ALTERED = "altered"
"""The attempt in rows that somebody has changed in the spool."""


class MemoryFiles:
    """`epochsink.protocol.storage.Storage` in memory. While ``quiet``, reading is not a step of its own."""

    def __init__(self, folders: Folders, step: Stepper) -> None:
        self._folders = folders
        self.step = step
        self.quiet = False

    def create(self, name: str, data: bytes) -> bool:
        """Make a file unless it exists."""
        folder, _, plain = name.rpartition("/")

        def apply() -> bool:
            files = self._folders.setdefault(folder, {})
            if plain in files:
                return False
            files[plain] = data
            return True

        return self.step(f"create {name}", apply)

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes."""
        folder, _, plain = name.rpartition("/")
        if self.quiet:
            return self._folders.get(folder, {}).get(plain)
        return self.step(f"read {name}", lambda: self._folders.get(folder, {}).get(plain), reads=True)

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files, one step each."""
        return [self.read(name) for name in names]

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        if self.quiet:
            return list(self._folders.get(folder, {}))
        return self.step(f"names {folder}", lambda: list(self._folders.get(folder, {})), reads=True)

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete several files, one step each."""
        for name in names:
            folder, _, plain = name.rpartition("/")
            self.step(f"remove {name}", partial(self._remove, folder, plain))

    def _remove(self, folder: str, plain: str) -> None:
        self._folders.get(folder, {}).pop(plain, None)

    def make_durable(self, name: str) -> None:
        """Do nothing: no power is cut here."""


class QuickLedger(Ledger):
    """The production ledger; only, reading on to the newest entry is one step, not one for each file."""

    def _catch_up(self) -> None:
        """Read on."""
        files: Any = self._files
        if files.quiet:
            super()._catch_up()
            return
        files.step(f"read {FOLDER}", lambda: None, reads=True)
        files.quiet = True
        try:
            super()._catch_up()
        finally:
            files.quiet = False


class StepwiseLedger(Ledger):
    """The production ledger, every file that it reads a step."""


class TrimmingLedger(QuickLedger):
    """Retains one done epoch, and trims whenever there is anything to trim."""

    def __init__(self, files: MemoryFiles, driver: str) -> None:
        super().__init__(files, driver, retained_epochs=1, summarised_after=1)


class MemorySpool:
    """`epochsink.sink.SpoolKeeper` in memory, and the tasks' side of it. ``folders`` are those of one checkpoint."""

    beside_ledger = True

    def __init__(self, world: World, step: Stepper, folders: Spooled | None = None) -> None:
        self.folders = world.spool if folders is None else folders
        self.step = step

    def make(self, query_id: str, epoch: Epoch) -> None:
        """Make an attempt's folder."""
        key = (query_id, epoch.number, epoch.attempt)
        self.step(f"spool make {epoch.number}", lambda: self.folders.setdefault(key, {}))

    def write(self, query_id: str, epoch: Epoch, name: str, rows: list[Row]) -> SpoolFile:
        """Spool one task's rows of one sink; OSError if the folder is gone."""
        key = (query_id, epoch.number, epoch.attempt)

        def apply() -> bool:
            folder = self.folders.get(key)
            if folder is None:
                return False
            folder[name] = rows
            return True

        if not self.step(f"spool write {epoch.number} {name}", apply):
            raise FileNotFoundError(f"the spool's folder of epoch {epoch.number} is gone")
        return summed_up(rows)

    def rows(
        self,
        identity: Identity,
        epoch: Epoch,
        tasks: Sequence[str],
        files: Mapping[str, SpoolFile] = MappingProxyType({}),
    ) -> MemoryRows:
        """Return what accepted tasks have spooled."""
        return MemoryRows(self, identity, epoch, tuple(tasks), files)

    def drop(self, query_id: str, epoch: Epoch, known: Sequence[tuple[Identity, str]] = ()) -> None:
        """Remove an attempt's folder."""
        del known  # a folder goes as a whole here
        key = (query_id, epoch.number, epoch.attempt)
        self.step(f"spool drop {epoch.number}", lambda: self.folders.pop(key, None))

    def note_retained(self, query_id: str, name: str, record: bytes) -> None:
        """Write the record of a retained epoch."""
        del query_id  # only one query retains
        self.step(f"spool retain {name}", lambda: self.folders.records.update({name: record}))

    def retained(self, query_id: str) -> list[str]:
        """List the records; not a step, as a query without ``retain=`` looks once at its start."""
        del query_id
        return list(self.folders.records)

    def read_retained(self, query_id: str, name: str) -> list[bytes]:
        """Read the newest record: a step writes it as a whole, so an earlier one is never needed."""
        del query_id
        records = self.folders.records
        return self.step("spool read retained", lambda: [records[name]] if name in records else [], reads=True)

    def forget_retained(self, query_id: str, name: str = "") -> None:
        """Remove a record, or all of them."""
        del query_id
        records = self.folders.records
        self.step("spool forget", lambda: records.pop(name, None) if name else records.clear())

    def attempts(self, query_id: str) -> list[Epoch]:
        """List the folders."""
        return self.step(
            "spool list",
            lambda: [Epoch(number, attempt) for owner, number, attempt in self.folders if owner == query_id],
            reads=True,
        )


class MemoryRows:
    """`epochsink.sink.Rows`, of `Row` tuples instead of record batches."""

    def __init__(
        self,
        spool: MemorySpool,
        identity: Identity,
        epoch: Epoch,
        accepted: tuple[str, ...],
        files: Mapping[str, SpoolFile],
    ) -> None:
        self._folders, self._step = spool.folders, spool.step
        self._identity = identity
        self._key = (identity.query_id, epoch.number, epoch.attempt)
        self._accepted = accepted
        self._files = files

    def tasks(self) -> Sequence[str]:
        """Return the accepted tasks."""
        return self._accepted

    def read(self, task: str) -> Iterator[Any]:
        """Yield a task's rows, if they are those that it wrote."""
        name = spool_name(self._identity.sink, task)
        key = self._key
        rows = self._step(f"spool read {key[1]}", lambda: self._folders.get(key, {}).get(name), reads=True)
        if rows is None:
            raise SpoolMissing(f"no spool of epoch {key[1]}")
        recorded = self._files.get(task)
        if recorded is not None and recorded != summed_up(rows):
            raise SpoolDamaged(f"the spool of epoch {key[1]} is not what was written")
        if self._identity.sink == LETTER:
            yield kafka_sink.batch_of(tuple(rows))
        elif self._identity.sink in BY_DOCUMENT:
            for first in range(0, len(rows), MOST_ROWS):
                some = tuple(rows[first : first + MOST_ROWS])
                yield search_sink.batch_of(some, keyed=self._identity.sink == search_sink.KEYED)
        else:
            yield from rows

    def verify(self) -> None:
        """Compare what is spooled for a sink of Elasticsearch, which does that before its first request."""
        for task in self._accepted if self._identity.sink in BY_DOCUMENT else ():
            for _ in self.read(task):
                pass


def summed_up(rows: list[Row]) -> SpoolFile:
    """Return what is recorded of a file."""
    data = repr(rows).encode()
    return SpoolFile(len(rows), len(data), crc32(data))


def altered(rows: list[Row], how: str) -> list[Row]:
    """Return a file's rows as they are after somebody has cut it or changed it."""
    return rows[:-1] if how == "cut" else [row._replace(attempt=ALTERED) for row in rows]


def spool_name(sink: str, task: str) -> str:
    """Return the name of a task's file in the spool."""
    return f"{sink}-{task}"
