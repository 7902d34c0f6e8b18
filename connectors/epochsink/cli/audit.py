"""Compare the receipts in a ledger with what the targets hold. Reads only: safe beside a running query."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from epochsink.cli.console import told_of
from epochsink.errors import ConfigurationError, WentBack
from epochsink.identity import pipeline_name
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Compared, Identity, Receipt, participants_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Comparison, Participant, Sink

_TURNS: Final = 3
"""How often a sink is compared while the query runs and there are differences."""


@dataclass(frozen=True, slots=True)
class SinkAudit:
    """One sink's comparison. ``marker`` says how marker and ledger disagree, ``error`` why the target does not answer.

    ``epochs`` are the done epochs that the ledger has receipts of and that had rows for this sink, oldest first.
    """

    sink: str
    epochs: Sequence[Comparison] = ()
    marker: str = ""
    error: str = ""

    @property
    def differs(self) -> bool:
        """Whether the target does not hold what the ledger says."""
        return bool(self.marker) or any(each.result is Compared.DIFFERS for each in self.epochs)

    def lines(self) -> Iterator[str]:
        """Yield the comparison for a person, epochs with one result and reason together."""
        name = f"sink '{self.sink}'"
        if self.error or self.marker:
            yield f"{name}: {self.error or self.marker}"
        for result in Compared:
            by_reason: dict[str, list[Comparison]] = {}
            for each in (each for each in self.epochs if each.result is result):
                by_reason.setdefault(each.reason, []).append(each)
            for reason, alike in by_reason.items():
                which = f"epoch {_ranges([one.epoch for one in alike])}, {sum(one.rows for one in alike)} row(s)"
                yield f"{name}, {which}: {result}" + (f": {reason}" if reason else "")
        if not (self.epochs or self.error or self.marker):
            yield f"{name}: no receipt of an epoch with rows to compare"


def audit(place: Place, sinks: Mapping[str, Sink]) -> list[SinkAudit]:
    """Compare each of the sinks that have joined the ledger.

    Raises `ConfigurationError` if the checkpoint has no ledger, or none of the sinks has joined it.
    """
    ledger = Ledger(place.files, "")
    owner = ledger.read().owner
    joined = {name: sink for name, sink in sinks.items() if owner is not None and name in owner.origins}
    if owner is None or not joined:
        raise ConfigurationError(
            f"{place.location} has no receipts of these sinks: none of them has joined its ledger",
            hint="give the checkpoint of the query whose sinks --sinks names",
        )
    found = []
    for participant in participants_of(joined):
        with closing(participant):
            for name in participant.members:
                label = pipeline_name(place.location)
                participant.open(Identity(place.query_id, name, owner.generation, owner.origins[name], label))
            found += [_audited(ledger, participant, name) for name in participant.members]
    return found


def _audited(ledger: Ledger, participant: Participant, name: str) -> SinkAudit:
    found, history = SinkAudit(name), ledger.read()
    for _ in range(_TURNS):
        try:
            found = _compared(history, participant, name)
        except Exception as failure:
            told = told_of(failure)
            if told is None:
                raise
            return SinkAudit(name, error=f"{told['message']}; {told['hint']}")
        # the ledger after the target: if it has changed, the query has written meanwhile
        before, history = history, ledger.read()
        if not found.differs or _state(before, name) == _state(history, name):
            return found
    return _in_doubt(found)


def _state(history: History, name: str) -> object:
    return history.applied.get(name), history.pending_of(name)


def _in_doubt(found: SinkAudit) -> SinkAudit:
    """Return a comparison during which the query has written, without its differences."""
    why = "the query wrote meanwhile; audit again when it stands still"
    epochs = [
        replace(each, result=Compared.NOT_COMPARED, reason=why) if each.result is Compared.DIFFERS else each
        for each in found.epochs
    ]
    return SinkAudit(found.sink, epochs, error=why if found.marker else "")


def _compared(history: History, participant: Participant, name: str) -> SinkAudit:
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
        return SinkAudit(name, [*ruled, *participant.audit(name, done, history.pending_of(name), left)])
    except WentBack as disagreement:
        why = "nothing follows from rows while marker and ledger disagree"
        return SinkAudit(name, [*ruled, *(each.not_compared(why) for each in left)], marker=disagreement.message)


def _had_rows(history: History, epoch: int, name: str) -> bool:
    told = history.receipts[epoch].sinks.get(name)
    return told is not None and told.rows > 0


def _receipt(history: History, epoch: int, name: str) -> Receipt:
    told = history.receipts[epoch].sinks[name]
    last = history.applied.get(name)
    known = history.epochs[epoch].parts_of(name) if epoch in history.epochs else ()
    if not known and last is not None and last.epoch == epoch:
        known = last.parts
    return Receipt(epoch, told.rows, told.deleted, told.set_aside, known)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, runs as ``first-last``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
