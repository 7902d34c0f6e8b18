"""A sink of one's own: files of JSON lines in a folder that driver and tasks share, each row exactly once.

Tasks write files whose names begin with a dot, which readers of a folder leave out; the commit renames them. That a
file has its final name is this target's marker: it says which epochs are applied, and by which attempt.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from epochsink.errors import PrepareFailed, WentBack
from epochsink.identity import identity_key
from epochsink.protocol.storage import sync_folder
from epochsink.sink import (
    COMMITTED,
    Committable,
    Epoch,
    Identity,
    LastDone,
    Outcome,
    Rows,
    Sink,
    SinkCommitter,
    SinkWriter,
    Task,
    Verdict,
)


@dataclass(frozen=True, kw_only=True)
class JsonLines(Sink):
    """What the user says: a plain value that goes to every task."""

    folder: str
    select: Sequence[str] = ("*",)
    where: str | None = None

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        return [f"to_json({row}) AS line"]  # rendered by the JVM: the writer moves bytes

    def writer(self, task: Task) -> "JsonLinesWriter":
        return JsonLinesWriter(Path(self.folder), task)

    def committer(self) -> "JsonLinesCommitter":
        return JsonLinesCommitter(Path(self.folder))


class JsonLinesWriter(SinkWriter):
    """One task's file: invisible until the commit renames it."""

    def __init__(self, folder: Path, task: Task) -> None:
        key, number, attempt = identity_key(task.identity), task.epoch.number, task.epoch.attempt
        self._part = {
            "staged": f".{key}-{task.identity.generation}-{task.uuid}.jsonl",
            "visible": f"{key}-{number:012d}-{attempt}-{task.uuid}.jsonl",
            "task": task.uuid,
        }
        self._path = folder / self._part["staged"]
        self._file = self._path.open("wb")

    def write(self, batch: pa.RecordBatch) -> None:
        self._file.writelines(line + b"\n" for line in batch.column("line").cast(pa.binary()).to_pylist())

    def prepare(self) -> Committable:
        self._file.flush()
        os.fsync(self._file.fileno())  # what is prepared outlives a power cut
        self._file.close()
        return self._part

    def abort(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class JsonLinesCommitter(SinkCommitter):
    """The driver's side. Every method may be called again, by another process too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, schema: pa.Schema) -> list[str]:
        return [] if self._folder.is_dir() else [f"there is no folder {self._folder}: make it"]

    def open(self, identity: Identity) -> None:
        self._identity, self._key = identity, identity_key(identity)

    def newest(self) -> int | None:
        epochs = [int(path.name.split("-")[1]) for path in self._folder.glob(f"{self._key}-*.jsonl")]
        return max(epochs, default=None)

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob(f".{self._key}-*.jsonl"))

    def newest_generation(self) -> int:
        return max((int(name.split("-")[1]) for name in self.leftovers()), default=0)

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Stop where the folder is an older copy than the ledger, or a newer one."""
        gone = [p["visible"] for p in (done.parts if done else ()) if not (self._folder / p["visible"]).exists()]
        newest, known = self.newest(), max((last.epoch for last in (done, pending) if last), default=-1)
        if gone or (newest is not None and newest > known):
            raise WentBack(
                f"{self._folder} lacks {gone}, or holds an epoch after {known}: it is not of the checkpoint's time",
                hint="put the newer copy of the older one back",
            )

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        for part in written:
            if not (self._folder / part["staged"]).exists():
                raise PrepareFailed(f"epoch {epoch.number}: {part['staged']} is gone")
        return list(written)

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        visible = self._folder / part["visible"]
        try:
            (self._folder / part["staged"]).rename(visible)
        except FileNotFoundError:
            if not visible.exists():  # neither staged nor visible: this attempt can never become visible any more
                return Verdict(Outcome.ABORTED, f"{part['staged']} and {part['visible']} are both gone")
        sync_folder(self._folder)  # once the ledger says done, nothing would bring a lost rename back
        return COMMITTED

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        writer = JsonLinesWriter(self._folder, Task(self._identity, epoch, 0, attempt))
        try:
            for batch in rows.read(part["task"]):
                writer.write(batch)
        except BaseException:
            writer.abort()
            raise
        return {**part, "staged": writer.prepare()["staged"]}  # under the same final name, so never twice

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        kept = {part["staged"] for part in keep}
        ended = []
        for name in self.leftovers():
            if int(name.split("-")[1]) <= self._identity.generation and name not in kept:  # a newer driver's stay
                (self._folder / name).unlink(missing_ok=True)
                ended.append(name)
        return ended
