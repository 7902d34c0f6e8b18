"""Close one sink's share of a recorded epoch as an operator declares, if the target does not tell its outcome.

An epoch that Spark has not decided yet can only be discarded, for a sink that is gone.

What a target does say takes precedence: a part that it holds is not prepared again, and one that it says is gone is
not taken for committed. The word counts for what stays unknown.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.operation import Operation, log, names
from epochsink.errors import ConfigurationError, SpoolMissing, naming
from epochsink.protocol.commit_engine import CommitEngine, Policy
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.ledger_entries import Done, Prepared, Replay, Resolved
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.storage import sync_path
from epochsink.protocol.sweep import end_orphans, recorded_parts
from epochsink.sink import Identity, Outcome, Participant, Rows, Sink, Verdict


class Ruling(enum.StrEnum):
    """The operator's word on one sink's share of an epoch."""

    COMMITTED = "committed"
    REPLAY = "replay"
    DISCARD = "discard"


@dataclass(frozen=True)
class Declared(Policy):
    """An operator has declared the outcome of what the target of one sink does not tell."""

    sink: str
    ruling: Ruling
    _replayed: set[int] = field(default_factory=set, init=False)

    def compare(self, sink: str) -> None:
        """Raise `WentBack` if a target lacks done epochs, but not for who applied this one: that is the question."""
        self.run.ledger.verify()
        with naming(sink):
            AppliedCheck(self.run).verify(sink, but=self.number)

    def note(self, sink: str, verdicts: Mapping[int, Verdict]) -> None:
        """Tell the operator."""
        del sink
        for index, verdict in verdicts.items():
            log.info("%s: the target says %s %s", self._part(index), verdict.outcome.value, verdict.evidence)

    def is_lost(self, sink: str, index: int, verdict: Verdict) -> bool:
        """Let the word count for what is unknown, once: it says nothing of a part that was prepared again since."""
        if self.ruling is Ruling.REPLAY:
            if index in self._replayed:
                return super().is_lost(sink, index, verdict)
            self._replayed.add(index)
            return True
        if verdict.outcome is Outcome.ABORTED:
            raise ConfigurationError(
                f"epoch {self.number}, sink '{sink}': the target says that {self._part(index)} is gone "
                f"({verdict.evidence}), so it is not committed",
                hint="to prepare it again from the spool, and to commit it: epochsink recover CHECKPOINT "
                "--sinks MODULE:ATTRIBUTE",
            )
        return False

    def record(self, replay: Replay) -> None:
        """Record it, and tell the operator."""
        super().record(replay)
        log.info("prepared again from the spool, and recorded")

    def _part(self, index: int) -> str:
        return f"part {index + 1} of {len(self.recorded().parts_of(self.sink))}"


class Resolution(Operation):
    """One ruling on one sink's share of one epoch.

    ``sinks`` are the query's; none if no target can be asked. ``folder`` is where discarded rows are kept; if they
    cannot be read, a discard is refused unless ``without_rows``.
    Raises `ConfigurationError` unless the epoch is recorded and pending, with rows in that sink, and, but for a
    discard, decided.
    """

    verb = "resolve"

    def __init__(
        self,
        place: QueryCheckpoint,
        *,
        epoch: int,
        sink: str,
        ruling: Ruling,
        sinks: Mapping[str, Sink],
        folder: Path,
        without_rows: bool = False,
    ) -> None:
        super().__init__(place)
        if ruling is Ruling.REPLAY and not sinks:
            raise ConfigurationError(
                "--as replay needs --sinks: the rows are prepared again in the target",
                hint="add --sinks MODULE:ATTRIBUTE, the object that your pipeline starts",
            )
        if sinks and sink not in sinks:
            raise ConfigurationError(
                f"--sinks has no sink '{sink}'; it has {names(sinks)}", hint="name the query's own sinks"
            )
        self._number = epoch
        self._sink = sink
        self._ruling = ruling
        self._sinks = sinks
        self._folder = folder
        self._without_rows = without_rows
        self._prepared = self._find(self.before)
        # what several sinks share becomes visible for all of them or for none
        self._together = sorted({*self._prepared.sharers(sink)} & self._prepared.shares.keys())
        if ruling is Ruling.REPLAY and len(self._together) > 1:
            raise ConfigurationError(
                f"epoch {epoch} is one transaction for {names(self._together)}: all of it is prepared again, or none",
                hint="to prepare again what the target has lost, for all of them, and to commit it: epochsink recover "
                "CHECKPOINT --sinks MODULE:ATTRIBUTE",
            )
        for name in self._together if ruling is Ruling.DISCARD else ():
            if self._file(name).exists():
                raise ConfigurationError(
                    f"{self._file(name)} exists already, and may hold rows that were discarded before",
                    hint="move it away, or name another folder with --keep-in",
                )

    def _steps(self) -> list[str]:
        share = self._prepared.shares[self._sink]
        which = f"epoch {self._number}, sink {names(self._together)}, {len(share.parts)} part(s)"
        if self._ruling is Ruling.DISCARD:
            lines = [self._plan_to_keep(name) for name in self._together]
            lines.append(f"record {which} as discarded: these rows never reach the target")
            if not self.decided(self._number):
                lines.append("leave the epoch's other sinks as they are: Spark has not decided it yet")
            return [*lines, "abort what is prepared of them, " + ("now" if self._sinks else "at the next start")]
        steps = ["ask the target once more; its answer takes precedence over yours"] if self._sinks else []
        if self._ruling is Ruling.REPLAY:
            again = f"prepare the unknown parts of {which} again from the spool, and record them as a replay"
            return [*steps, again, "commit the epoch in every sink"]
        return [*steps, f"record {which} as committed: rows that are missing there stay missing"]

    def carry_out(self) -> None:
        """Do it; with sinks, the rest of the epoch is committed too, and nothing is taken if a target is down."""
        with self.reached(self._sinks) as participants:
            if self._ruling is Ruling.DISCARD:
                for name in self._together:
                    self._keep_rows(name)
            taken = self.take()
            # another command may have closed it meanwhile
            self._prepared = self._find(self.ledger.verify())
            if self._ruling is not Ruling.DISCARD:
                for participant in participants:
                    if self._sink in participant.members:
                        self.open(participant, taken)
                        self._ask(participant)
            if self._ruling is not Ruling.REPLAY:
                self._record_word()
            if participants:
                self.recover(participants)

    def _find(self, history: LedgerHistory) -> Prepared:
        """Return the epoch as recorded, or refuse."""
        prepared = history.epochs.get(self._number)
        pending = [prepared.epoch for prepared in history.pending]
        if prepared is None or self._number in history.done:
            state = "not in the ledger" if prepared is None else "done: every sink has committed it"
            raise ConfigurationError(
                f"epoch {self._number} is {state}", hint=f"pending are: {', '.join(map(str, pending)) or 'none'}"
            )
        if self._ruling is not Ruling.DISCARD and not self.decided(prepared.epoch):
            raise ConfigurationError(
                f"epoch {self._number} is recorded and not decided: its commit has not been tried yet",
                hint="start the query: Spark runs the epoch again, and the recorded attempt is kept; for a sink whose "
                "target is gone: --as discard",
            )
        if self._sink not in prepared.shares:
            raise ConfigurationError(
                f"epoch {self._number} has nothing pending in sink '{self._sink}'",
                hint=f"its rows are pending in: {names(prepared.shares) or 'no sink'}",
            )
        return prepared

    # ---- with the target

    def _ask(self, participant: Participant) -> None:
        policy = Declared(self.run, participant, self._number, self._sink, self._ruling)
        # before anything is committed: with this epoch's marker, a target that was set back looks as if it had them all
        for name in participant.members:
            policy.compare(name)
        # before the commit: what a superseded driver left may hold locks that it needs
        for line in end_orphans(participant, recorded_parts(participant, self.ledger.verify())):
            log.info("aborted what no recorded epoch names: %s", line)
        engine = CommitEngine(policy)
        engine.commit({self._sink: range(len(self._prepared.parts_of(self._sink)))})
        engine.await_visible([self._sink])

    # ---- without asking the target

    def _record_word(self) -> None:
        for name in self._together:
            self.ledger.append(Resolved(self._number, name, self._ruling.value))
            log.info("recorded epoch %d, sink '%s' as %s, as you declared", self._number, name, self._ruling.value)
        others = self.ledger.verify().epochs[self._number].shares
        if not self.decided(self._number):
            # only what is decided may be done: the next start runs the epoch again, and finds it recorded
            log.info("the epoch is not decided: at the next start it continues without these rows")
        elif others:
            log.info("the epoch is still pending in %s", names(others))
        else:
            self.ledger.append(Done(self._number))
            self.place.spool.drop(self.place.query_id, self._prepared.at)
            log.info("epoch %d is done; its spool is dropped", self._number)

    # ---- the rows

    def _file(self, sink: str) -> Path:
        return self._folder / f"epoch-{self._number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', sink)}.parquet"

    def _plan_to_keep(self, sink: str) -> str:
        try:
            count = sum(batch.num_rows for batch in self._batches(sink))
        except SpoolMissing as gone:
            self._refuse_losing(sink, gone)
            spooled = self._prepared.shares[sink].files
            why = gone.message if spooled else "the spool has no copy; a topic keeps their records, aborted"
            return f"THE ROWS CANNOT BE KEPT: {why}"
        return f"write its {count} spooled rows to {self._file(sink)}"

    def _refuse_losing(self, sink: str, gone: SpoolMissing) -> None:
        """Refuse to discard rows that were spooled and cannot be read: they may be in a spool that was not named."""
        if self._prepared.shares[sink].files and not self._without_rows:
            raise ConfigurationError(
                f"the rows of epoch {self._number}, sink '{sink}', cannot be read, so they cannot be kept in a file: "
                f"{gone.message} (the spool that was read is {self.place.spool.root})",
                hint="if ExactlyOnce is given spool=, name that place by --spool, or that object by --sinks. "
                "If the rows are lost, discard them with --without-rows, and load the epoch's input "
                f"(offsets/{self._number} in the checkpoint) with a separate query",
            )

    def _keep_rows(self, sink: str) -> None:
        """Write a share's spooled rows, if they all can be read, as Parquet into a file that must not exist."""
        try:
            schemas = [batch.schema for batch in self._batches(sink)]
        except SpoolMissing as gone:
            self._refuse_losing(sink, gone)
            return
        file = self._file(sink)
        with file.open("xb") as target, pq.ParquetWriter(target, schemas[0]) as writer:
            for batch in self._batches(sink):
                writer.write_batch(batch)
        # before the ruling is recorded: after a power cut, it may be all that is left of them
        for path in (file, file.parent):
            sync_path(path)
        log.info("wrote the rows to %s", file)

    def _batches(self, sink: str) -> Iterator[pa.RecordBatch]:
        rows = self._rows(sink)
        return (batch for task in rows.tasks() for batch in rows.read(task))

    def _rows(self, sink: str) -> Rows:
        share = self._prepared.shares[sink]
        who = Identity(self.place.query_id, sink)
        return self.place.spool.rows(who, self._prepared.at, share.tasks, share.files)
