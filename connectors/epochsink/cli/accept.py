"""Accept what an operator confirms: what a target holds, or epochs that Spark decided without epochsink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.operation import Operation, log, names
from epochsink.cli.targets import look_in_targets
from epochsink.errors import Addresses, ConfigurationError, epochs
from epochsink.protocol.consistency import ledger_is_older, newest_has_other_input, other_input
from epochsink.protocol.ledger_entries import Resolved, Skipped
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.sink import Sink

NO_EPOCH: Final = -1
"""What "none" on the command line stands for: a target that holds nothing of the query."""


def accepted_epoch(text: str) -> int:
    """Return the epoch that a user names, -1 for "none". Raises `ValueError`."""
    if text == "none":
        return NO_EPOCH
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


class Acceptance(Operation):
    """An operator's confirmation that targets are right up to an epoch.

    ``sink`` names the target; None: the epochs that Spark decided without this package are confirmed, and the targets
    of ``sinks`` are asked whether they know them. Raises `ConfigurationError` unless ``epoch`` is the newest one in
    question, and `WentBack` if the ledger is an older copy: a target knows a newer epoch, or the checkpoint has other
    input for the ledger's newest one.
    """

    verb = "accept"

    def __init__(self, place: QueryCheckpoint, epoch: int, sink: str | None, sinks: Mapping[str, Sink]) -> None:
        super().__init__(place)
        self._number = epoch
        self._sink = sink
        self._sinks = sinks
        self._verify(self.before)

    def _steps(self) -> list[str]:
        if self._sink is None:
            which = epochs(self.before.newest + 1, self._number)
            record = (
                f"record that {which}, decided without ExactlyOnce, had no rows or that their rows were loaded by hand"
            )
            unasked = "; no target is asked whether it knows these epochs: add --sinks for that"
            return [record + ("" if self._sinks else unasked)]
        if self._number == NO_EPOCH:
            return [f"record that sink '{self._sink}' holds no epoch of this query"]
        holds = f"record that sink '{self._sink}' holds what it should up to epoch {self._number}"
        return [f"{holds}: rows that are missing there stay missing"]

    def carry_out(self) -> None:
        """Do it. Raises `Fenced` if another driver takes the ledger meanwhile."""
        self.take()
        self._verify(self.ledger.verify())
        entry = Skipped(self._number) if self._sink is None else Resolved(self._number, self._sink, "accepted")
        self.ledger.append(entry)
        log.info("recorded: accepted epochs up to %s", _text(self._number))

    def _verify(self, history: LedgerHistory) -> None:
        if self._sink is not None:
            self._verify_target(history, self._sink)
            return
        newest = self.place.checkpoint.newest_decided()
        if newest <= history.newest or self._number != newest:
            raise ConfigurationError(
                f"Spark has decided epochs up to {newest} and the ledger knows those up to {history.newest}: "
                f"there is nothing to accept for epoch {self._number}",
                hint=f"name epoch {newest}" if newest > history.newest else "add --sink NAME to accept a target",
            )
        if any(target.disagreements for target in look_in_targets(self.place, self._sinks, Addresses())):
            raise ledger_is_older(newest, history.newest)
        # an older copy of the checkpoint was restored: other epochs are missing than those that are accepted
        if newest_has_other_input(history, self.place.checkpoint):
            raise other_input(history.newest)

    def _verify_target(self, history: LedgerHistory, sink: str) -> None:
        """Refuse all but the sink's newest done epoch, and the decided one that is recorded after it."""
        if sink not in self.owner.origins:
            raise ConfigurationError(
                f"sink '{sink}' has never been part of this query", hint=f"its sinks are: {names(self.owner.origins)}"
            )
        done = history.applied.get(sink)
        pending = history.pending_of(sink)
        newest = done.epoch if done else NO_EPOCH
        if self._number == newest:
            return
        if pending is None or self._number != pending.epoch:
            known = [newest, *([pending.epoch] if pending else [])]
            raise ConfigurationError(
                f"epoch {self._number} is neither the newest done epoch with rows in sink '{sink}' nor the one "
                "recorded after it",
                hint=f"for this sink, name {' or '.join(map(_text, known))}",
            )
        if not self.decided(pending.epoch):
            raise ConfigurationError(
                f"epoch {self._number} is recorded and not decided, so no sink has committed it yet",
                hint=f"name {_text(newest)}: it is committed once Spark has decided it",
            )


def _text(epoch: int) -> str:
    return "none" if epoch == NO_EPOCH else str(epoch)
