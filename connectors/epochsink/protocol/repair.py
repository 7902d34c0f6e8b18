"""Apply retained epochs again to a target that was set back: from its marker on, in order, each with its marker."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from epochsink.errors import ConfigurationError, OutcomeUnknown, SpoolMissing, naming
from epochsink.failpoints import reach
from epochsink.protocol.commit_engine import CommitEngine, Indices, Policy
from epochsink.protocol.ledger_entries import Prepared, Replay
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.retained import RetainedEpoch, Retention
from epochsink.protocol.run_state import RunState
from epochsink.protocol.sweep import end_orphans, recorded_parts
from epochsink.sink import Ballots, Committable, Epoch, LastDone, Losses, Participant, Recorded

_log = logging.getLogger("epochsink")


@dataclass(frozen=True, slots=True)
class Lack:
    """What a participant's target lacks of one retained epoch."""

    retained: RetainedEpoch
    parts: Indices

    @property
    def at(self) -> Epoch:
        """The epoch and its attempt."""
        return self.retained.prepared.at

    @property
    def size(self) -> str:
        """How much it is, in words."""
        shares = {name: self.retained.prepared.shares[name] for name in self.parts}
        rows = sum(share.counted.rows for share in shares.values())
        lacks, of = sum(map(len, self.parts.values())), sum(len(share.parts) for share in shares.values())
        return f"{rows} row(s)" if lacks == of else f"{lacks} of {of} parts of {rows} row(s)"


def lacking(participant: Participant, history: LedgerHistory, retention: Retention) -> list[Lack]:
    """Return what a target lacks of done epochs, oldest first.

    From each sink's newest done epoch back, along the epochs in which it had rows, to the first one that the target
    holds. Nothing if the sinks are of a kind that is not repaired. Raises `ConfigurationError` if a lacking epoch is
    not retained: then nothing may be applied.
    """
    losses = participant.operator().losses()
    if losses is None:
        return []
    epochs: dict[Epoch, RetainedEpoch] = {}
    parts: dict[Epoch, dict[str, Sequence[int]]] = {}
    for name in participant.members:
        newest = history.applied.get(name)
        # without parts, an operator has accepted the target as it is
        if newest is None or not newest.parts:
            continue
        with naming(name):
            for retained, missing in _back(participant, losses, name, newest, retention):
                at, own = retained.prepared.at, retained.prepared.parts_of(name)
                epochs[at] = epochs.get(at, retained).with_parts({name: own})
                parts.setdefault(at, {})[name] = [index for index, part in enumerate(own) if part in missing]
    return [Lack(epochs[at], parts[at]) for at in sorted(epochs, key=lambda at: at.number)]


def _back(
    participant: Participant, losses: Losses, name: str, last: LastDone, retention: Retention
) -> Iterator[tuple[RetainedEpoch, Sequence[Committable]]]:
    newest, held = last.epoch, -1
    while True:
        retained = retention.read(Epoch(last.epoch, last.attempt))
        # parts that an earlier repair has prepared again: of the newest epoch they are in the ledger first
        if retained is not None and last.epoch == newest:
            retained = retained.with_parts({name: last.parts})
        known = last if retained is None else retained.prepared.share_done(name)
        missing = losses.lacking(name, known)
        if missing:
            if held >= 0:
                raise _out_of_order(last.epoch, held)
            if retained is None:
                raise _not_retained(last.epoch, newest, parts=(len(missing), len(known.parts)))
            yield retained, missing
        else:
            held = max(held, last.epoch)
            if retained is None or losses.holds_earlier(name):
                return
        earlier = retained.after.get(name)
        if earlier is None:
            return
        if not earlier.parts:
            if missing:
                _require_accepted(participant, name, earlier, newest)
            return
        last = earlier


def _require_accepted(participant: Participant, name: str, earlier: LastDone, newest: int) -> None:
    """Refuse a target that is older than what an operator has accepted: no record says what it must hold."""
    held = participant.marks(name, earlier, None).newest
    if held is None or held < earlier.epoch:
        raise _not_retained(earlier.epoch, newest)


def verify_rows(run: RunState, lacks: Sequence[Lack]) -> None:
    """Raise `ConfigurationError` unless all lacking rows are as they were written: before anything is applied."""
    for lack in lacks:
        for name, ballot in run.ballots(lack.retained.prepared, lack.parts).items():
            with naming(name):
                try:
                    ballot.rows.verify()
                except SpoolMissing as gone:
                    raise _not_retained(lack.at.number, lacks[-1].at.number, gone.message) from gone


def end_leftovers(participant: Participant, history: LedgerHistory, lacks: Sequence[Lack]) -> list[str]:
    """Abort what no recorded epoch names; what is left of lacking parts is committed later."""
    return end_orphans(participant, _named(participant, history, lacks))


def _named(participant: Participant, history: LedgerHistory, lacks: Sequence[Lack]) -> Recorded:
    """Return the recorded parts, those that are lacking among the ones that are not done."""
    keep, done = recorded_parts(participant, history)
    lost = [(lack.retained.prepared.parts_of(name), at) for lack in lacks for name, at in lack.parts.items()]
    again = [parts[index] for parts, indices in lost for index in indices]
    return [*keep, *again], [part for part in done if part not in again]


@dataclass(frozen=True)
class Again(Policy):
    """An operator has a done epoch applied again, as far as it is lacking: one of ``lacks``."""

    lack: Lack
    lacks: Sequence[Lack]
    again = True

    def recorded(self) -> Prepared:
        """Return the record of the retained epoch."""
        return self._retained().prepared

    def ballots(self, prepared: Prepared, sinks: Iterable[str], only: Indices | None = None) -> Ballots:
        """Return them as they were before the epoch, as far as that can be compared."""
        ballots = super().ballots(prepared, sinks, only)
        return {name: replace(ballot, after=self._before(name)) for name, ballot in ballots.items()}

    def _before(self, sink: str) -> LastDone:
        # without parts: the markers were just compared, and the target's indices may be other ones since the restore
        earlier = self.lack.retained.after.get(sink)
        return LastDone(-1 if earlier is None else earlier.epoch, "", ())

    def compare(self, sink: str) -> None:
        """Do nothing: what the target lacks was just found out."""

    def unknown(self, sink: str, evidence: str) -> OutcomeUnknown:
        """Return the error of an epoch that may be applied again, or not."""
        return _unknown(self.number, sink, evidence)

    def record(self, replay: Replay) -> None:
        """Record it in the ledger and with the rows."""
        # this very append finds out whether the ledger is still ours; the record has no such condition
        self.run.ledger.append(replay)
        self.run.retention.rewrite(self._retained().with_parts(dict.fromkeys(replay.sinks, replay.parts)))

    def named(self) -> Recorded:
        """Return the recorded parts; what is lacking is not done."""
        return _named(self.participant, self.run.ledger.verify(), self.lacks)

    def _retained(self) -> RetainedEpoch:
        return self.run.retention.read(self.lack.at) or self.lack.retained


def apply_again(run: RunState, participant: Participant, lacks: Sequence[Lack]) -> None:
    """Apply what a target lacks, oldest first. May be repeated after any interruption, from a new look at the target.

    The caller has taken the ledger: another driver's take ends this with `Fenced`.
    """
    for lack in lacks:
        reach("repair.epoch.before")
        run.ledger.verify()
        # an earlier repair may have died when the ledger had a replay, and the record beside the rows did not
        run.retention.rewrite(lack.retained)
        policy = Again(run, participant, lack.at.number, lack, lacks)
        engine = CommitEngine(policy)
        engine.commit(lack.parts)
        engine.await_visible(lack.parts, lack.parts)
        # now, not at the end: the staged rows of all lacking epochs may fill the disk
        participant.finish(lack.at, policy.ballots(policy.recorded(), lack.parts, lack.parts))
        reach("repair.epoch.after")
        _log.info("epoch %d is applied again: %s", lack.at.number, lack.size)


def _unknown(epoch: int, name: str, evidence: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"epoch {epoch} was applied again to sink '{name}', and whether the target committed it is unknown: {evidence}",
        hint="type the command again: what the target's marker shows is not applied again",
        epoch=epoch,
        sink=name,
    )


def _out_of_order(epoch: int, held: int) -> ConfigurationError:
    return ConfigurationError(
        f"the target lacks rows of epoch {epoch} and holds those of epoch {held}: rows in the middle are missing, not "
        "the newest ones. Applied again, they would come after newer rows, so nothing is applied",
        hint=f"load the input of epoch {epoch} (offsets/ in the checkpoint) with a query of its own",
    )


def _not_retained(
    epoch: int, newest: int, why: str = "not retained, or no longer", parts: tuple[int, int] = (0, 0)
) -> ConfigurationError:
    lacks, of = parts
    if lacks < of:
        return ConfigurationError(
            f"the target lacks {lacks} of {of} parts of epoch {epoch}, whose rows are not available ({why}): nothing "
            "is applied",
            hint=f"find out which rows of epoch {epoch} are there, load the missing ones with a query of its own, "
            f"then type: epochsink accept CHECKPOINT {newest} --sink NAME",
        )
    return ConfigurationError(
        f"the target lacks the epochs from {epoch} or an earlier one to {newest}, and the rows of epoch {epoch} are "
        f"not available ({why}): nothing is applied, as a later epoch must not precede it",
        hint="load the input of these epochs (offsets/ in the checkpoint) with a query of its own, then type: "
        f"epochsink accept CHECKPOINT {newest} --sink NAME; retain= must be longer than the oldest state to which the "
        "target can be set back",
    )
