"""Compare checkpoint, ledger and targets, and say how they disagree.

A target must hold what the ledger calls done, and nothing that the ledger does not know. That is checked at every
start, in every epoch before anything is swept, and around each commit: a target may be set back (a backup restored, a
failover to a standby that lacked the last commits) while the query runs. An error is raised only after the ledger, read
again, has shown that it is still this driver's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from epochsink.errors import ConfigurationError, OutcomeUnknown, PrepareFailed, WentBack, epochs, sink_option
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger_entries import Prepared
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.retained import Retention
from epochsink.protocol.run_state import RunState
from epochsink.sink import Identity, Participant, Remnant, RemnantState, comparing


class AppliedCheck:
    """The comparisons of one run. Each may raise `WentBack`, `Fenced`, and what the participants raise."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def refuse_known_targets(self) -> None:
        """Refuse to begin a ledger if a target knows the query: ``join_running=True`` was left in the code."""
        for participant in self._run.participants:
            with comparing():
                for name in participant.members:
                    participant.open(Identity(self._run.query_id, name))
                applied = [participant.marks(name, None, None).newest for name in participant.members]
            left = _rows_left(participant)
            if left or any(epoch is not None for epoch in applied):
                newest = max((epoch for epoch in applied if epoch is not None), default=None)
                raise ledger_is_lost(", ".join(participant.members), newest, left)

    def refuse_undocumented(self, history: LedgerHistory) -> None:
        """Raise `WentBack` if Spark has decided an epoch that the ledger does not know."""
        decided = self._run.checkpoint.newest_decided()
        if decided > history.newest:
            self.refuse_other_newest(history)
            # before `conclude` verifies the ledger: so these attempts are not another driver's
            spooled = [attempt.number for attempt in self._run.spool.attempts(self._run.query_id)]
            raise self._run.conclude(self._why_undocumented(history.newest, decided, spooled))

    def refuse_gap(self, history: LedgerHistory, running: int) -> None:
        """Raise `WentBack` if the ledger does not know the epoch before the one that Spark runs."""
        if history.newest < running - 1:
            self.refuse_undocumented(history)
            raise self._run.conclude(passed_over(history.newest + 1, running - 1))

    def refuse_other_past(self, history: LedgerHistory, before: int) -> None:
        """Raise `WentBack` if Spark decided the last epoch without this run, and the ledger has it with other input.

        An older copy of the checkpoint was restored, and then the user's function did not call us: to the ledger, the
        epoch looks like the one that it knows. Offsets add up, so earlier ones need no look.
        """
        known = history.epochs.get(before)
        if known is not None and before != self._run.current.compared and before > history.skipped:
            self.refuse_other_input(known)

    def refuse_other_newest(self, history: LedgerHistory) -> None:
        """Raise `WentBack` likewise for the newest epoch that the ledger knows, unless Spark has purged its input.

        Before epochs are called decided without us: an operator would accept these, and not know of the new input.
        """
        if history.newest != self._run.current.compared and newest_has_other_input(history, self._run.checkpoint):
            raise self._run.conclude(other_input(history.newest))

    def refuse_other_input(self, recorded: Prepared) -> None:
        """Raise `WentBack` if the checkpoint has other input for an epoch than the ledger."""
        if recorded.offsets != self._run.checkpoint.offsets_digest(recorded.epoch):
            raise self._run.conclude(other_input(recorded.epoch))

    def _why_undocumented(self, newest: int, decided: int, spooled: list[int]) -> WentBack:
        """Return the reason: what targets and spool hold shows whether the ledger is an older copy."""
        try:
            self.verify_all()
        except WentBack:
            return ledger_is_older(decided, newest)
        attempted = self._run.current.compared
        if attempted <= newest:
            # an earlier run's, then: what is prepared of decided epochs may be all that is left of them
            traces = [f"the spool has rows of epoch {epoch}" for epoch in spooled if newest < epoch <= decided]
            for participant in self._run.participants:
                traces += [f"sink '{', '.join(participant.members)}' has {each}" for each in _rows_left(participant)]
            if traces:
                return ledger_lost_prepared(decided, newest, traces[0])
        return decided_without_us(newest + 1, decided, attempted=attempted)

    def verify_all(self) -> None:
        """Compare every sink's target with the ledger."""
        for name in self._run.participant_of:
            self.verify(name)

    def verify_before_commit(self, number: int, name: str) -> None:
        """Compare one sink's target with the ledger; if it cannot be reached, the epoch's outcome is unknown."""
        try:
            self.verify(name)
        except PrepareFailed as failure:
            if not failure.may_pass:
                # the target has answered: an operator has to grant a right or change a setting before the next start
                raise refused_after_decision(number, name, failure) from failure
            raise unknown_outcome(number, name, failure.message) from failure

    def verify(self, name: str, *, but: int = -1) -> None:
        """Compare one sink's target with the ledger. The caller has just verified that the ledger is its own.

        Not if the target's newest epoch is ``but``: who has applied that one is the question then.
        """
        history = self._run.ledger.known()
        while True:
            done, pending = history.applied.get(name), history.pending_of(name)
            try:
                marks = self._run.participant_of[name].marks(name, done, pending)
                if but < 0 or marks.newest != but:
                    marks.verify(done, pending)
            except WentBack as disagreement:
                # the other thread, or a newer driver, may have recorded a replay or finished the epoch meanwhile
                history = self._run.ledger.verify()
                if (done, pending) == (history.applied.get(name), history.pending_of(name)):
                    mention_repair(disagreement, self._run.participant_of[name], self._run.retention)
                    disagreement.name_sink(name)
                    raise
            else:
                return


def _rows_left(participant: Participant) -> list[Remnant]:
    """Return what may hold rows in the targets of a participant's sinks."""
    return [each for each in participant.remnants(((), ())) if each.state is not RemnantState.RUNNING]


def compare(participant: Participant, history: LedgerHistory, name: str) -> None:
    """Compare one sink's target with a ledger that may be another driver's; change nothing. Raises `WentBack`."""
    done, pending = history.applied.get(name), history.pending_of(name)
    with comparing():
        participant.marks(name, done, pending).verify(done, pending)


def mention_repair(disagreement: WentBack, participant: Participant, retention: Retention) -> None:
    """Let a disagreement name the command that mends it, if the target is the older copy and rows are retained."""
    if "lacks_from" not in disagreement.facts or participant.operator().losses() is None:
        return
    # the disagreement is what the user must hear of, also if the spool cannot be read
    with suppress(OSError):
        if retention.terms():
            disagreement.command = "epochsink repair CHECKPOINT --sinks MODULE:ATTRIBUTE"
            disagreement.hint = (
                "the rows of done epochs are retained. To apply those again that the target lacks, type: "
                f"{disagreement.command}; if the rows are to come from elsewhere, {disagreement.hint}"
            )


def newest_has_other_input(history: LedgerHistory, checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has other input for the newest recorded epoch; False if Spark has purged it."""
    known = history.epochs.get(history.newest)
    if known is None or known.epoch <= history.skipped or not checkpoint.has_offsets(known.epoch):
        return False
    return known.offsets != checkpoint.offsets_digest(known.epoch)


def no_ledger(decided: int) -> WentBack:
    """Say that Spark has decided epochs, and there is no ledger at all."""
    return WentBack(
        f"the checkpoint has decided epochs up to {decided} and holds no record of them by epochsink: either this "
        "pipeline ran without epochsink, or the folder epochsink/ is lost",
        hint="if epochsink is being added to a running pipeline, start once with join_running=True: epochs from "
        "here on are exactly-once. Otherwise restore epochsink/ from the copy that the checkpoint came from",
    )


_ONE_COPY: Final = "restore the checkpoint folder and its epochsink/ folder from the same copy"


def ledger_is_older(decided: int, newest: int) -> WentBack:
    """Say that Spark has decided epochs that the ledger does not know, and a target does."""
    return WentBack(
        f"the checkpoint has decided epochs up to {decided} and the ledger knows only those up to {newest}: the "
        "ledger is the older copy",
        hint=f"{_ONE_COPY}. If there is none, check which epochs each target holds, and start with a new checkpoint "
        "folder; first end what this one has left: epochsink abandon CHECKPOINT --sinks MODULE:ATTRIBUTE",
    )


def ledger_lost_prepared(decided: int, newest: int, trace: str) -> WentBack:
    """Say that Spark has decided epochs that the ledger does not know, and of which something is prepared."""
    return WentBack(
        f"the checkpoint has decided epochs up to {decided} and the ledger knows only those up to {newest}, but "
        f"{trace}: the ledger is the older copy, or the function given to foreachBatch caught an error and returned",
        hint=f"{_ONE_COPY}: what is prepared is then committed. If there is none, load the input of these epochs "
        "(offsets/ in the checkpoint) with a separate query, then accept them, which ends what is prepared: "
        f"epochsink accept CHECKPOINT {decided}",
    )


def decided_without_us(first: int, last: int, *, attempted: int) -> WentBack:
    """Say that Spark has decided epochs that ExactlyOnce never got, or whose error the user's function caught.

    ``attempted`` is the newest epoch that this process has begun to write.
    """
    which = f"{epochs(first, last)} {'was' if first == last else 'were'}"
    why = (
        f"the function given to foreachBatch caught the error with which epoch {attempted} failed, and returned"
        if first <= attempted <= last
        else "the function given to foreachBatch did not call it, or caught its error and returned"
    )
    return WentBack(
        f"{which} decided without ExactlyOnce: {why}. Unless they were empty, their rows are in no sink",
        hint="do not catch the object's errors, and call it for every epoch, also for empty ones (they cost nothing). "
        "If the epochs had no rows, or once you have loaded them by hand, accept them: epochsink accept CHECKPOINT "
        f"{last}",
    )


def ledger_is_lost(sink: str, applied: int | None, left: Sequence[Remnant]) -> WentBack:
    """Say that join_running=True would begin a ledger although a target knows this query."""
    holds = [] if applied is None else [f"holds epoch {applied} of it"]
    holds += [f"still has {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else "")] if left else []
    return WentBack(
        f"join_running=True is meant for a query that epochsink has never written, and sink '{sink}' "
        f"{' and '.join(holds)}: the folder epochsink/ of this checkpoint is lost, and with it what was prepared",
        hint="take join_running=True out of the code, and restore epochsink/ from the copy that the checkpoint came "
        "from; if there is none, start with a new checkpoint folder",
    )


def sink_is_gone(epoch: int, sink: str) -> ConfigurationError:
    """Say that a recorded epoch has rows in a sink that the query no longer has."""
    return ConfigurationError(
        f"epoch {epoch} is recorded and not yet committed in sink '{sink}', which this query no longer has",
        hint=f"start once more with the sink '{sink}', let it commit, then remove it; or, if its target is gone for "
        f"good, keep these rows in a file: epochsink resolve CHECKPOINT {epoch} {sink_option(sink)} --as discard",
    )


def other_input(epoch: int) -> WentBack:
    """Say that Spark runs a recorded epoch with other offsets."""
    return WentBack(
        f"epoch {epoch} is recorded with other offsets than the checkpoint now holds: its rows were prepared from "
        "different input",
        hint="an older copy of the checkpoint was restored: put the newer one back; or start with a new "
        "checkpoint folder and remove the rows of the epochs that would be written again",
    )


def undecided_before(epoch: int, running: int) -> WentBack:
    """Say that Spark runs an epoch although an earlier one is recorded and not decided."""
    return WentBack(
        f"Spark runs epoch {running}, and epoch {epoch} before it is recorded but not decided",
        hint="commits/ was changed by hand or restored from an older copy: put the newer copy back",
    )


def passed_over(first: int, last: int) -> WentBack:
    """Say that Spark runs an epoch although those before it are neither decided nor recorded."""
    return WentBack(
        f"Spark runs epoch {last + 1}, and {epochs(first, last)} before it {'is' if first == last else 'are'} in "
        "offsets/, and neither in commits/ nor in the ledger: these are older copies, and Spark runs only the newest "
        "epoch that it has planned again. The rows of the others would be in no sink",
        hint=f"{_ONE_COPY}. If there is none, delete the files offsets/{first + 1} and later: Spark then runs epoch "
        f"{first} first",
    )


def unknown_past(epoch: int, newest: int) -> WentBack:
    """Say that Spark runs an epoch older than what the ledger retains."""
    return WentBack(
        f"Spark runs epoch {epoch}, and the ledger has only later ones, up to {newest}",
        hint="the checkpoint is an older copy than anything that the ledger keeps: restore the newer copy",
    )


def overtaken(epoch: int) -> PrepareFailed:
    """Say that an epoch was written before an earlier one that had to be prepared again."""
    return PrepareFailed(
        f"epoch {epoch} was being written when the epoch before it, which its target had lost, was prepared again: in "
        "a log, its rows would be ordered before those of the earlier epoch",
        hint="nothing is lost: the epoch is written again now or, if the query ends first, at the next start",
    )


def unknown_outcome(epoch: int, sink: str, evidence: str) -> OutcomeUnknown:
    """Say that it is unknown whether a target has committed a decided epoch."""
    return OutcomeUnknown(
        f"epoch {epoch} is decided, and whether sink '{sink}' committed it is unknown: {evidence}",
        hint="nothing is lost: the epoch stays in the ledger, and the next start asks again. If the target still "
        "does not tell, check whether it has these rows. If it has: "
        f"epochsink resolve CHECKPOINT {epoch} {sink_option(sink)} --as committed --sinks MODULE:ATTRIBUTE; if it has "
        "not, the same with --as replay",
        epoch=epoch,
        sink=sink,
    )


def refused_after_decision(epoch: int, sink: str, refusal: PrepareFailed) -> PrepareFailed:
    """Say that a target refuses to be asked what it holds, for a reason that an operator has to remove."""
    hint = f"{refusal.hint}; the epoch stays recorded, and the next start commits it".removeprefix("; ")
    return type(refusal)(
        f"epoch {epoch} is decided, and sink '{sink}' refuses to be asked what it holds: {refusal.message}",
        hint=hint,
        **refusal.facts,
    )
