"""Take an operator's word for what a target holds, or for epochs that Spark decided without this package."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Resolved, Skipped

if TYPE_CHECKING:
    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger import History

_log = logging.getLogger("epochsink")


class Acceptance:
    """One statement about the past; ``sink`` is None for epochs decided without this package.

    Raises `ConfigurationError` unless the statement is about the newest epoch in question.
    """

    def __init__(self, place: Place, epoch: int, sink: str | None) -> None:
        self._place = place
        self._number = epoch
        self._sink = sink
        self._ledger = Ledger(place.files, uuid.uuid4().hex)
        self._verify(self._ledger.read())

    def plan(self) -> list[str]:
        """Return what will be done, a line each."""
        lines = ["take the ledger: a driver that runs on this checkpoint now stops with Fenced"]
        if self._sink is None:
            return [*lines, f"record that the epochs up to {self._number}, decided without ExactlyOnce, are settled"]
        holds = f"record that sink '{self._sink}' holds what it should up to epoch {self._number}"
        return [*lines, f"{holds}: whatever of it the target lacks, it will never get"]

    def carry_out(self) -> None:
        """Do it. Raises `Fenced` if another driver takes the ledger meanwhile."""
        take = self._ledger.take(self._place.query_id, {}, -1)
        _log.info("took the ledger as generation %d", take.generation)
        self._verify(self._ledger.verify())
        if self._sink is None:
            self._ledger.append(Skipped(self._number))
        else:
            self._ledger.append(Resolved(self._number, self._sink, "accepted"))
        _log.info("recorded: by your word, the past is settled up to epoch %d", self._number)

    def _verify(self, history: History) -> None:
        if self._sink is None:
            newest = self._place.checkpoint.newest_decided()
            if history.owner is None or newest <= history.newest or self._number != newest:
                raise ConfigurationError(
                    f"Spark has decided epochs up to {newest} and the ledger knows those up to {history.newest}: "
                    f"there is nothing to accept for epoch {self._number}",
                    hint=f"name epoch {newest}" if newest > history.newest else "add --sink NAME to accept a target",
                )
            return
        last = history.applied.get(self._sink)
        if last is None or last.epoch != self._number:
            known = ", ".join(f"'{name}' (epoch {one.epoch})" for name, one in history.applied.items()) or "none"
            raise ConfigurationError(
                f"epoch {self._number} is not the newest done epoch with rows in sink '{self._sink}'",
                hint=f"the ledger has: {known}",
            )
