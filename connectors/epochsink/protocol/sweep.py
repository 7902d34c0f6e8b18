"""Abort what no recorded epoch names: in the targets, and in the spool.

Failed attempts, losing tasks, and drivers that died between their vote and their record leave things prepared, which
hold locks or hold readers back. Only the owner of the ledger may end them.
"""

from __future__ import annotations

import logging
from typing import Final

from epochsink.errors import EpochsinkError, PrepareFailed
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.run_state import RunState
from epochsink.sink import Committable, Epoch, Participant, Recorded, RemnantState, orphans

_log = logging.getLogger("epochsink")

SPOOL_SWEPT_AFTER: Final = 32
"""Epochs without a failure after which the spool is searched for what late tasks have left."""


class Sweep:
    """The sweeps of a run, from either of its threads. Each raises `Fenced`, and what the participants raise.

    What a target that was set back holds prepared is evidence, and may be all that is left of the rows. So `tidy` and
    `all` compare a target with the ledger before they end anything there, and raise `WentBack`.
    """

    def __init__(self, run: RunState, check: AppliedCheck) -> None:
        self._run = run
        self._check = check
        self._until_spool = 0

    def tidy(self) -> None:
        """Abort what losing tasks have left since the last sweep; does nothing unless the stream is idle.

        For the commit thread, while nothing is pending: an open transaction of a task that lost late holds readers back
        until it ends, and without input no `settle` would end it. An attempt that begins meanwhile waits. A target that
        cannot be reached now is not a failure: the next sweep finds what is left.
        """
        try:
            with self._run.queue.alone_if_idle() as idle:
                if idle:
                    self._end_unrecorded()
        except (OSError, PrepareFailed) as failure:
            # families translate what their clients raise: a server that restarts, too many connections
            if isinstance(failure, PrepareFailed) and not failure.may_pass:
                raise
            _log.warning("leftovers of losing tasks stay for the next sweep: %s", failure)

    def all(self) -> None:
        """Abort what the ledger, read now, does not name, after an attempt has failed."""
        with self._run.queue.alone():
            self._end_unrecorded()

    def targets(self) -> None:
        """Like `all`, if ledger and targets were compared just before; searches the spool only now and then.

        What a sweep ends is of this generation or an older one, so a driver that was superseded since, and sleeps
        between its look and any call to a target, ends nothing of its successor's: another look would sleep likewise.
        """
        with self._run.queue.alone():
            for participant in self._run.participants:
                self._end_in(participant)
            self._until_spool -= 1
            if self._until_spool <= 0:
                self._end_in_spool()

    def own(self, epoch: Epoch) -> None:
        """Abort what this driver has prepared and could not record, now that another has taken the ledger.

        Only the owner appends. So by now the ledger has every record of this generation and of those before, and a
        participant ends nothing of a later one.
        """
        # not verify(): that raises Fenced, and this is what a fenced driver does
        history = self._run.ledger.read()
        with self._run.queue.alone():
            for participant in self._run.participants:
                try:
                    if history.abandoned is not None:
                        # the command has fenced this driver too, and no other run follows: nothing else would end
                        # what was prepared since
                        participant.fence()
                    end_orphans(participant, recorded_parts(participant, history))
                except (EpochsinkError, OSError) as failure:
                    # one target that is down must not keep what the others hold
                    _log.warning(
                        "%s: what epoch %d has prepared is left: %s", _named(participant), epoch.number, failure
                    )
        self._run.spool.drop(self._run.query_id, epoch)

    def look_into_spool(self) -> None:
        """Let the next sweep search the spool: an attempt has failed, and could not be ended."""
        self._until_spool = 0

    def _end_unrecorded(self) -> None:
        self._run.ledger.verify()
        for participant in self._run.participants:
            # one by one: a target that is down must not keep what those before it hold
            # a target that holds nothing to end is not asked: that it is down is no reason to stop an idle query
            held = participant.remnants(recorded_parts(participant, self._run.ledger.known()))
            for name in participant.members if held else ():
                self._check.verify(name)
            self._end_in(participant)
        self._end_in_spool()

    def _end_in(self, participant: Participant) -> None:
        # as it is now: the other thread may have recorded a replay
        history = self._run.ledger.known()
        with self._run.if_ours(participant):
            ended = end_orphans(participant, recorded_parts(participant, history))
        self._run.progress.ended(len(ended))
        for line in ended:
            _log.info("%s: aborted what no recorded epoch names: %s", _named(participant), line)

    def _end_in_spool(self) -> None:
        # listed before the ledger is read: a newer driver's attempts cannot be among them, if it is still ours
        spooled = self._run.spool.attempts(self._run.query_id)
        kept = {prepared.at for prepared in self._run.ledger.verify().pending}
        self._run.retention.expire(kept)
        # a list: the commit thread adds to them meanwhile, and a set would be interrupted by what hashes its elements
        kept.update(list(self._run.retention.terms()))
        for epoch in spooled:
            if epoch not in kept:
                self._run.spool.drop(self._run.query_id, epoch)
        self._until_spool = SPOOL_SWEPT_AFTER


def end_orphans(participant: Participant, recorded: Recorded) -> list[str]:
    """Abort what a participant's sinks hold and no record names; return a line for each thing ended.

    Raises `WentBack` if a part of a done epoch is still prepared.
    """
    generation = max(identity.generation for identity in participant.identities.values())
    ended: list[str] = []
    for _ in range(2):
        remnants = orphans(participant.remnants(recorded), generation, recorded)
        ended += participant.end(remnants) if remnants else []
        # what was running may have prepared something after the list was read: look once more
        if all(each.state is not RemnantState.RUNNING for each in remnants):
            break
    return ended


def recorded_parts(participant: Participant, history: LedgerHistory) -> Recorded:
    """Return the parts of a participant's sinks that a history names: of epochs that are not done, and of done ones."""
    keep: list[Committable] = []
    done: list[Committable] = []
    for name in participant.members:
        keep += (part for prepared in history.pending for part in prepared.parts_of(name))
        done += history.done_parts(name)
    return keep, done


def _named(participant: Participant) -> str:
    return " and ".join(f"sink '{name}'" for name in participant.members)
