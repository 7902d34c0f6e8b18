"""Take an operator's word for what a target holds, or for epochs that Spark decided without this package."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Final

from epochsink.errors import ConfigurationError
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Resolved, Skipped

if TYPE_CHECKING:
    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_history import History

_log = logging.getLogger("epochsink")

NO_EPOCH: Final = -1
"""What "none" on the command line stands for: a target that holds nothing of the query."""


def accepted_epoch(text: str) -> int:
    """Return the epoch that a user names, -1 for "none". Raises `ValueError`."""
    return NO_EPOCH if text == "none" else _natural(text)


class Acceptance:
    """One statement about the past; ``sink`` is None for epochs decided without this package.

    Raises `ConfigurationError` unless the statement is about the newest epoch in question.
    """

    def __init__(self, place: Place, epoch: int, sink: str | None) -> None:
        self._place = place
        self._number = epoch
        self._sink = sink
        self._first = 0
        self._ledger = Ledger(place.files, uuid.uuid4().hex, purpose="epochsink accept")
        self._verify(self._ledger.read())

    def plan(self) -> list[str]:
        """Return what will be done, a line each."""
        lines = ["take the ledger: a driver that runs on this checkpoint now stops with Fenced"]
        if self._sink is None:
            which = f"the epochs {self._first} to {self._number}, which Spark decided without ExactlyOnce"
            return [*lines, f"record that {which}, had no rows, or that their rows are in every sink by now"]
        if self._number == NO_EPOCH:
            return [*lines, f"record that sink '{self._sink}' holds no epoch of this query"]
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
        _log.info("recorded: accepted epochs up to %d", self._number)

    def _verify(self, history: History) -> None:
        if self._sink is None:
            newest = self._place.checkpoint.newest_decided()
            self._first = history.newest + 1
            if history.owner is None or newest <= history.newest or self._number != newest:
                raise ConfigurationError(
                    f"Spark has decided epochs up to {newest} and the ledger knows those up to {history.newest}: "
                    f"there is nothing to accept for epoch {self._number}",
                    hint=f"name epoch {newest}" if newest > history.newest else "add --sink NAME to accept a target",
                )
            return
        known = _acceptable(history, self._sink)
        if self._number not in known:
            names = " or ".join("none" if one == NO_EPOCH else str(one) for one in known)
            raise ConfigurationError(
                f"epoch {self._number} is neither the newest done epoch with rows in sink '{self._sink}' nor the one "
                "recorded after it",
                hint=f"for this sink, name {names}",
            )
        if self._number == known[-1] and len(known) > 1 and not self._place.checkpoint.is_decided(self._number):
            raise ConfigurationError(
                f"epoch {self._number} is recorded and not decided, so nothing has ever committed it",
                hint=f"name {'none' if known[0] == NO_EPOCH else known[0]}: it is committed once Spark has decided it",
            )


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


def _acceptable(history: History, sink: str) -> list[int]:
    """Return what can be said of a sink: up to its newest done epoch, or up to the one recorded after that."""
    if history.owner is None or sink not in history.owner.origins:
        names = ", ".join(f"'{name}'" for name in history.owner.origins) if history.owner else "none"
        raise ConfigurationError(f"sink '{sink}' has never been part of this query", hint=f"its sinks are: {names}")
    done, pending = history.applied.get(sink), history.pending_of(sink)
    return [done.epoch if done else NO_EPOCH, *([pending.epoch] if pending else [])]
