"""Close one sink's share of a recorded epoch on an operator's word, where the target cannot say what became of it.

An epoch that Spark has not decided yet can only be discarded, for a sink that is gone.

What a target does say outweighs the word: a part that it holds is not prepared again, and one that it says is gone is
not taken for committed. The word counts for what stays unknown.
"""

from __future__ import annotations

import enum
import logging
import re
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from epochsink.cli.recover import open_for
from epochsink.errors import ConfigurationError, SpoolMissing
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Done, Replay, Resolved
from epochsink.sink import Ballot, Epoch, Identity, Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Prepared, Take
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Participant, Rows, Sink

_log = logging.getLogger("epochsink")


class Ruling(enum.StrEnum):
    """The operator's word on one sink's share of an epoch."""

    COMMITTED = "committed"
    REPLAY = "replay"
    DISCARD = "discard"


class Resolution:
    """One ruling on one sink's share of one epoch; `plan` says what `carry_out` will do.

    ``sinks`` are the query's, or None where the target cannot be asked; ``folder`` is where discarded rows are kept.
    Raises `ConfigurationError` unless the epoch is recorded and pending, with rows in that sink, and, but for a
    discard, decided.
    """

    def __init__(
        self,
        place: Place,
        *,
        epoch: int,
        sink: str,
        ruling: Ruling,
        sinks: Mapping[str, Sink] | None,
        folder: Path,
    ) -> None:
        if ruling is Ruling.REPLAY and sinks is None:
            raise ConfigurationError(
                "--as replay needs --sinks: the rows are prepared again in the target",
                hint="add --sinks module:attribute",
            )
        if sinks is not None and sink not in sinks:
            raise ConfigurationError(
                f"--sinks has no sink '{sink}'; it has {_names(sinks)}", hint="name the query's own sinks"
            )
        self._place = place
        self._number = epoch
        self._sink = sink
        self._ruling = ruling
        self._sinks = sinks
        self._folder = folder
        self._ledger = Ledger(place.files, uuid.uuid4().hex, purpose="epochsink resolve")
        self._prepared = self._find(self._ledger.read())
        # what several sinks share becomes visible for all of them or for none
        self._together = sorted({*self._prepared.sharers(sink)} & self._prepared.shares.keys())
        if ruling is Ruling.REPLAY and len(self._together) > 1:
            raise ConfigurationError(
                f"epoch {epoch} is one transaction for {_names(self._together)}, and would be prepared again for one",
                hint="'epochsink recover' prepares what the target has lost again for all of them, and commits it",
            )
        for name in self._together if ruling is Ruling.DISCARD else ():
            if self._file(name).exists():
                raise ConfigurationError(
                    f"{self._file(name)} exists already, and may hold rows that were discarded before",
                    hint="move it away, or name another folder with --keep-in",
                )

    def plan(self) -> list[str]:
        """Return what will be done, a line each."""
        share = self._prepared.shares[self._sink]
        which = f"epoch {self._number}, sink {_names(self._together)}, {len(share.parts)} part(s)"
        lines = ["take the ledger: a driver that runs on this checkpoint now stops with Fenced"]
        if self._ruling is Ruling.DISCARD:
            lines += [self._plan_to_keep(name) for name in self._together]
            lines.append(f"record {which} as discarded: these rows never reach the target")
            if not self._is_decided():
                lines.append("leave the epoch's other sinks as they are: Spark has not decided it yet")
            return [*lines, "abort what is prepared of them, " + ("now" if self._sinks else "at the next start")]
        if self._sinks is not None:
            lines.append("ask the target once more; what it says itself outweighs your word")
        if self._ruling is Ruling.REPLAY:
            lines.append(f"prepare the unknown parts of {which} again from the spool, and record them as a replay")
            return [*lines, "commit the epoch in every sink"]
        lines.append(f"record {which} as committed: whatever of it the target lacks, it will never get")
        return lines

    def carry_out(self) -> None:
        """Do it; each thing done is logged, a line each.

        Raises `Fenced` if another driver takes the ledger meanwhile, and what the sink raises.
        """
        if self._ruling is Ruling.DISCARD:
            for name in self._together:
                self._keep_rows(name)
        take = self._ledger.take(self._place.query_id, {}, -1)
        _log.info("took the ledger as generation %d", take.generation)
        self._prepared = self._find(self._ledger.verify())
        if self._sinks is not None and self._ruling is not Ruling.DISCARD:
            self._ask(self._sinks[self._sink], take)
        if self._ruling is not Ruling.REPLAY:
            self._record_word()

    def _find(self, history: History) -> Prepared:
        """Return the epoch as recorded, or refuse."""
        prepared = history.epochs.get(self._number)
        pending = [prepared.epoch for prepared in history.pending]
        if prepared is None or self._number in history.done:
            state = "not in the ledger" if prepared is None else "done: every sink has committed it"
            raise ConfigurationError(
                f"epoch {self._number} is {state}",
                hint=f"pending are: {', '.join(map(str, pending)) or 'none'}; see 'epochsink status'",
            )
        if self._ruling is not Ruling.DISCARD and not self._is_decided():
            raise ConfigurationError(
                f"epoch {self._number} is recorded and not decided: its commit has not been tried yet",
                hint="start the query: Spark runs the epoch again, and the recorded attempt stands; for a sink whose "
                "target is gone: --as discard",
            )
        if self._sink not in prepared.shares:
            raise ConfigurationError(
                f"epoch {self._number} has nothing pending in sink '{self._sink}'; it has in "
                f"{_names(prepared.shares) or 'none'}",
                hint="see 'epochsink status'",
            )
        return prepared

    # ---- with the target

    def _ask(self, sink: Sink, take: Take) -> None:
        participant = sink.participant({self._sink: sink})
        try:
            open_for(self._place, participant, take)
            # first: what a superseded driver left may hold locks that a commit needs
            done = self._ledger.verify().done_parts(self._sink)
            for line in participant.abort_orphans(self._prepared.parts_of(self._sink), done):
                _log.info("aborted what no recorded epoch names: %s", line)
            for index in range(len(self._prepared.parts_of(self._sink))):
                self._ask_part(participant, index)
            parts = self._prepared.parts_of(self._sink)
            participant.await_visible(self._epoch(), {self._sink: Ballot(parts, self._rows(self._sink))})
        finally:
            participant.close()

    def _ask_part(self, participant: Participant, index: int) -> None:
        parts = self._prepared.shares[self._sink].parts
        ballots = {self._sink: Ballot([parts[index]], self._rows(self._sink))}
        (verdict,) = participant.commit(self._epoch(), ballots)[self._sink]
        _log.info(
            "part %d of %d: the target says %s %s", index + 1, len(parts), verdict.outcome.value, verdict.evidence
        )
        if verdict.outcome is Outcome.COMMITTED:
            return
        if self._ruling is Ruling.REPLAY:
            self._replay(participant, ballots, index)
        elif verdict.outcome is Outcome.ABORTED:
            raise ConfigurationError(
                f"epoch {self._number}, sink '{self._sink}': the target says that part {index + 1} is gone "
                f"({verdict.evidence}), so it is not committed",
                hint="'epochsink recover' prepares it again from the spool and commits it",
            )

    def _replay(self, participant: Participant, ballots: Mapping[str, Ballot], index: int) -> None:
        parts = self._prepared.shares[self._sink].parts
        replayed = participant.replay(self._epoch(), parts[index], ballots, uuid.uuid4().hex)
        self._ledger.append(Replay(self._number, (self._sink,), (*parts[:index], replayed, *parts[index + 1 :])))
        _log.info("part %d of %d: prepared again from the spool, and recorded", index + 1, len(parts))
        self._prepared = self._ledger.verify().epochs[self._number]

    # ---- by word alone

    def _record_word(self) -> None:
        for name in self._together:
            self._ledger.append(Resolved(self._number, name, self._ruling.value))
            _log.info("recorded epoch %d, sink '%s' as %s, by your word", self._number, name, self._ruling.value)
        others = self._ledger.verify().epochs[self._number].shares
        if not self._is_decided():
            # only what is decided may be done: the next start runs the epoch again, and finds it recorded
            _log.info("the epoch is not decided: it goes on at the next start, without these rows")
            return
        if others:
            _log.info("the epoch is still pending in %s", _names(others))
            return
        self._ledger.append(Done(self._number))
        self._place.spool.drop(self._place.query_id, self._epoch())
        _log.info("epoch %d is done; its spool is dropped", self._number)

    def _file(self, sink: str) -> Path:
        return self._folder / f"epoch-{self._number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', sink)}.parquet"

    def _plan_to_keep(self, sink: str) -> str:
        try:
            return f"write its {self._count_rows(sink)} spooled rows to {self._file(sink)}"
        except SpoolMissing as gone:
            spooled = self._prepared.shares[sink].files
            why = gone.message if spooled else "no copy is in the spool; what a topic has of them stays there, aborted"
            return f"THE ROWS CANNOT BE KEPT: {why}"

    def _count_rows(self, sink: str) -> int:
        rows = self._rows(sink)
        return sum(batch.num_rows for task in rows.tasks() for batch in rows.read(task))

    def _keep_rows(self, sink: str) -> None:
        with suppress(SpoolMissing):
            self._count_rows(sink)
            self._write_rows(sink)
            _log.info("wrote the rows to %s", self._file(sink))

    def _write_rows(self, sink: str) -> None:
        """Write a share's spooled rows as Parquet, into a file that must not exist."""
        rows = self._rows(sink)
        batches = (batch for task in rows.tasks() for batch in rows.read(task))
        first = next(batches)
        with self._file(sink).open("xb") as target, pq.ParquetWriter(target, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)

    def _is_decided(self) -> bool:
        return self._place.checkpoint.is_decided(self._number)

    def _epoch(self) -> Epoch:
        return self._prepared.at

    def _rows(self, sink: str) -> Rows:
        identity = Identity(self._place.query_id, sink)
        share = self._prepared.shares[sink]
        return self._place.spool.rows(identity, self._epoch(), share.tasks, share.files)


def _names(sinks: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sinks)
