"""End what a checkpoint that will not run again holds in the targets, and close its ledger for good.

Only here is a recorded epoch ever aborted, and only one that Spark has not decided: its input is in the checkpoint's
``offsets/``, and the next query reads it again from the source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.operation import Operation, log, names
from epochsink.errors import ConfigurationError, WentBack, sink_option
from epochsink.protocol.ledger_entries import Abandoned, Prepared, Resolved
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.sweep import end_orphans
from epochsink.sink import Participant, Sink, participants_of


class Abandonment(Operation):
    """The end of one checkpoint.

    ``sinks`` are the query's; ``gone`` names those whose targets no longer exist, so that nothing can be ended there.
    Raises `ConfigurationError` if a sink that has ever joined is in neither.
    """

    verb = "abandon"
    even_abandoned = True

    def __init__(self, place: QueryCheckpoint, *, sinks: Mapping[str, Sink], gone: Collection[str]) -> None:
        super().__init__(place)
        self._refuse_missing(sinks, gone)
        self._sinks = {name: sinks[name] for name in self.owner.origins if name not in gone}
        self._gone = sorted(gone)
        self._pending = self.before.pending if self.before.abandoned is None else []
        self._refuse_gone()

    def _steps(self) -> list[str]:
        lines = [f"commit epoch {prepared.epoch}, which Spark has decided" for prepared in self._which(decided=True)]
        # not opened: to describe a part takes no request
        participant_of = {name: one for one in participants_of(self._sinks) for name in one.members}
        lines += [line for prepared in self._which(decided=False) for line in self._described(prepared, participant_of)]
        lines.append("close the ledger: no query ever starts on this checkpoint again")
        also = ", also what a query on another copy of this checkpoint has prepared"
        return [*lines, *(f"abort everything else of this query in sink '{name}'{also}" for name in self._sinks)]

    def carry_out(self) -> None:
        """Do it; nothing is taken if a target is down. To be repeated if it was interrupted."""
        with self.reached(self._sinks) as participants:
            if self.before.abandoned is None:
                self._close(participants)
            self._end(participants)
        log.info("closed: %s", successor(self.ledger.read()))

    def _close(self, participants: Sequence[Participant]) -> None:
        self._give_up_gone()
        coordinator = self.coordinator(participants)
        uncertain = ""
        try:
            coordinator.recover()
            # what a driver that still ran let Spark decide meanwhile: from the take on it can record nothing more
            coordinator.drain()
        except WentBack as disagreement:
            if any(self.decided(prepared.epoch) for prepared in self.ledger.verify().pending):
                raise
            # the checkpoint is given up because of it, perhaps: nothing is left to commit, and what it holds must end
            uncertain = disagreement.message
            log.info("the ledger is closed although %s", uncertain)
        ended = tuple(prepared.epoch for prepared in self.ledger.verify().pending)
        # first the entry, then the end: a query that started between the two would adopt what is about to go
        self.ledger.append(Abandoned(ended, uncertain))

    def _give_up_gone(self) -> None:
        """Close the shares of sinks whose targets are gone: recovering asks for the sink of every pending share."""
        shares = [(one.epoch, name) for one in self._which(decided=False) for name in one.shares if name in self._gone]
        if shares:
            self.take()
        for epoch, name in shares:
            self.ledger.append(Resolved(epoch, name, "abandoned"))

    def _end(self, participants: Sequence[Participant]) -> None:
        take = self.take()
        for participant in participants:
            self.open(participant, take)
            history = self.ledger.verify()
            done = [part for name in participant.members for part in history.done_parts(name)]
            for line in end_orphans(participant, ([], done)):
                log.info("sink '%s': ended %s", ", ".join(participant.members), line)
        # no query follows into which they could be applied again
        self.place.spool.forget_retained(self.place.query_id)
        for epoch in self.place.spool.attempts(self.place.query_id):
            self.place.spool.drop(self.place.query_id, epoch)

    def _which(self, *, decided: bool) -> list[Prepared]:
        # asked anew: a driver that still runs may let Spark decide an epoch after the plan was shown
        return [prepared for prepared in self._pending if self.decided(prepared.epoch) is decided]

    def _described(self, prepared: Prepared, participant_of: Mapping[str, Participant]) -> list[str]:
        """Return what is about to end of an epoch, a line for each part."""
        since = f", since {prepared.stamp}" if prepared.stamp else ""
        lines = [f"END epoch {prepared.epoch}, recorded and not decided{since}: its rows never become visible"]
        for name, share in prepared.shares.items():
            if name in self._gone:
                lines.append(f"  in sink '{name}', whose target is gone: left as it is")
            else:
                lines += [
                    f"  in sink '{name}': {participant_of[name].operator().describe(part)}" for part in share.parts
                ]
        return lines

    def _refuse_missing(self, sinks: Mapping[str, Sink], gone: Collection[str]) -> None:
        origins = self.owner.origins
        if unknown := sorted(set(gone) - origins.keys()):
            raise ConfigurationError(
                f"--gone names '{unknown[0]}', which has never been part of this query",
                hint=f"its sinks are {names(sorted(origins))}",
            )
        if missing := sorted(origins.keys() - sinks.keys() - set(gone)):
            raise ConfigurationError(
                f"--sinks does not name sink '{missing[0]}', so what this checkpoint holds there cannot be ended",
                hint=f"give --sinks with {names(sorted(origins))}; or --gone {missing[0]} if its target no longer "
                "exists",
            )

    def _refuse_gone(self) -> None:
        for prepared in self._which(decided=True):
            for name in sorted(prepared.shares.keys() & set(self._gone)):
                raise ConfigurationError(
                    f"epoch {prepared.epoch} is decided and has rows for sink '{name}', whose target is gone",
                    hint="keep these rows in a file first: epochsink resolve CHECKPOINT "
                    f"{prepared.epoch} {sink_option(name)} --as discard",
                )


def successor(history: LedgerHistory) -> str:
    """Return from where a query that takes over has to read."""
    if history.abandoned is not None and history.abandoned.uncertain:
        return f"check what the targets hold before a successor starts: {history.abandoned.uncertain}"
    first = min((prepared.epoch for prepared in history.pending), default=history.newest + 1)
    if first == 0:
        return "no epoch is in the targets; a successor reads the source from the beginning"
    return (
        f"the targets hold all epochs up to {first - 1}; a successor starts at the offsets in offsets/{first - 1} of "
        "the checkpoint"
    )
