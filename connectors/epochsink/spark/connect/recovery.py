"""Commit the decided epochs that a run in the server of Spark Connect has left: in a task, which reaches the targets.

The client may be far from checkpoint and targets, and the process of a run is killed when the run ends.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Final

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import Checkpoint, OpenCheckpoint
from epochsink.protocol.json_value import from_json
from epochsink.protocol.ledger import Ledger, begun_query
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.spark.connect.checkpoint_files import CheckpointLocation
from epochsink.spark.query_run import Run, RunSettings, new_driver

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
        return from_json(cls, json.loads(text))


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """What a task must know of a query to finish its commits.

    With ``start``, an id, begin the names of all drivers of one start of the query.
    """

    settings: RunSettings
    place: CheckpointLocation
    start: str

    def recover(self) -> str:
        """Do what every start does first: commit what is decided, abort the leftovers. Return the `Standing`."""
        opened = self.place.open()
        query_id = begun_query(opened.files)
        if query_id is not None:
            self._recover(opened, query_id, starts=True)
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
            self._recover(opened, query_id, starts=False)
            history = _read(opened)
            left = [each.epoch for each in history.pending if _waits(checkpoint, history, each.epoch)]
            standing = _standing(history, left)
        return standing.to_json()

    def _recover(self, opened: OpenCheckpoint, query_id: str, *, starts: bool) -> None:
        Run(self.settings, opened, query_id, driver=new_driver(self.start), starts=starts).release()

    def _refuse_other(self, seen: str | None, query_id: str) -> None:
        if seen != query_id:
            raise ConfigurationError(
                f"the executors see {'no query' if seen is None else f'query {seen}'} in the checkpoint at "
                f"{self.place.location}, and the query is {query_id}: whether its last epoch is visible is not known, "
                "and the next start makes it so",
                hint="put the checkpoint on an object store, or in a folder that driver and executors share",
            )


def _read(opened: OpenCheckpoint) -> LedgerHistory:
    return Ledger(opened.files, uuid.uuid4().hex).read()


def _waits(checkpoint: Checkpoint, history: LedgerHistory, epoch: int) -> bool:
    """Return whether readers wait for an epoch that is recorded: it is decided."""
    return epoch not in history.disputed and checkpoint.is_decided(epoch)


def _standing(history: LedgerHistory, pending: list[int] | tuple[()]) -> Standing:
    stopped = "" if history.stopped is None else f"{history.stopped.failure} ({history.stopped.stamp})"
    return Standing(tuple(pending), stopped)
