"""A sink on a plain folder, with faults that any process can arm: for tests of the machine on real Spark.

<folder>/prepared/<identity>/<epoch>-<attempt>-<task>.arrow     written by tasks
<folder>/visible/<identity>/<the same name>                     renamed there by the commit
<folder>/faults/<point>/<n>                                     one file for each armed failure
<folder>/log                                                    one line for each call of the participant
"""
# ruff: noqa: ARG002 - there is one sink

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.sink import (
    COMMITTED,
    Joining,
    Mark,
    Marks,
    Outcome,
    Recorded,
    Remnant,
    SimpleParticipant,
    Sink,
    Verdict,
    identity_key,
    marks_left,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.sink import (
        Ballot,
        Ballots,
        Committable,
        Epoch,
        Identity,
        LastDone,
        Parts,
        SinkWriter,
        Task,
    )

DEADLINE = 60.0


@dataclass(frozen=True)
class FolderSink(Sink):
    """Rows become visible task by task, each with a rename."""

    folder: str
    select: Sequence[str] = ("*",)
    where: str | None = None
    delete_when: str | None = None
    spool: bool = True
    distribute_by: Sequence[str] = ()
    keeps_order: bool = False
    findings: Sequence[str] = ()
    placed_by: str = ""
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", Faults(Path(self.folder) / "faults"))

    def check_columns(self, schema: pa.Schema) -> None:
        """Nothing to check."""

    def placement(self, schema: pa.Schema) -> tuple[Mapping[str, str], Sequence[str]]:
        return ({"placed_by": self.placed_by}, ["id"]) if self.placed_by else ({}, ())

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        columns = [f"{row}.`{name}` AS `{name}`" for name in schema.names]
        return [*columns, f"({self.delete_when}) AS deleted"] if self.delete_when else columns

    def writer(self, task: Task) -> SinkWriter:
        return FolderWriter(self, task)

    def participant(self, members: Mapping[str, FolderSink]) -> FolderParticipant:
        return FolderParticipant(members)

    def rows(self) -> list[dict[str, Any]]:
        """Return all visible rows, each with its `epoch` and `attempt`."""
        rows = []
        for path in sorted((Path(self.folder) / "visible").glob("*/*.arrow")):
            epoch, attempt, _ = path.stem.split("-")
            rows += [{**row, "epoch": int(epoch), "attempt": attempt} for row in _read(path)]
        return rows

    def values(self, column: str = "id") -> list[Any]:
        """Return one column of the visible rows, sorted."""
        return sorted(row[column] for row in self.rows())

    def prepared(self) -> list[str]:
        """Return the names of what is prepared and invisible."""
        return sorted(path.name for path in (Path(self.folder) / "prepared").glob("*/*"))

    def calls(self, kind: str) -> list[str]:
        """Return the arguments of the participant's calls of one kind, oldest first."""
        log = Path(self.folder) / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == kind]


@dataclass(frozen=True)
class Faults:
    """Failures on order, as files: whoever removes one has to fail."""

    folder: Path

    def arm(self, point: str, times: int = 1) -> None:
        (self.folder / point).mkdir(parents=True, exist_ok=True)
        for number in range(times):
            (self.folder / point / str(number)).touch()

    def disarm(self, point: str) -> None:
        for armed in self._armed(point):
            armed.unlink(missing_ok=True)

    def strike(self, point: str) -> bool:
        """Return whether to fail here, using up one armed failure."""
        for armed in self._armed(point):
            try:
                armed.unlink()
            except FileNotFoundError:
                continue
            return True
        return False

    def hold(self, point: str) -> None:
        """Wait while the point is armed; `<point>-reached` tells that somebody waits."""
        if self._armed(point):
            self.arm(f"{point}-reached")
        deadline = time.monotonic() + DEADLINE
        while self._armed(point):
            if time.monotonic() > deadline:
                raise TimeoutError(point)
            time.sleep(0.02)

    def reached(self, point: str) -> bool:
        return bool(self._armed(f"{point}-reached"))

    def _armed(self, point: str) -> list[Path]:
        return sorted((self.folder / point).glob("*"))


class FolderWriter:
    def __init__(self, sink: FolderSink, task: Task) -> None:
        self._sink = sink
        folder = Path(sink.folder) / "prepared" / identity_key(task.identity)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{task.epoch.number}-{task.epoch.attempt}-{task.uuid}.arrow"
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._sink.faults.hold("write")
        if self._sink.faults.strike("write-breaks"):
            raise RuntimeError("the disk is on fire")
        if self._sink.faults.strike("write-rejects"):
            raise RowsRejected("value 7 of column id breaks the rule id < 7", hint="filter it with where=", column="id")
        self._batches.append(batch)

    def prepare(self) -> Committable:
        table = pa.Table.from_batches(self._batches)
        with pa.OSFile(str(self._path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        if self._sink.faults.strike("prepare-breaks"):
            raise PrepareFailed("the task failed after it had prepared", hint="run it again")
        return {"file": self._path.name, "rows": table.num_rows}

    def abort(self) -> None:
        """Leave everything to the sweep, as a killed task does."""


class FolderParticipant(SimpleParticipant):
    def __init__(self, members: Mapping[str, FolderSink]) -> None:
        super().__init__(members)
        (self._sink,) = members.values()
        self._root = Path(self._sink.folder)
        self._identity: Identity | None = None

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        return [f"{finding} (columns {', '.join(schema.names)})" for finding in self._sink.findings]

    def open(self, identity: Identity) -> Joining:
        self._identity = identity
        for place in ("prepared", "visible"):
            self._place(place).mkdir(parents=True, exist_ok=True)
        return super().open(identity)

    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        if self._sink.faults.strike("unreachable"):
            raise ConnectionError("the folder's server is down")
        newest = max((int(path.name.partition("-")[0]) for path in self._place("visible").iterdir()), default=None)
        # without the attempt, which its markers do not have
        found = {} if newest is None else {"": Mark(newest)}
        return Marks(f"the folder {self._sink.folder}", found, marks_left(done), marks_left(pending))

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        parts = {part["file"]: part for each in recorded[::-1] for part in each}
        names = sorted(path.name for path in self._place("prepared").iterdir())
        return [Remnant("file", name, of=parts.get(name)) for name in names]

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        (ballot,) = ballots.values()
        self._log("vote", epoch.number)
        self._sink.faults.hold("vote")
        if self._sink.faults.strike("vote-breaks"):
            raise PrepareFailed("the sink votes no", hint="arm it less")
        assert len(ballot.rows.tasks()) == len(ballot.parts)
        return super().vote(epoch, ballots)

    def holds(self, sink: str, part: Committable) -> bool:
        found: bool = (self._place("prepared") / part["file"]).exists()
        return found

    def commit_part(self, sink: str, epoch: Epoch, ballot: Ballot, part: Committable) -> Verdict:
        self._log("commit", f"{epoch.number} {part['file']} {time.time_ns()}")
        self._sink.faults.hold("commit")
        if self._sink.faults.strike("commit-dies"):
            os._exit(1)
        if self._sink.faults.strike("commit-waits"):
            time.sleep(2)
        if self._sink.faults.strike("commit-unknown"):
            return Verdict(Outcome.UNKNOWN, "the server did not answer within 1 s")
        prepared, visible = self._place("prepared") / part["file"], self._place("visible") / part["file"]
        if not visible.exists():
            if not prepared.exists():
                return Verdict(Outcome.ABORTED, f"{part['file']} is gone")
            prepared.rename(visible)
        if self._sink.faults.strike("commit-reply-lost"):
            return Verdict(Outcome.UNKNOWN, "the connection broke after the request")
        return COMMITTED

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        (ballot,) = ballots.values()
        self._log("replay", epoch.number)
        task = part["file"].rpartition("-")[2].removesuffix(".arrow")
        batches = list(ballot.rows.read(task))
        path = self._place("prepared") / f"{epoch.number}-{attempt}-{task}.arrow"
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return {"file": path.name, "rows": part["rows"]}

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        for each in remnants:
            self._log("swept", each.name)
            (self._place("prepared") / each.name).unlink()
        return [each.name for each in remnants]

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        self._log("finish", epoch.number)

    def close(self) -> None:
        self._log("close", "")

    def _place(self, name: str) -> Path:
        assert self._identity is not None
        return self._root / name / identity_key(self._identity)

    def _log(self, kind: str, what: object) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "log").open("a") as log:
            log.write(f"{kind} {what}\n")


def _read(path: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as stream:
        return list(itertools.chain.from_iterable(batch.to_pylist() for batch in stream))
