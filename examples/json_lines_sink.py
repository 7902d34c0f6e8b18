"""A sink of one's own: JSON lines in a folder, each epoch visible once. docs/how-to/write-a-sink.md explains it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from epochsink import sink as es
from epochsink.identity import identity_key


@dataclass(frozen=True)
class JsonLines(es.Sink):
    folder: str

    def columns(self, row: str, schema: pa.Schema) -> list[str]:
        return [f"to_json({row}) AS line"]  # rendered by the JVM: the writer moves bytes

    def writer(self, task: es.Task) -> es.SinkWriter:
        visible = f"{identity_key(task.identity)}-{task.epoch.number}-{task.epoch.attempt}-{task.uuid}"
        return JsonLinesWriter(Path(self.folder, f".{task.identity.generation}-{visible}"))

    def participant(self, members: es.Members) -> es.Participant:
        return JsonLinesParticipant(members)


class JsonLinesWriter(es.SinkWriter):
    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, list[bytes]()

    def write(self, batch: pa.RecordBatch) -> None:
        self._lines += batch.column("line").cast(pa.binary()).to_pylist()

    def prepare(self) -> es.Committable:
        self._path.write_bytes(b"\n".join([*self._lines, b""]))
        os.sync()  # what is prepared outlives a power cut
        return {"staged": self._path.name}


class JsonLinesParticipant(es.Participant):
    def open(self, identity: es.Identity) -> None:
        self._key, self._generation = identity_key(identity), identity.generation
        self._folder = Path(self.members[identity.sink].folder)

    def leftovers(self, sink: str = "") -> list[str]:
        return [path.name for path in self._folder.glob(f".*-{self._key}-*")]

    def marks(self, sink: str) -> es.Marks:
        found = [path.name.split("-") for path in self._folder.glob(f"{self._key}-*")]
        return {task: es.Mark(int(epoch), attempt) for _, epoch, attempt, task in found}

    def marks_of(self, sink: str, last: es.LastDone) -> es.Marks:
        return {part["staged"].rpartition("-")[2]: es.Mark(last.epoch, last.attempt) for part in last.parts}

    def holds(self, sink: str, part: es.Committable) -> bool:
        return Path(self._folder, part["staged"]).exists()

    def commit_part(self, sink: str, epoch: es.Epoch, ballot: es.Ballot, part: es.Committable) -> es.Verdict:
        visible = self._folder / part["staged"].partition("-")[2]
        with suppress(FileNotFoundError):
            (self._folder / part["staged"]).rename(visible)
        os.sync()  # after the ledger says done, nothing repeats a rename that a power cut undid
        return es.COMMITTED if visible.exists() else es.Verdict(es.Outcome.ABORTED, f"{part['staged']} is gone")

    def newest_generation(self, sink: str) -> int:
        return max((int(name[1:].partition("-")[0]) for name in self.leftovers()), default=0)

    def replay(self, epoch: es.Epoch, part: es.Committable, ballots: es.Ballots, attempt: str) -> es.Committable:
        (ballot,), visible = ballots.values(), part["staged"].partition("-")[2]
        writer = JsonLinesWriter(self._folder / f".{self._generation}-{visible}")  # the same final name: never twice
        return es.write_all(writer, ballot.rows.read(visible.rpartition("-")[2]))

    def abort_orphans(self, keep: es.Committables, done: es.Committables = ()) -> list[str]:
        ended = {name for name in self.leftovers() if int(name[1:].partition("-")[0]) <= self._generation}
        ended -= {part["staged"] for part in keep}
        for name in ended:
            (self._folder / name).unlink(missing_ok=True)
        return sorted(ended)
