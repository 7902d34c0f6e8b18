"""Apply retained epochs again to a target that was set back: from its marker on, in order, each with its marker."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError, OutcomeUnknown, SpoolMissing, naming
from epochsink.failpoints import reach
from epochsink.protocol.ledger_entries import Replay
from epochsink.protocol.sweep import recorded_parts
from epochsink.sink import Ballot, Epoch, LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from epochsink.protocol.ledger import Ledger
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.retained import RetainedEpoch, Retention
    from epochsink.sink import Committable, Participant, Rows

_log = logging.getLogger("epochsink")


@dataclass(frozen=True, slots=True)
class Lack:
    """What a participant's target lacks of one retained epoch: parts by sink."""

    retained: RetainedEpoch
    parts: Mapping[str, Sequence[Committable]]

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


def lacking(participant: Participant, history: History, retention: Retention) -> list[Lack]:
    """Return what a target lacks of done epochs, oldest first.

    From each sink's newest done epoch back, along the epochs in which it had rows, to the first one that the target
    holds. Raises `ConfigurationError` if a lacking epoch is not retained: then nothing may be applied.
    """
    found: dict[Epoch, RetainedEpoch] = {}
    parts: dict[Epoch, dict[str, Sequence[Committable]]] = {}
    for name in participant.members:
        newest = history.applied.get(name)
        # without parts, an operator has accepted the target as it is
        if newest is None or not newest.parts:
            continue
        with naming(name):
            for retained, missing in _back(participant, name, newest, retention):
                found[retained.prepared.at] = retained
                parts.setdefault(retained.prepared.at, {})[name] = missing
    return [Lack(found[at], parts[at]) for at in sorted(found, key=lambda at: at.number)]


def _back(
    participant: Participant, name: str, last: LastDone, retention: Retention
) -> Iterator[tuple[RetainedEpoch, Sequence[Committable]]]:
    newest, held = last.epoch, -1
    while True:
        retained = retention.read(Epoch(last.epoch, last.attempt))
        # parts that an earlier repair has prepared again: of the newest epoch they are in the ledger first
        if retained is not None and last.epoch == newest:
            retained = retained.with_parts({name: last.parts})
        known = last if retained is None else retained.prepared.share_done(name)
        missing = participant.lacking(name, known)
        if missing:
            if held >= 0:
                raise _out_of_order(last.epoch, held)
            if retained is None:
                raise _not_retained(last.epoch, newest, parts=(len(missing), len(known.parts)))
            yield retained, missing
        else:
            held = max(held, last.epoch)
            if retained is None or participant.holds_earlier(name):
                return
        earlier = retained.after.get(name)
        if earlier is None:
            return
        if not earlier.parts:
            if missing:
                _require_accepted(participant, name, earlier.epoch, newest)
            return
        last = earlier


def _require_accepted(participant: Participant, name: str, epoch: int, newest: int) -> None:
    """Refuse a target that is older than what an operator has accepted: no record says what it must hold."""
    held = participant.newest(name)
    if held is None or held < epoch:
        raise _not_retained(epoch, newest)


def verify_rows(lacks: Sequence[Lack], rows_of: Callable[[Lack, str], Rows]) -> None:
    """Raise `ConfigurationError` unless all lacking rows are as they were written: before anything is applied."""
    for lack in lacks:
        for name in lack.parts:
            with naming(name):
                try:
                    rows_of(lack, name).verify()
                except SpoolMissing as gone:
                    raise _not_retained(lack.at.number, lacks[-1].at.number, gone.message) from gone


def end_leftovers(participant: Participant, history: History, lacks: Sequence[Lack]) -> list[str]:
    """Abort what no recorded epoch names; what is left of lacking parts is committed later."""
    keep, done = recorded_parts(participant, history)
    again = [part for lack in lacks for parts in lack.parts.values() for part in parts]
    return participant.abort_orphans([*keep, *again], [part for part in done if part not in again])


def apply_again(
    participant: Participant,
    lacks: Sequence[Lack],
    ledger: Ledger,
    retention: Retention,
    rows_of: Callable[[Lack, str], Rows],
) -> None:
    """Apply what a target lacks, oldest first. May be repeated after any interruption, from a new look at the target.

    The caller has taken the ledger: another driver's take ends this with `Fenced`.
    """
    for lack in lacks:
        ballots = {name: Ballot(parts, rows_of(lack, name), _before(lack, name)) for name, parts in lack.parts.items()}
        reach("repair.epoch.before")
        ledger.verify()
        record = _Record(lack.retained, ledger, retention)
        for name, verdicts in participant.reapply(lack.at, ballots, record.replace).items():
            for verdict in verdicts:
                if verdict.outcome is not Outcome.COMMITTED:
                    raise _unknown(lack.at.number, name, verdict.evidence)
        reach("repair.epoch.after")
        _log.info("epoch %d is applied again: %s", lack.at.number, lack.size)


class _Record:
    """The record of a retained epoch, of which parts are prepared again under other names."""

    def __init__(self, retained: RetainedEpoch, ledger: Ledger, retention: Retention) -> None:
        self._retained = retained
        self._ledger = ledger
        self._retention = retention

    def replace(self, part: Committable, again: Committable) -> None:
        """Record a part before it is committed. Raises `Fenced` if another driver has the ledger."""
        self._retained = self._retained.replaced(part, again)
        prepared = self._retained.prepared
        sinks = tuple(name for name in prepared.shares if again in prepared.parts_of(name))
        # this very append finds out whether the ledger is still ours; the record has no such condition
        self._ledger.append(Replay(prepared.epoch, sinks, prepared.parts_of(sinks[0])))
        self._retention.rewrite(self._retained)
        reach("repair.part.recorded")


def _before(lack: Lack, name: str) -> LastDone:
    # without parts: the markers were just compared, and the target's indices may be other ones since the restore
    earlier = lack.retained.after.get(name)
    return LastDone(-1 if earlier is None else earlier.epoch, "", ())


def _unknown(epoch: int, name: str, evidence: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"epoch {epoch} was applied again to sink '{name}', and whether the target committed it is unknown: {evidence}",
        hint="type the command again: what the target's marker shows is not applied again",
        epoch=epoch,
        sink=name,
    )


def _out_of_order(epoch: int, held: int) -> ConfigurationError:
    return ConfigurationError(
        f"the target lacks rows of epoch {epoch} and holds those of epoch {held}: not its end was taken back, but "
        "something in between, and what is applied again would be behind newer rows; nothing is applied",
        hint=f"load the input of epoch {epoch} (offsets/ in the checkpoint) with a query of its own",
    )


def _not_retained(
    epoch: int, newest: int, why: str = "not retained, or no longer", parts: tuple[int, int] = (0, 0)
) -> ConfigurationError:
    lacks, of = parts
    if lacks < of:
        return ConfigurationError(
            f"the target lacks {lacks} of {of} parts of epoch {epoch}, whose rows cannot be had ({why}): nothing is "
            "applied",
            hint=f"look which rows of epoch {epoch} are there, load those that are missing with a query of its own, "
            f"then say so: epochsink accept CHECKPOINT {newest} --sink NAME",
        )
    return ConfigurationError(
        f"the target lacks the epochs from {epoch} or an earlier one to {newest}, and the rows of epoch {epoch} cannot "
        f"be had ({why}): nothing is applied, as a later epoch must not precede it",
        hint="load the input of these epochs (offsets/ in the checkpoint) with a query of its own, then say so: "
        f"epochsink accept CHECKPOINT {newest} --sink NAME; retain= must be longer than the oldest state to which the "
        "target can be set back",
    )
