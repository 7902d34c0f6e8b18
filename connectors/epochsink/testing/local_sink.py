"""Provide a sink for tests of pipelines that needs no service and can fail in every way.

    sink = LocalSink(tmp_path / "sink")
    query = ExactlyOnce(checkpoint=..., sinks={"out": sink}).start(stream.writeStream.trigger(availableNow=True))
    query.awaitTermination()
    assert sink.rows() == [...]

Its rows must get from Spark's Python workers to the test, so it stores them in a folder, which may be on a RAM disk. It
keeps the whole contract of `epochsink.sink`: one rename makes each epoch visible as a whole.

    <folder>/<identity>/written/<generation>-<epoch>-<attempt>/<task>.arrow      by the tasks
    <folder>/<identity>/prepared/<generation>-<epoch>-<attempt>/<task>.arrow     the accepted tasks', by the vote
    <folder>/<identity>/visible/<epoch>/<task>.arrow                             renamed there by the commit
    <folder>/faults/<point>/<number>                                             one for each armed failure
"""
# ruff: noqa: ARG002 - there is one sink

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.sink import (
    COMMITTED,
    Ballots,
    Committable,
    Epoch,
    Identity,
    Joining,
    LastDone,
    Mark,
    Marks,
    Outcome,
    Participant,
    Parts,
    Recorded,
    Remnant,
    RemnantState,
    Sink,
    SinkWriter,
    Task,
    Verdict,
    identity_key,
    marks_left,
)
from epochsink.sink.sql import quoted

_ATTEMPT: Final = re.compile(r"(\d+)-(\d+)-([0-9a-f]{32})")
_REMNANT: Final = re.compile(_ATTEMPT.pattern + r"(\.[0-9a-f]{32})?")
_ATTEMPT_FILE: Final = "attempt"
_STATES: Final = {"prepared": RemnantState.PREPARED, "written": RemnantState.STAGED}


@dataclass(frozen=True, kw_only=True)
class LocalSink(Sink):
    """Appends rows to a folder. A query, its tasks and a later query may use it at the same time.

    ``folder`` is the target: two sinks on one folder are one target. ``select``, ``where``, ``spool``,
    ``distribute_by`` and ``keeps_order`` are those of every sink.
    """

    folder: str | Path = field(kw_only=False)
    select: Sequence[str] = ("*",)
    where: str | None = None
    spool: bool = True
    distribute_by: Sequence[str] = ()
    keeps_order: bool = False

    def check_columns(self, schema: pa.Schema) -> None:
        """Nothing to check: a file accepts every type."""

    # ---- reads

    def rows(self) -> list[dict[str, Any]]:
        """Return the visible rows of all epochs, in the order of epochs and tasks."""
        return [row for path in self._visible() for row in _read(_files(path))]

    def epochs(self) -> dict[int, list[dict[str, Any]]]:
        """Return the visible rows by epoch. After a new checkpoint, epochs of the same number are joined."""
        epochs: dict[int, list[dict[str, Any]]] = {}
        for path in self._visible():
            epochs.setdefault(int(path.name), []).extend(_read(_files(path)))
        return epochs

    def prepared(self) -> list[str]:
        """Return the names (generation, epoch, attempt) of prepared epochs that are not visible."""
        return sorted(path.name for path in Path(self.folder).glob("*/prepared/*") if _ATTEMPT.fullmatch(path.name))

    def _visible(self) -> list[Path]:
        return sorted(Path(self.folder).glob("*/visible/*"), key=lambda path: (int(path.name), path.parts))

    # ---- failures

    def fail_prepare(self, times: int = 1) -> None:
        """Make the next tasks that prepare fail with `PrepareFailed`."""
        self._arm("prepare", times)

    def fail_vote(self, times: int = 1) -> None:
        """Make the next votes fail with `PrepareFailed`."""
        self._arm("vote", times)

    def lose_reply(self, times: int = 1) -> None:
        """Make the next commits succeed and then raise `OSError`, as if the reply was lost."""
        self._arm("reply", times)

    def forget_outcome(self, times: int = 1) -> None:
        """Make the next commits do nothing and answer UNKNOWN."""
        self._arm("outcome", times)

    def abort_prepared(self) -> list[str]:
        """Abort everything prepared, as a broker's time-out or an administrator could; return the names."""
        names = self.prepared()
        for path in Path(self.folder).glob("*/prepared/*"):
            if path.name in names:
                _remove(path)
        return names

    def set_back(self, newest: int) -> None:
        """Make every epoch above ``newest`` invisible, as if the target was restored from a backup."""
        for path in self._visible():
            if int(path.name) > newest:
                shutil.rmtree(path)

    def reject(self, column: str, value: Any) -> None:
        """Refuse rows with this value (of a JSON type) with `RowsRejected`, until `accept_all`."""
        path = Path(self.folder) / "rejected"
        path.mkdir(parents=True, exist_ok=True)
        (path / uuid.uuid4().hex).write_text(json.dumps([column, value]))

    def accept_all(self) -> None:
        """Accept all rows from now on."""
        shutil.rmtree(Path(self.folder) / "rejected", ignore_errors=True)

    def _arm(self, point: str, times: int) -> None:
        path = Path(self.folder) / "faults" / point
        path.mkdir(parents=True, exist_ok=True)
        for _ in range(times):
            (path / uuid.uuid4().hex).touch()

    def strikes(self, point: str) -> bool:
        """Use up one armed failure; return whether there was one. If several processes ask, the first one gets it."""
        for armed in (Path(self.folder) / "faults" / point).glob("*"):
            try:
                armed.unlink()
            except FileNotFoundError:
                continue
            return True
        return False

    def refused(self) -> list[tuple[str, Any]]:
        """Return the (column, value) pairs that are refused."""
        return [tuple(json.loads(path.read_text())) for path in (Path(self.folder) / "rejected").glob("*")]

    # ---- the contract (see epochsink.sink.Sink)

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return every selected column as it is."""
        names = map(quoted, schema.names)
        return [f"{row}.{name} AS {name}" for name in names]

    def writer(self, task: Task) -> LocalWriter:
        """Make the writer of one task attempt."""
        return LocalWriter(self, task)

    def participant(self, members: Mapping[str, LocalSink]) -> LocalParticipant:
        """Make the driver's part."""
        return LocalParticipant(members)


class LocalWriter(SinkWriter):
    """Collects one task's rows, and writes them when it prepares (see `epochsink.sink.SinkWriter`)."""

    def __init__(self, sink: LocalSink, task: Task) -> None:
        self._sink = sink
        name = _attempt_name(task.identity.generation, task.epoch.number, task.epoch.attempt)
        self._path = Path(sink.folder) / identity_key(task.identity) / "written" / name / f"{task.uuid}.arrow"
        self._task = task
        self._batches: list[pa.RecordBatch] = []
        self._refused = sink.refused()

    def write(self, batch: pa.RecordBatch) -> None:
        """Collect a record batch. Raises `RowsRejected` if a value is refused."""
        for column, value in self._refused:
            if column in batch.schema.names and value in batch.column(column).to_pylist():
                raise RowsRejected(
                    f"a row with {column}={value!r} is refused, as LocalSink.reject() requested",
                    hint="filter such rows out, or call accept_all()",
                )
        self._batches.append(batch)

    def prepare(self) -> Committable:
        """Write the file."""
        if self._sink.strikes("prepare"):
            raise PrepareFailed(f"task {self._task.uuid} fails to prepare, as LocalSink.fail_prepare() requested")
        _write(self._path, self._batches)
        return {
            "task": self._task.uuid,
            "slot": self._task.partition,
            "rows": sum(len(batch) for batch in self._batches),
        }

    def abort(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class LocalParticipant(Participant):
    """Makes epochs visible, each by one rename."""

    def __init__(self, members: Mapping[str, LocalSink]) -> None:
        super().__init__(members)
        (self._sink,) = members.values()
        self._home = Path(self._sink.folder)
        self._generation = 0

    def open(self, identity: Identity) -> Joining:
        """Set the sink's identity."""
        self._home = Path(self._sink.folder) / identity_key(identity)
        self._generation = identity.generation
        return super().open(identity)

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return the attempts that are prepared or written, and not visible."""
        parts = {part["name"]: part for each in recorded[::-1] for part in each}
        return [
            Remnant(folder, path.name, int(match[1]), state=state, of=parts.get(path.name))
            for folder, state in _STATES.items()
            for path in sorted(self._home.glob(f"{folder}/*"))
            if (match := _REMNANT.fullmatch(path.name))
        ]

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """Remove attempts."""
        for each in remnants:
            _remove(self._home / each.kind / each.name)
        return list(map(str, remnants))

    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return the newest visible epoch."""
        newest = max((self._home / "visible").glob("*"), default=None, key=lambda path: int(path.name))
        marks = {} if newest is None else {"": Mark(int(newest.name), (newest / _ATTEMPT_FILE).read_text())}
        return Marks(f"the folder {self._home}", marks, marks_left(done), marks_left(pending))

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Move the accepted tasks' files into one folder."""
        ((name, ballot),) = ballots.items()
        return {name: [self._vote(epoch, ballot.parts)]}

    def _vote(self, epoch: Epoch, written: Sequence[Committable]) -> Committable:
        if self._sink.strikes("vote"):
            raise PrepareFailed(f"the vote on epoch {epoch.number} fails, as LocalSink.fail_vote() requested")
        name = _attempt_name(self._generation, epoch.number, epoch.attempt)
        files = [self._home / "written" / name / f"{part['task']}.arrow" for part in written]
        gone = [file.name for file in files if not file.exists()]
        if gone:
            raise PrepareFailed(f"epoch {epoch.number}: the files of these tasks are missing: {', '.join(gone)}")
        self._put(name, epoch, {f"{i:06d}-{file.name}": file for i, file in enumerate(files)})
        return {"name": name, "rows": sum(part["rows"] for part in written)}

    def _put(self, name: str, epoch: Epoch, files: dict[str, Path]) -> None:
        unfinished = self._home / "prepared" / f"{name}.{uuid.uuid4().hex}"
        unfinished.mkdir(parents=True)
        for final, file in files.items():
            os.link(file, unfinished / final)
        (unfinished / _ATTEMPT_FILE).write_text(epoch.attempt)
        unfinished.rename(self._home / "prepared" / name)

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Rename the epoch's folder. If it is missing, the visible epoch decides the outcome."""
        return {name: [self._commit(epoch, part) for part in ballot.parts] for name, ballot in ballots.items()}

    def _commit(self, epoch: Epoch, part: Committable) -> Verdict:
        if self._sink.strikes("outcome"):
            return Verdict(Outcome.UNKNOWN, "as LocalSink.forget_outcome() requested")
        visible = self._home / "visible" / f"{epoch.number:012d}"
        visible.parent.mkdir(parents=True, exist_ok=True)
        verdict = self._rename(self._home / "prepared" / part["name"], visible, epoch)
        if self._sink.strikes("reply"):
            raise OSError(
                f"the reply to the commit of epoch {epoch.number} is lost, as LocalSink.lose_reply() requested"
            )
        return verdict

    def _rename(self, prepared: Path, visible: Path, epoch: Epoch) -> Verdict:
        try:
            # The rename fails if the target folder is not empty, so an epoch becomes visible only once.
            prepared.rename(visible)
        except OSError as refused:
            if not visible.exists():
                return Verdict(Outcome.ABORTED, f"{prepared.name} is gone, and epoch {epoch.number} is not visible")
            attempt = (visible / _ATTEMPT_FILE).read_text()
            if attempt != epoch.attempt:
                return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} is visible by attempt {attempt}: {refused}")
        return COMMITTED

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Prepare the spooled rows under a new name."""
        (ballot,) = ballots.values()
        rows = ballot.rows
        name = _attempt_name(self._generation, epoch.number, attempt)
        files = {}
        for i, task in enumerate(rows.tasks()):
            path = self._home / "written" / name / f"{task}.arrow"
            _write(path, rows.read(task))
            files[f"{i:06d}-{path.name}"] = path
        self._put(name, epoch, files)
        return {**part, "name": name}

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Remove the files of the tasks."""
        for ballot in ballots.values():
            for part in ballot.parts:
                _remove(self._home / "written" / part["name"])


def _attempt_name(generation: int, epoch: int, attempt: str) -> str:
    return f"{generation}-{epoch}-{attempt}"


def _remove(path: Path) -> None:
    """Rename a folder, so that it disappears at once, then delete it."""
    doomed = path.parent / f"{path.name.partition('.')[0]}.{uuid.uuid4().hex}"
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


def _write(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = list(batches)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


def _read(files: Iterable[Path]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in files:
        with pa.OSFile(str(file), "rb") as source, pa.ipc.open_stream(source) as stream:
            rows += stream.read_all().to_pylist()
    return rows
