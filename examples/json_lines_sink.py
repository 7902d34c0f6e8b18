"""A sink of one's own: JSON lines in a folder, each epoch visible once. docs/how-to/write-a-sink.md explains it."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from epochsink import sink as es


@dataclass(frozen=True)
class JsonLines(es.Sink):
    folder: str

    def columns(self, row: str, schema: pa.Schema) -> list[str]:
        return [f"to_json({row}) AS line"]  # rendered by the JVM: the writer moves bytes

    def writer(self, task: es.Task) -> es.SinkWriter:
        visible = f"{es.identity_key(task.identity)}-{task.epoch.number}-{task.epoch.attempt}-{task.uuid}"
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


class JsonLinesParticipant(es.SimpleParticipant):
    def open(self, identity: es.Identity) -> es.Joining:
        self._key, self._generation = es.identity_key(identity), identity.generation
        self._folder = Path(self.members[identity.sink].folder)
        return super().open(identity)

    def remnants(self, recorded: es.Recorded) -> list[es.Remnant]:
        parts = {part["staged"]: part for each in recorded for part in each}
        names = [path.name for path in self._folder.glob(f".*-{self._key}-*")]
        return [es.Remnant("file", name, int(name[1:].partition("-")[0]), of=parts.get(name)) for name in names]

    def end(self, remnants: Sequence[es.Remnant]) -> list[str]:
        for remnant in remnants:
            (self._folder / remnant.name).unlink(missing_ok=True)
        return [remnant.name for remnant in remnants]

    def marks(self, sink: str, done: es.LastDone | None, pending: es.LastDone | None) -> es.Marks:
        visible = [path.name.split("-") for path in self._folder.glob(f"{self._key}-*")]
        found = {task: es.Mark(int(epoch), attempt) for _, epoch, attempt, task in visible}
        must, may = (es.marks_left(last, lambda part: part["staged"].rpartition("-")[2]) for last in (done, pending))
        return es.Marks(f"the folder {self._folder}", found, must, may)

    def holds(self, sink: str, part: es.Committable) -> bool:
        return Path(self._folder, part["staged"]).exists()

    def commit_part(self, sink: str, epoch: es.Epoch, ballot: es.Ballot, part: es.Committable) -> es.Verdict:
        visible = self._folder / part["staged"].partition("-")[2]
        with suppress(FileNotFoundError):
            (self._folder / part["staged"]).rename(visible)
        os.sync()  # after the ledger says done, nothing repeats a rename that a power cut undid
        return es.COMMITTED if visible.exists() else es.Verdict(es.Outcome.ABORTED, f"{part['staged']} is gone")

    def replay(self, epoch: es.Epoch, part: es.Committable, ballots: es.Ballots, attempt: str) -> es.Committable:
        (ballot,), visible = ballots.values(), part["staged"].partition("-")[2]
        writer = JsonLinesWriter(self._folder / f".{self._generation}-{visible}")  # the same final name: never twice
        return es.write_all(writer, ballot.rows.read(visible.rpartition("-")[2]))
