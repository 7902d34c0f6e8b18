"""Commit the decided epochs that a run in the server of Spark Connect has left: in a task, which reaches the targets.

The client may be far from checkpoint and targets, and the process of a run is killed when the run ends.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import Ledger
from epochsink.spark.query_run import Run, new_driver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.protocol.checkpoint import OpenCheckpoint
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Sink
    from epochsink.spark.connect.checkpoint_files import Place

LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Standing:
    """How the commits of a checkpoint stand: what readers wait for, and the last failure."""

    pending: tuple[int, ...] = ()
    stopped: str = ""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """Return what a text holds."""
        fields = json.loads(text)
        return cls(**{**fields, "pending": tuple(fields["pending"])})


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a task must know of a query to finish its commits.

    With ``start``, an id, begin the names of all drivers of one start of the query.
    """

    sinks: Mapping[str, Sink]
    place: Place
    join_running: bool | str
    retain_seconds: float
    show_values: bool
    application: str
    start: str

    def recover(self) -> str:
        """Do what every start does first: commit what is decided, abort the leftovers. Return the `Standing`."""
        opened = self.place.open()
        query_id = Checkpoint(opened.files).query_id()
        if query_id is not None:
            self._recover(opened, query_id)
        return _standing(_read(opened), ()).to_json()

    def settle(self, query_id: str, before: Standing, seconds: float, *, ended: bool) -> str:
        """Wait until the epochs of a run are visible; return the `Standing`, in which the others are pending.

        ``before`` is how the commits stood before the run. If it has ``ended``, what it has left after ``seconds`` is
        committed here, unless another driver has taken the checkpoint over. Returns early if the run has failed.
        """
        opened = self.place.open()
        checkpoint = Checkpoint(opened.files)
        self._refuse_other(checkpoint.query_id(), query_id)
        deadline = time.monotonic() + seconds
        while True:
            history = _read(opened)
            pending = [each.epoch for each in history.pending if not ended or _waits(checkpoint, history, each.epoch)]
            unknown = ended and checkpoint.newest_decided() > history.newest
            standing = _standing(history, pending)
            if not (pending or unknown) or (standing.stopped != before.stopped and not ended):
                return standing.to_json()
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        # another driver commits what it finds, and would be fenced
        if ended and (history.owner is None or history.owner.driver.startswith(self.start)):
            self._recover(opened, query_id)
            history = _read(opened)
            left = [each.epoch for each in history.pending if _waits(checkpoint, history, each.epoch)]
            standing = _standing(history, left)
        return standing.to_json()

    def _recover(self, opened: OpenCheckpoint, query_id: str) -> None:
        Run(
            self.sinks,
            opened,
            query_id,
            driver=new_driver(self.start),
            join_running=self.join_running,
            retain_seconds=self.retain_seconds,
            executors=None,
            application=self.application,
            show_values=self.show_values,
            on_progress=None,
        ).release()

    def _refuse_other(self, found: str | None, query_id: str) -> None:
        if found != query_id:
            raise ConfigurationError(
                f"the executors see {'no query' if found is None else f'query {found}'} in the checkpoint at "
                f"{self.place.location}, and the query is {query_id}: whether its last epoch is visible is not known, "
                "and the next start makes it so",
                hint="put the checkpoint on an object store, or in a folder that driver and executors share",
            )


def _read(opened: OpenCheckpoint) -> History:
    return Ledger(opened.files, uuid.uuid4().hex).read()


def _waits(checkpoint: Checkpoint, history: History, epoch: int) -> bool:
    """Return whether readers wait for an epoch that is recorded: it is decided."""
    return epoch not in history.disputed and checkpoint.is_decided(epoch)


def _standing(history: History, pending: list[int] | tuple[()]) -> Standing:
    stopped = "" if history.stopped is None else f"{history.stopped.failure} ({history.stopped.stamp})"
    return Standing(tuple(pending), stopped)
