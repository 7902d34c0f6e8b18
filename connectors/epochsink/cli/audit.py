"""Compare the receipts in a ledger with what the targets hold. Reads only: safe beside a running query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.console import explanation_of
from epochsink.cli.targets import standing
from epochsink.errors import Addresses, ConfigurationError, WentBack
from epochsink.protocol.consistency import compare, mention_repair
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.retained import Retention
from epochsink.sink import Compared, Comparison, Participant, Receipt, Sink, participants_of

if TYPE_CHECKING:
    _ToDo = Callable[[Participant, str, WentBack], str]
    """What an operator has to do about a disagreement of a sink."""

_TURNS: Final = 3
"""How often a sink is compared while the query runs and there are differences."""


@dataclass(frozen=True, slots=True)
class SinkAudit:
    """One sink's comparison. ``marker`` says how marker and ledger disagree, ``hint`` what to do about that.

    ``error`` says why the target does not answer. ``epochs`` are the done epochs that the ledger has receipts of and
    that had rows for this sink, oldest first.
    """

    sink: str
    epochs: Sequence[Comparison] = ()
    marker: str = ""
    error: str = ""
    hint: str = ""

    @property
    def differs(self) -> bool:
        """Whether the target does not hold what the ledger says."""
        return bool(self.marker) or any(each.result is Compared.DIFFERS for each in self.epochs)

    def lines(self) -> Iterator[str]:
        """Yield the comparison for a person, epochs with one result and reason together."""
        name = f"sink '{self.sink}'"
        if self.error or self.marker:
            yield f"{name}: {self.error or self.marker}"
        if self.hint:
            yield f"  {self.hint}"
        for result in Compared:
            by_reason: dict[str, list[Comparison]] = {}
            for each in (each for each in self.epochs if each.result is result):
                by_reason.setdefault(each.reason, []).append(each)
            for reason, alike in by_reason.items():
                which = f"epoch {_ranges([one.epoch for one in alike])}, {sum(one.rows for one in alike)} row(s)"
                yield f"{name}, {which}: {result}" + (f": {reason}" if reason else "")
        if not (self.epochs or self.error or self.marker):
            yield f"{name}: no receipt of an epoch with rows to compare"


def audit(place: QueryCheckpoint, sinks: Mapping[str, Sink], addresses: Addresses) -> list[SinkAudit]:
    """Compare each of the sinks that have joined the ledger. ``addresses`` completes the commands of hints.

    Raises `ConfigurationError` if the checkpoint has no ledger, or none of the sinks has joined it.
    """
    ledger = Ledger(place.files, "")
    owner = ledger.read().owner
    joined = {name: sink for name, sink in sinks.items() if owner is not None and name in owner.origins}
    if owner is None or not joined:
        raise ConfigurationError(
            f"{place.location} has no receipts of these sinks: its ledger knows none of them",
            hint="give the checkpoint of the query whose sinks --sinks names",
        )

    def to_do(participant: Participant, name: str, disagreement: WentBack) -> str:
        mention_repair(disagreement, participant, Retention(place.spool, place.query_id))
        disagreement.name_sink(name)
        disagreement.address(addresses)
        return disagreement.hint

    audits = []
    for participant in participants_of(joined):
        with closing(participant):
            place.open(participant, owner)
            audits += [_audited(ledger, participant, name, to_do) for name in participant.members]
    return audits


def _audited(ledger: Ledger, participant: Participant, name: str, to_do: _ToDo) -> SinkAudit:
    audited, history = SinkAudit(name), ledger.read()
    for _ in range(_TURNS):
        try:
            audited = _compared(history, participant, name, to_do)
        except Exception as failure:
            explanation = explanation_of(failure)
            if explanation is None:
                raise
            return SinkAudit(name, error=f"{explanation['message']}; {explanation['hint']}")
        # the ledger after the target: if it has changed, the query has written meanwhile
        before, history = history, ledger.read()
        if not audited.differs or standing(before, name) == standing(history, name):
            return audited
    return _in_doubt(audited)


def _in_doubt(audited: SinkAudit) -> SinkAudit:
    """Return a comparison during which the query has written, without its differences."""
    why = "the query wrote meanwhile; audit again while it writes nothing"
    epochs = [
        replace(each, result=Compared.NOT_COMPARED, reason=why) if each.result is Compared.DIFFERS else each
        for each in audited.epochs
    ]
    return SinkAudit(audited.sink, epochs, error=why if audited.marker else "")


def _compared(history: LedgerHistory, participant: Participant, name: str, to_do: _ToDo) -> SinkAudit:
    done = history.applied.get(name)
    receipts = [_receipt(history, epoch, name) for epoch in sorted(history.receipts) if _had_rows(history, epoch, name)]
    accepted = done.epoch if done is not None and not done.parts else -1
    ruled = [
        each.not_compared("an operator has accepted the target as it was then")
        for each in receipts
        if each.epoch <= accepted
    ]
    left = [each for each in receipts if each.epoch > accepted]
    try:
        compare(participant, history, name)
        newest = -1 if done is None or history.pending_of(name) else done.epoch
        return SinkAudit(name, [*ruled, *participant.operator().audit(name, left, newest)])
    except WentBack as disagreement:
        why = "rows are not compared while marker and ledger disagree"
        epochs = [*ruled, *(each.not_compared(why) for each in left)]
        marker = disagreement.message
        return SinkAudit(name, epochs, marker, hint=to_do(participant, name, disagreement))


def _had_rows(history: LedgerHistory, epoch: int, name: str) -> bool:
    progress = history.receipts[epoch].sinks.get(name)
    return progress is not None and progress.rows > 0


def _receipt(history: LedgerHistory, epoch: int, name: str) -> Receipt:
    progress = history.receipts[epoch].sinks[name]
    last = history.applied.get(name)
    known = history.epochs[epoch].parts_of(name) if epoch in history.epochs else ()
    if not known and last is not None and last.epoch == epoch:
        known = last.parts
    return Receipt(epoch, progress.rows, progress.deleted, progress.set_aside, known)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, runs as ``first-last``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
