"""Read the state of a query from ledger, checkpoint and spool. Changes nothing: safe beside a running driver."""

from __future__ import annotations

import enum
import re
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from epochsink.cli.abandon import successor
from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.driver_process import has_ended
from epochsink.cli.orphans import lines_of
from epochsink.cli.targets import Disagreement, InTarget, look_in_targets
from epochsink.errors import Addresses, LedgerCorrupt, WentBack, epochs
from epochsink.protocol import failed_start
from epochsink.protocol.consistency import decided_without_us, ledger_is_older, ledger_lost_prepared
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_damage import Damage, survey
from epochsink.protocol.ledger_entries import Prepared, Stamp, Stopped
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.progress import EpochProgress
from epochsink.protocol.retained import NOTHING_KEPT, Kept, Retention
from epochsink.sink import Sink

if TYPE_CHECKING:
    from rich.console import Console


NO_SINKS: Final[Mapping[str, Sink]] = MappingProxyType({})


class EpochState(enum.StrEnum):
    """How far an attempt at an epoch has come; UNRECORDED is one that is only spooled: under way, or dead."""

    UNRECORDED = "unrecorded"
    RECORDED = "recorded"
    DECIDED = "decided"
    DONE = "done"
    ENDED = "ended"


_WORDS: Final = {
    EpochState.UNRECORDED: "not recorded",
    EpochState.RECORDED: "[yellow]recorded, not decided[/yellow]",
    EpochState.DECIDED: "[red]decided, not committed[/red]",
    EpochState.DONE: "[green]done[/green]",
    EpochState.ENDED: "ended, never visible",
}


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """One attempt at an epoch. ``parts`` counts what each sink commits on its own; a sink without rows is absent.

    Of older done epochs the ledger keeps no parts: ``parts`` is empty then, as for an epoch without any rows.
    ``rows`` are the rows of each sink, as far as they are known, ``age_seconds`` is the time since the record, None if
    it is not recorded or not known. ``receipt`` is that of one of the newest done epochs.
    """

    epoch: int
    attempt: str
    state: EpochState
    parts: Mapping[str, int]
    spooled_bytes: int
    rows: Mapping[str, int] = field(default_factory=dict)
    age_seconds: float | None = None
    receipt: EpochProgress | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A query's state, as ``--json`` prints it. Numbers of epochs are -1 for none; ``advice`` says what to do.

    ``headline`` says whether data is late and since when; ``late_seconds`` is the time since the record of the oldest
    epoch that is decided and not visible, 0 if there is none; ``open_seconds`` the time since Spark began the oldest
    epoch that is not visible. ``stopped`` is the last failure of a query, ``failed_start`` that of a start since the
    last one that succeeded, ``targets`` what the targets say themselves, if they were asked. ``retained`` is what
    `epochsink repair` can apply again.
    ``needs_person``: no query runs on without an operator or a scheduler, or the next start will stop.
    """

    headline: str
    late_seconds: float
    open_seconds: float
    checkpoint: str
    query_id: str
    generation: int | None
    driver: str | None
    taken: Stamp | None
    abandoned: Stamp | None
    sinks: Sequence[str]
    newest_recorded: int
    newest_decided: int
    newest_begun: int
    epochs: Sequence[EpochStatus]
    spool: str
    stopped: Stopped | None
    damage: Sequence[str]
    advice: Sequence[str]
    targets: Sequence[InTarget] = ()
    retained: Kept = NOTHING_KEPT
    needs_person: bool = False
    failed_start: Stopped | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the headline and the advice follow from."""

    place: QueryCheckpoint
    history: LedgerHistory
    epochs: Sequence[EpochStatus]
    newest_decided: int
    targets: Sequence[InTarget]
    failed_start: Stopped | None
    typed: Sequence[str]
    """The options that opened the place: the commands of the advice repeat them."""

    @property
    def missing(self) -> str:
        """The epochs that Spark has decided and the ledger does not know, "" if there are none."""
        newest = self.history.newest
        return epochs(newest + 1, self.newest_decided) if self.newest_decided > newest else ""

    @property
    def disagreements(self) -> list[Disagreement]:
        """How targets and ledger disagree."""
        return [each for target in self.targets for each in target.disagreements]

    def of(self, state: EpochState) -> list[int]:
        """Return the epochs in a state."""
        return [each.epoch for each in self.epochs if each.state is state]


def read_status(place: QueryCheckpoint, sinks: Mapping[str, Sink] = NO_SINKS, typed: Sequence[str] = ()) -> Status:
    """Read a checkpoint's status, as far as its ledger can be read, and ask the targets of ``sinks``.

    ``typed`` are the options that were needed to open the place: the commands in the advice repeat them.
    """
    # before the ledger: what is decided by now is recorded by the time that the ledger is read
    newest_decided = place.checkpoint.newest_decided()
    # likewise: an epoch recorded meanwhile is then no leftover
    spooled = place.spool.attempts(place.query_id)
    retention = Retention(place.spool, place.query_id)
    history, damage = _history(place)
    # after the spool: what became done meanwhile is among the retained ones by now
    recorded = {prepared.at for prepared in history.epochs.values()} | retention.terms().keys()
    known = [_epoch(place, history, prepared) for prepared in history.epochs.values()]
    known += [
        EpochStatus(at.number, at.attempt, EpochState.UNRECORDED, {}, place.spool.size(place.query_id, at))
        for at in spooled
        if at not in recorded
    ]
    owner = history.owner
    targets = [] if damage else look_in_targets(place, sinks, _addresses(place, typed))
    start = failed_start.newest(place.files)
    facts = _Facts(place, history, sorted(known, key=lambda each: each.epoch), newest_decided, targets, start, typed)
    late = max((each.age_seconds or 0.0 for each in known if each.state is EpochState.DECIDED), default=0.0)
    late = max(late, 0.0 if damage else _age_of_missing(facts))
    under_way, open_seconds = (None, 0.0) if damage else _oldest_open(facts)
    return Status(
        headline=_with_open(_headline(facts, late, damage), under_way, 0.0 if late else open_seconds),
        late_seconds=late,
        open_seconds=open_seconds,
        checkpoint=place.location,
        query_id=place.query_id,
        generation=owner.generation if owner else None,
        driver=owner.driver if owner else None,
        taken=owner.stamp if owner else None,
        abandoned=history.abandoned.stamp if history.abandoned else None,
        sinks=sorted(owner.origins) if owner else [],
        newest_recorded=history.newest,
        newest_decided=newest_decided,
        newest_begun=place.checkpoint.newest_begun(),
        epochs=facts.epochs,
        spool=place.spool.root,
        stopped=history.stopped,
        damage=damage,
        advice=[*damage, _DAMAGED] if damage else _advice(facts),
        targets=targets,
        retained=retention.kept(),
        needs_person=not damage and history.abandoned is None and _stops(facts),
        failed_start=start,
    )


def _holds_up(facts: _Facts) -> bool:
    """Return whether a start has failed, and no query is known to have run since."""
    failed = facts.failed_start
    done = max((receipt.done_at for receipt in facts.history.receipts.values()), default=0.0)
    return failed is not None and failed.stamp is not None and done < failed.stamp.at


def _addresses(place: QueryCheckpoint, typed: Sequence[str]) -> Addresses:
    given = dict(zip(typed[::2], typed[1::2], strict=True))
    return Addresses(place.location, given.get("--sinks", ""), given.get("--spool", ""))


def _stops(facts: _Facts) -> bool:
    """Return whether no query runs on by itself: it has stopped or a start has failed, or the next start will."""
    return bool(
        facts.history.failing or _holds_up(facts) or (facts.history.owner and facts.missing) or facts.disagreements
    )


def _age_of_missing(facts: _Facts) -> float:
    """Return for how long readers have waited for decided epochs that the ledger does not know."""
    if facts.history.owner is None or facts.history.abandoned is not None or not facts.missing:
        return 0.0
    since = facts.place.checkpoint.begun_at(facts.history.newest + 1)
    return 0.0 if since is None else max(0.0, round(time.time() - since, 3))


def show(status: Status, epochs: int, console: Console) -> None:
    """Print a status with its newest ``epochs`` and every one that is pending."""
    ledger = f"generation {status.generation}, driver {status.driver}" if status.driver else "none"
    facts = [
        ("checkpoint", status.checkpoint),
        ("query id", status.query_id),
        ("ledger", ledger),
        ("taken", _taken(status.taken)),
        ("recorded", _up_to(status.newest_recorded)),
        ("decided", _up_to(status.newest_decided)),
        ("begun", _up_to(status.newest_begun)),
        ("spool", f"{decimal(sum(epoch.spooled_bytes for epoch in status.epochs))} in {status.spool}"),
    ]
    if (kept := status.retained).epochs:
        reach = f"back to epoch {kept.oldest}, done {_span(max(0.0, time.time() - kept.since))} ago"
        facts.append(("retained", f"{decimal(kept.size)}, {kept.epochs} epoch(s), {reach}"))
    if status.stopped is not None:
        facts.append(("last failure", f"{status.stopped.failure} ({status.stopped.stamp})"))
    if status.failed_start is not None:
        facts.append(("failed start", f"{status.failed_start.failure} ({status.failed_start.stamp})"))
    # a terminal's width breaks no line: paths and commands are pasted
    console.print(status.headline, style="bold", markup=False, highlight=False, soft_wrap=True)
    for name, value in facts:
        console.print(Text.assemble((f"{name:<14}", "bold"), value), highlight=False, soft_wrap=True)
    # the state is the word that counts: in a narrow terminal the other columns fold
    table = Table(
        Column("epoch", justify="right", no_wrap=True),
        Column("state", no_wrap=True),
        *(Column(sink, overflow="fold") for sink in status.sinks),
        Column("spool", justify="right"),
        "times",
    )
    for index, epoch in enumerate(reversed(status.epochs)):
        if index >= epochs and epoch.state in (EpochState.DONE, EpochState.ENDED):
            continue
        # of an older done epoch the ledger keeps no parts, so none at all says nothing about rows
        absent = "" if not epoch.parts and epoch.state in (EpochState.DONE, EpochState.UNRECORDED) else "no rows"
        held = [_held(epoch, sink) or absent for sink in status.sinks]
        table.add_row(str(epoch.epoch), _WORDS[epoch.state], *held, decimal(epoch.spooled_bytes), _took(epoch))
    if table.row_count:
        console.print(table)
    for line in _in_targets(status):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in status.advice:
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)


def _in_targets(status: Status) -> Iterator[str]:
    for target in status.targets:
        sinks = ", ".join(target.sinks)
        if target.error:
            yield f"{sinks}: the target does not answer: {target.error}"
        elif not target.pending:
            yield f"{sinks}: nothing is pending in the target"
        # each names its sink
        yield from (each.message for each in target.disagreements)
        for remnant in target.pending:
            name, *facts = lines_of(remnant)
            yield f"{sinks}: {name}"
            yield from facts


def _held(epoch: EpochStatus, sink: str) -> str:
    if sink in epoch.rows:
        return f"{epoch.rows[sink]:,} row(s)"
    return f"{epoch.parts[sink]} part(s)" if sink in epoch.parts else ""


def _took(epoch: EpochStatus) -> str:
    """Return how long the steps of an epoch took, or how old it is."""
    done = epoch.receipt
    if done is None:
        return "" if epoch.age_seconds is None else f"recorded {_span(epoch.age_seconds)} ago"
    steps = {"write": done.write_seconds, "vote": done.record_seconds, "commit": done.commit_seconds}
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in steps.items())


def _span(seconds: float) -> str:
    """Return a time span as a person says it."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


SOON_SECONDS: Final = 5.0
"""Until then, a decided epoch that is not visible is no cause for concern."""
_SLOW_SECONDS: Final = 60.0
"""From here on, an epoch under way is what the headline begins with."""


def _headline(facts: _Facts, late: float, damage: Sequence[str]) -> str:
    """Return in one line whether data is late, and since when."""
    history = facts.history
    if damage:
        return "ATTENTION: the ledger is damaged, and no query starts on it; see below"
    if history.owner is None:
        return f"{_start(facts)}no ledger yet"
    if history.abandoned is not None:
        return "abandoned: no query runs here any more"
    return _contradiction(facts) or _stop(facts, late) or _start(facts) + _lateness(facts, late)


def _contradiction(facts: _Facts) -> str:
    """Return in one line how ledger, checkpoint and targets disagree, "" if they are not known to."""
    if facts.missing:
        return (
            f"ATTENTION: Spark has decided {facts.missing}, and the ledger ends at {facts.history.newest}: their rows "
            "may be in no target; see below"
        )
    if facts.disagreements:
        return "ATTENTION: a target and the ledger disagree, and the next start stops with WentBack; see below"
    return ""


def _stop(facts: _Facts, late: float) -> str:
    """Return in one line that the query has stopped, "" if it is not known to have."""
    stopped = facts.history.failing
    if stopped is None:
        return ""
    since = "" if stopped.stamp is None else f" {_span(max(0.0, time.time() - stopped.stamp.at))} ago"
    headline = f"STOPPED{since} with {stopped.kind}, and no query has started since; see below"
    # what it would say of the targets is what the failure denies
    return headline if stopped.kind == WentBack.__name__ else f"{headline}; {_lateness(facts, late)}"


def _start(facts: _Facts) -> str:
    """Return that a start has failed, to be followed by what else there is; "" if none has."""
    failed = facts.failed_start
    if failed is None or failed.stamp is None or not _holds_up(facts):
        return ""
    return f"a START FAILED {_span(max(0.0, time.time() - failed.stamp.at))} ago with {failed.kind}; see below; "


def _lateness(facts: _Facts, late: float) -> str:
    history, decided = facts.history, _join(facts.of(EpochState.DECIDED))
    if decided:
        soon = f"epoch {decided} was decided just now: a running query commits it at this moment"
        since = f"LATE by {_span(late)}" if late else "LATE"
        is_late = f"{since}: epoch {decided} is decided and not visible in every sink; see below what to type"
        return soon if 0.0 < late < SOON_SECONDS else is_late
    newest = max(history.receipts, default=-1)
    if newest < 0:
        return "up to date: everything decided is visible"
    ago = _span(max(0.0, time.time() - history.receipts[newest].done_at))
    return f"up to date: everything decided is visible; epoch {newest} is the newest, {ago} ago"


def _oldest_open(facts: _Facts) -> tuple[int | None, float]:
    """Return the oldest epoch that Spark has begun and that is not visible, and for how long; (None, 0) if none is."""
    place, history = facts.place, facts.history
    if history.owner is None or history.abandoned is not None:
        return None, 0.0
    numbers = [prepared.epoch for prepared in history.pending]
    if (begun := place.checkpoint.newest_begun()) > max(history.newest, facts.newest_decided):
        numbers.append(begun)
    if not numbers:
        return None, 0.0
    since = place.checkpoint.begun_at(min(numbers))
    return min(numbers), 0.0 if since is None else max(0.0, round(time.time() - since, 3))


def _with_open(headline: str, epoch: int | None, seconds: float) -> str:
    """Return the headline with what it says of an epoch that takes long."""
    if seconds < SOON_SECONDS:
        return headline
    duration = f"epoch {epoch} has been under way for {_span(seconds)}"
    if seconds < _SLOW_SECONDS:
        return f"{headline}; {duration}"
    return f"SLOW: {duration}: a target does not answer, the query is down, or epochs take that long; {headline}"


_DAMAGED: Final = (
    "no query starts on this ledger: restore the whole checkpoint folder, with epochsink/, from one copy; "
    "or start with the newer epochsink that wrote the entry. The other entries are shown here"
)


def _advice(facts: _Facts) -> list[str]:
    """Return what the state means and what to do, a sentence each; a command has a line of its own."""
    history = facts.history
    if history.owner is None:
        lacks = "no ledger: epochsink has not run on this checkpoint, or the folder epochsink/ is lost"
        return [lacks, *_advice_on_start(facts)]
    if history.abandoned is not None:
        closed = f"abandoned ({history.abandoned.stamp}): the ledger is closed, no query starts here"
        return [f"{closed}; {successor(history)}"]
    advice = [*_advice_on_failure(facts), *_advice_on_start(facts)]
    if facts.missing:
        return [*advice, *_advice_on_missing(facts)]
    for each in facts.disagreements:
        advice += [f"a target and the ledger disagree: {each.message}", *_lines_of(each.hint)]
    decided = facts.of(EpochState.DECIDED)
    if decided:
        advice.append(
            f"epoch {_join(decided)} is decided and not yet committed everywhere: a running query does it now; "
            "otherwise start the query, or type:"
        )
        advice += _with_sinks(facts, "recover")
    if recorded := facts.of(EpochState.RECORDED):
        advice.append(
            f"epoch {_join(recorded)} is recorded and not decided: Spark runs it again at the next start, and the "
            "recorded attempt is kept"
        )
    if unrecorded := facts.of(EpochState.UNRECORDED):
        advice.append(
            f"an attempt at epoch {_join(sorted(set(unrecorded)))} is not recorded: it is under way, or the next start "
            "removes it"
        )
    if (begun := facts.place.checkpoint.newest_begun()) > max(history.newest, facts.newest_decided):
        advice.append(
            f"epoch {begun} has begun and is not recorded: a query is writing it now, or it failed; no row of it is "
            "visible, and the next start writes it again"
        )
        if "--sinks" not in facts.typed:
            advice.append("with --sinks MODULE:ATTRIBUTE, this command says whether its targets answer")
    return advice if decided or _stops(facts) else [*advice, "everything decided is committed"]


def _advice_on_failure(facts: _Facts) -> list[str]:
    """Return what the last failure says to do, if no query has started since."""
    stopped = facts.history.failing
    # what the targets say now is newer
    if stopped is None or facts.disagreements:
        return []
    hint = _addresses(facts.place, facts.typed).complete(stopped.hint)
    return [f"the query stopped: {stopped.failure}", *_lines_of(hint)]


def _advice_on_start(facts: _Facts) -> list[str]:
    failed = facts.failed_start
    if failed is None:
        return []
    hint = _addresses(facts.place, facts.typed).complete(failed.hint)
    return [
        f"a start failed before it took the ledger ({failed.stamp}): {failed.failure}",
        *_lines_of(hint),
        "  a query that another process has started is not affected; the next start that succeeds removes this note",
    ]


def _advice_on_missing(facts: _Facts) -> list[str]:
    """Return what to do about epochs that the ledger does not know: whether they may be accepted, targets must say."""
    lacks = f"Spark has decided {facts.missing}, and the ledger ends at {facts.history.newest}: "
    if "--sinks" not in facts.typed:
        either = (
            "the ledger is an older copy, or the function given to foreachBatch did not pass these epochs on; to find "
            "out which, type:"
        )
        return [lacks + either, *_with_sinks(facts, "status")]
    newest, left = facts.newest_decided, [each for target in facts.targets for each in target.pending]
    if facts.disagreements:
        failure = ledger_is_older(newest, facts.history.newest)
    elif left:
        failure = ledger_lost_prepared(newest, facts.history.newest, f"a target has {left[0].kind} {left[0].name}")
    else:
        failure = decided_without_us(facts.history.newest + 1, newest, attempted=-1)
    failure.address(_addresses(facts.place, facts.typed))
    return [failure.message, *_lines_of(failure.hint)]


def _lines_of(hint: str) -> list[str]:
    """Return a hint in lines, each command on one of its own, to be copied."""
    parts = _COMMAND.split(hint)
    lines = [f"    {part}" if index % 2 else f"  {part.strip(' ;,')}" for index, part in enumerate(parts)]
    return [line for line in lines if line.strip()]


_COMMAND: Final = re.compile(
    r"(epochsink (?:status|recover|repair|resolve|accept|abandon|audit|orphans|letters \w+) [^;,)]*[^;,) ])"
)


def _with_sinks(facts: _Facts, verb: str) -> list[str]:
    """Return a command that needs the sinks, with those that were typed, or with an example and what to name."""
    if "--sinks" in facts.typed:
        return [_command(verb, facts.place.location, *facts.typed)]
    return [
        _command(verb, facts.place.location, "--sinks", _EXAMPLE, *facts.typed),
        _NAME_YOURS,
    ]


def _taken(stamp: Stamp | None) -> str:
    """Return since when, and by which process, the ledger is taken."""
    if stamp is None:
        return "not known"
    return f"{stamp}, which has ended" if has_ended(stamp) else str(stamp)


_EXAMPLE: Final = "my_pipeline:sink"
_NAME_YOURS: Final = (
    f"instead of {_EXAMPLE}, name the object that your pipeline starts, as MODULE:ATTRIBUTE: 'sink' in my_pipeline.py, "
    "an ExactlyOnce object or a dict of sinks"
)


def _command(verb: str, *arguments: str) -> str:
    return f"    epochsink {verb} {shlex.join(arguments)}"


def _history(place: QueryCheckpoint) -> tuple[LedgerHistory, list[str]]:
    """Return the ledger's history; if an entry is damaged, that of the others, and what is at stake."""
    try:
        return Ledger(place.files, uuid.uuid4().hex).read(), []
    except LedgerCorrupt as corrupt:
        history, damages = survey(place.files)
        return history, [_at_stake(place, damage) for damage in damages] or [corrupt.message]


def _at_stake(place: QueryCheckpoint, damage: Damage) -> str:
    epochs = damage.epochs
    if not epochs:
        return str(damage)
    decided = [number for number in epochs if place.checkpoint.is_decided(number)]
    said = f"{damage}; epoch {' or '.join(map(str, epochs))} is at stake: "
    if not decided:
        return said + "Spark has not decided it, so nothing of it may be visible"
    return said + f"Spark has decided {_join(decided)}, so check whether its rows are in every target"


def _epoch(place: QueryCheckpoint, history: LedgerHistory, prepared: Prepared) -> EpochStatus:
    parts = {sink: len(share.parts) for sink, share in prepared.shares.items()}
    size = 0
    if prepared.epoch in history.done:
        state = EpochState.DONE
    elif history.abandoned is not None:
        state = EpochState.ENDED
    else:
        state = EpochState.DECIDED if place.checkpoint.is_decided(prepared.epoch) else EpochState.RECORDED
        size = place.spool.size(place.query_id, prepared.at)
    receipt = history.receipts.get(prepared.epoch)
    if receipt is not None:
        rows = {sink: each.rows for sink, each in receipt.sinks.items()}
    else:
        rows = {sink: share.counted.rows for sink, share in prepared.shares.items() if share.counted.rows}
    age = None if prepared.stamp is None else max(0.0, round(time.time() - prepared.stamp.at, 3))
    return EpochStatus(prepared.epoch, prepared.attempt, state, parts, size, rows, age, receipt)


def _up_to(epoch: int) -> str:
    return "nothing" if epoch < 0 else f"up to epoch {epoch}"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
