"""End what a checkpoint that will not run again holds in the targets, and close its ledger for good.

Only here is a recorded epoch ever aborted, and only one that Spark has not decided: its input is in the checkpoint's
``offsets/``, and whoever goes on reads it again from the source.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from epochsink.cli.recover import coordinator_of, open_for, refuse_unreachable
from epochsink.errors import ConfigurationError, WentBack
from epochsink.protocol.ledger import ABANDON, Ledger
from epochsink.protocol.ledger_entries import Abandoned, Resolved
from epochsink.sink import participants_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Prepared, Take
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Sink

_log = logging.getLogger("epochsink")


class Abandonment:
    """The end of one checkpoint; `plan` says what `carry_out` will do.

    ``sinks`` are the query's; ``gone`` names those whose targets no longer exist, so that nothing can be ended there.
    Raises `ConfigurationError` if a sink that has ever joined is in neither.
    """

    def __init__(self, place: Place, *, sinks: Mapping[str, Sink], gone: Collection[str]) -> None:
        self._place = place
        self._ledger = Ledger(place.files, uuid.uuid4().hex, even_abandoned=True, purpose=ABANDON)
        self._before = self._ledger.read()
        self._owner = self._owner_of(self._before)
        _refuse_missing(self._owner, sinks, gone)
        self._sinks = {name: sinks[name] for name in self._owner.origins if name not in gone}
        self._gone = sorted(gone)
        self._participants = participants_of(self._sinks)
        for prepared in self._decided():
            _refuse_gone(prepared, self._gone)

    def plan(self) -> list[str]:
        """Return what will be done, a line each."""
        lines = ["take the ledger: a driver that runs on this checkpoint now stops with Fenced"]
        decided = self._decided()
        lines += [f"commit epoch {prepared.epoch}, which Spark has decided" for prepared in decided]
        lines += [line for prepared in self._undecided() for line in self._described(prepared)]
        lines.append("close the ledger: no query ever starts on this checkpoint again")
        also = "; what a query on another copy of this checkpoint has prepared, too"
        return [*lines, *(f"abort all else of this query in sink '{name}'{also}" for name in self._sinks)]

    def carry_out(self) -> None:
        """Do it; each thing done is logged, a line each. May be repeated if it was interrupted.

        Raises `Fenced` if another driver takes the ledger meanwhile, and what the sinks raise.
        """
        try:
            refuse_unreachable(self._place, self._owner, self._participants)
            if self._before.abandoned is None:
                self._close()
            self._end()
        finally:
            for participant in self._participants:
                participant.close()
        _log.info("closed: %s", successor(self._ledger.read()))

    def _close(self) -> None:
        self._give_up_gone()
        coordinator = coordinator_of(self._place, self._ledger, self._participants)
        uncertain = ""
        try:
            coordinator.recover()
            # what a driver that still ran let Spark decide meanwhile: from the take on it can record nothing more
            coordinator.drain()
        except WentBack as disagreement:
            pending = self._ledger.verify().pending
            if any(self._place.checkpoint.is_decided(prepared.epoch) for prepared in pending):
                raise
            # the checkpoint is given up because of it, perhaps: nothing is left to commit, and what it holds must end
            uncertain = disagreement.message
            _log.info("closing it all the same, though %s", uncertain)
        ended = tuple(prepared.epoch for prepared in self._ledger.verify().pending)
        # first the entry, then the end: a query that started between the two would adopt what is about to go
        self._ledger.append(Abandoned(ended, uncertain))

    def _give_up_gone(self) -> None:
        """Close the shares of sinks whose targets are gone: recovering asks for the sink of every pending share."""
        shares = [(one.epoch, name) for one in self._undecided() for name in one.shares if name in self._gone]
        if shares:
            self._ledger.take(self._place.query_id, {}, -1)
        for epoch, name in shares:
            self._ledger.append(Resolved(epoch, name, "abandoned"))

    def _end(self) -> None:
        take = self._ledger.take(self._place.query_id, {}, -1)
        for participant in self._participants:
            open_for(self._place, participant, take)
            history = self._ledger.verify()
            done = [part for name in participant.members for part in history.done_parts(name)]
            for line in participant.abort_orphans([], done):
                _log.info("sink '%s': ended %s", ", ".join(participant.members), line)
        for epoch in self._place.spool.attempts(self._place.query_id):
            self._place.spool.drop(self._place.query_id, epoch)

    def _described(self, prepared: Prepared) -> list[str]:
        """Return what is about to end of an epoch, a line for each part."""
        since = f", since {prepared.stamp}" if prepared.stamp else ""
        lines = [f"END epoch {prepared.epoch}, recorded and not decided{since}: its rows never become visible"]
        lines += [
            f"  in sink '{name}': {participant.describe(part)}"
            for participant in self._participants
            for name in participant.members
            for part in prepared.parts_of(name)
        ]
        gone = [name for name in prepared.shares if name in self._gone]
        return [*lines, *(f"  in sink '{name}', whose target is gone: left as it is" for name in gone)]

    def _owner_of(self, history: History) -> Take:
        if history.owner is None:
            raise ConfigurationError(
                f"{self._place.location} has no ledger: nothing says what it holds",
                hint="'epochsink orphans' finds what is left in a server without a checkpoint",
            )
        return history.owner

    def _decided(self) -> list[Prepared]:
        return [one for one in self._open() if self._place.checkpoint.is_decided(one.epoch)]

    def _undecided(self) -> list[Prepared]:
        return [one for one in self._open() if not self._place.checkpoint.is_decided(one.epoch)]

    def _open(self) -> list[Prepared]:
        return self._before.pending if self._before.abandoned is None else []


def successor(history: History) -> str:
    """Return from where a query that takes over has to read."""
    if history.abandoned is not None and history.abandoned.uncertain:
        return f"look what the targets hold before a successor starts: {history.abandoned.uncertain}"
    first = min((prepared.epoch for prepared in history.pending), default=history.newest + 1)
    if first == 0:
        return "no epoch is in the targets; a successor reads the source from the beginning"
    return (
        f"the targets hold all epochs up to {first - 1}; a successor reads from where that one ended (the offsets in "
        f"offsets/{first - 1} of the checkpoint)"
    )


def _refuse_missing(owner: Take, sinks: Mapping[str, Sink], gone: Collection[str]) -> None:
    if unknown := sorted(set(gone) - owner.origins.keys()):
        raise ConfigurationError(
            f"--gone names '{unknown[0]}', which has never been part of this query",
            hint=f"its sinks are {_names(owner.origins)}",
        )
    if missing := sorted(owner.origins.keys() - sinks.keys() - set(gone)):
        raise ConfigurationError(
            f"what this checkpoint holds in sink '{missing[0]}' could not be ended: --sinks does not name it",
            hint=f"give --sinks with {_names(owner.origins)}; or --gone {missing[0]} if its target no longer exists",
        )


def _refuse_gone(prepared: Prepared, gone: Collection[str]) -> None:
    for name in sorted(prepared.shares.keys() & set(gone)):
        raise ConfigurationError(
            f"epoch {prepared.epoch} is decided and has rows for sink '{name}', whose target is gone",
            hint=f"keep these rows in a file first: epochsink resolve CHECKPOINT {prepared.epoch} --sink {name} "
            "--as discard",
        )


def _names(sinks: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(sinks))
