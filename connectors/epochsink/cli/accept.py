"""Accept what an operator confirms: what a target holds, or epochs that Spark decided without epochsink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from epochsink.cli.operation import Operation, log, names
from epochsink.errors import ConfigurationError
from epochsink.protocol.consistency import newest_has_other_input, other_input
from epochsink.protocol.ledger_entries import Resolved, Skipped

if TYPE_CHECKING:
    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_history import History

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
    """One statement about the past; ``sink`` is None for epochs decided without this package.

    Raises `ConfigurationError` unless the statement is about the newest epoch in question, and `WentBack` if the ledger
    has its newest epoch with other input than the checkpoint.
    """

    verb = "accept"

    def __init__(self, place: Place, epoch: int, sink: str | None) -> None:
        super().__init__(place)
        self._number = epoch
        self._sink = sink
        self._verify(self.before)

    def _steps(self) -> list[str]:
        if self._sink is None:
            which = f"the epochs {self.before.newest + 1} to {self._number}, which Spark decided without ExactlyOnce"
            return [f"record that {which}, had no rows, or that their rows are in every sink by now"]
        if self._number == NO_EPOCH:
            return [f"record that sink '{self._sink}' holds no epoch of this query"]
        holds = f"record that sink '{self._sink}' holds what it should up to epoch {self._number}"
        return [f"{holds}: whatever of it the target lacks, it will never get"]

    def carry_out(self) -> None:
        """Do it. Raises `Fenced` if another driver takes the ledger meanwhile."""
        self.take()
        self._verify(self.ledger.verify())
        entry = Skipped(self._number) if self._sink is None else Resolved(self._number, self._sink, "accepted")
        self.ledger.append(entry)
        log.info("recorded: accepted epochs up to %d", self._number)

    def _verify(self, history: History) -> None:
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
        # an older copy of the checkpoint was restored: more is lacking than the epochs that are accepted
        if newest_has_other_input(history, self.place.checkpoint):
            raise other_input(history.newest)

    def _verify_target(self, history: History, sink: str) -> None:
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
                f"epoch {self._number} is recorded and not decided, so nothing has ever committed it",
                hint=f"name {_text(newest)}: it is committed once Spark has decided it",
            )


def _text(epoch: int) -> str:
    return "none" if epoch == NO_EPOCH else str(epoch)
