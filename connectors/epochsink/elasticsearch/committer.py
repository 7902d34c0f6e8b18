"""Commit recorded epochs: apply their rows from the spool, then write the marker."""
# ruff: noqa: ARG002 - there is only one sink, and only its spool is prepared

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from epochsink.elasticsearch import applied_epochs, dead_letter, deduplicate, errors, preflight, target_index
from epochsink.elasticsearch.applied_epochs import Overtaken
from epochsink.elasticsearch.apply import Application
from epochsink.elasticsearch.audit import audit
from epochsink.elasticsearch.committable import PreparedEpoch, WrittenTask
from epochsink.elasticsearch.config import MOST_INDICES
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.data_stream import Stream
from epochsink.elasticsearch.deduplicate import NoTemporaryFiles
from epochsink.elasticsearch.examine import examine
from epochsink.elasticsearch.letters import ElasticsearchLetters
from epochsink.elasticsearch.pace import Pace
from epochsink.elasticsearch.repair import refuse_several_indices, warning_of_letters
from epochsink.elasticsearch.writer import too_many_indices
from epochsink.errors import OutcomeUnknown, PrepareFailed, SpoolMissing, WentBack
from epochsink.identity import claim_document, identity_key
from epochsink.retry import retrying
from epochsink.sink import LastDone, Mark, Outcome, Participant, Verdict, verify_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import elasticsearch
    import pyarrow as pa
    from tenacity import Retrying

    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.sink import (
        Ballot,
        Ballots,
        Committable,
        Committables,
        Comparison,
        Epoch,
        Finding,
        Identity,
        Keeping,
        Marks,
        Parts,
        Receipt,
        Rows,
    )

_JUST_READ_SECONDS: Final = 0.05


class ElasticsearchCommitter(Participant):
    """Applies epochs to one index. Phase 1 is the spool; any process can repeat everything here."""

    repairs = True

    def __init__(self, members: Mapping[str, ElasticsearchConfig]) -> None:
        super().__init__(members)
        ((self._sink, self._config),) = members.items()
        self._identity: Identity | None = None
        self._connected: elasticsearch.Elasticsearch | None = None
        self._seen_index = False
        self._claim: applied_epochs.Claim | None = None
        # One for each thread: another thread may have read the marker before this one wrote a newer one.
        self._compared = threading.local()
        self._voted: str | None = None
        # One for all epochs: an overload may last longer than an epoch of a few requests.
        self._pace = Pace(self._config.bulk_bytes, self._config.threads)
        self._schema: pa.Schema | None = None
        self.repair_warning += warning_of_letters(self._config)

    @property
    def _client(self) -> elasticsearch.Elasticsearch:
        if self._connected is None:
            self._connected = connect(self._config)
        return self._connected

    @property
    def _me(self) -> Identity:
        if self._identity is None:
            raise RuntimeError("open() has not been called")
        return self._identity

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare the configuration with the server; create what may be created."""
        return preflight.findings(self._client, self._config, schema)

    def examine(self, sink: str) -> Iterator[Finding]:
        """Look at the cluster; see `epochsink.elasticsearch.examine`."""
        return examine(self._client, self._config)

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Claim the version base of this sink."""
        with errors.explained(PrepareFailed, "claiming a version base"):
            # If the answer to a claim is lost, no sink uses that base; the next try claims another second.
            return {"base": self._patiently(applied_epochs.claim_base, self._client)}

    def open(self, identity: Identity) -> None:
        """Set the identity of this sink."""
        self._identity = identity
        self._seen_index = False
        self._claim = None

    def marks(self, sink: str) -> Marks:
        """Return the epochs that the marker records as applied."""
        return _marks(self._kept())

    def leftovers(self, sink: str) -> list[str]:
        """Return nothing: the target holds nothing before `commit`."""
        return []

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the marker with the ledger and, at a start, the index with the one that the marker names.

        Later, each vote and each commit compare the index.
        """
        kept = self._kept()
        self._compared.marker = (kept, time.monotonic())
        self._verify(kept, done, pending)
        if not self._seen_index and applied_epochs.trusted(kept, done) is not None:
            with errors.explained(OutcomeUnknown, f"looking at index {self._config.shown_index!r}"):
                self._patiently(self._require_configured, kept)
        self._seen_index = True

    def audit(
        self, sink: str, done: LastDone | None, pending: LastDone | None, receipts: Sequence[Receipt]
    ) -> Sequence[Comparison]:
        """Compare the marker, and count each epoch's documents; see `epochsink.elasticsearch.audit`."""
        self._verify(self._kept(), done, pending)
        newest = done.epoch if done is not None and pending is None else -1
        with errors.explained(OutcomeUnknown, f"counting the documents of index {self._config.shown_index!r}"):
            return audit(self._client, self._config, self._me, receipts, newest=newest)

    def letters(self, sink: str) -> ElasticsearchLetters | None:
        """Return the letters in ``dead_letter_index``."""
        index = self._config.dead_letter_index
        return None if index is None else ElasticsearchLetters(self._client, self._config, self._me, index)

    def _require_configured(
        self, kept: applied_epochs.Marker | None, names: Sequence[str] = ()
    ) -> target_index.Target | target_index.Targets | Stream:
        """Return the configured target, or with ``index_by`` the named indices, which are created if missing."""
        if self._config.index:
            return target_index.require_same(self._client, self._config, kept)
        create = partial(preflight.create_index, self._client, self._config, self._schema)
        return target_index.require_each(self._client, self._config, kept, names, create=create)

    def _kept(self) -> applied_epochs.Marker | None:
        with errors.explained(OutcomeUnknown, f"reading the marker in {applied_epochs.INDEX!r}"):
            return self._patiently(applied_epochs.read, self._client, self._me)

    @property
    def _patiently(self) -> Retrying:
        """Retries temporary failures: a server that restarts or is overloaded for a while must not end the query."""
        return retrying(errors.is_passing, seconds=self._config.timeout)

    def _verify(self, kept: applied_epochs.Marker | None, done: LastDone | None, pending: LastDone | None) -> None:
        marks_of = partial(self.marks_of, self._sink)
        verify_marks(f"index {self._config.shown_index!r}", _marks(kept), done, pending, marks_of)

    def keeping(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, Keeping]:
        """Remember the schema, from which the vote makes missing indices."""
        self._schema = schemas[self._sink]
        return super().keeping(epoch, schemas)

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Verify spool, target and ids. Raises `PrepareFailed`, `RowsRejected` or `WentBack`."""
        ((name, ballot),) = ballots.items()
        rows, after = ballot.rows, ballot.after
        shares = [WrittenTask.from_json(share) for share in ballot.parts]
        tasks = tuple(rows.tasks())
        expected = {share.task: share.rows for share in shares}
        # A task whose rows are missing from the spool would be committed without them.
        if set(tasks) != set(expected):
            raise PrepareFailed(
                f"the spool of epoch {epoch.number} holds tasks {list(tasks)}, but the accepted tasks are "
                f"{sorted(expected)}"
            )
        names = sorted({index for share in shares for index in share.indices})
        if len(names) > MOST_INDICES:
            raise too_many_indices(names)
        state = f"epoch {epoch.number} is not recorded, so nothing is lost: the next start writes it"
        with errors.explained(PrepareFailed, f"looking at index {self._config.shown_index!r} and its marker", state):
            kept = applied_epochs.read(self._client, self._me)
            self._refuse_epoch(epoch, kept)
            found = self._require_configured(applied_epochs.trusted(kept, after), names)
            # Before the record: a recorded epoch with such a document could never be applied.
            preflight.refuse_too_large(self._client, max(share.largest for share in shares))
        total, unfit = sum(expected.values()), sum(share.unfit for share in shares)
        if unfit > self._config.letters_limit * total:
            raise errors.too_many_unfit(unfit, total, self._config.letters_limit, epoch.number)
        # A task that was not part of the shuffle may share ids with any other task.
        by_task = all(share.by_task for share in shares)
        replaced = 0 if by_task else self._replaced(epoch, rows, tasks, total)
        self._voted = epoch.attempt
        placed_by, pipeline = self._config.placed_by, self._config.pipeline
        index, indices = self._config.shown_index, None if self._config.index else found.indices
        stream = {found.written: found.indices[found.written]} if isinstance(found, Stream) else None
        prepared = PreparedEpoch(
            tasks, total, replaced, index, found.uuid, by_task, placed_by, pipeline, indices, stream
        )
        return {name: [prepared.to_json()]}

    def _replaced(self, epoch: Epoch, rows: Rows, tasks: Sequence[str], total: int) -> int:
        """Return how many rows a later row of their id replaces. Raises `RowsRejected` if that is uncertain."""
        if not self._config.key:
            return 0
        try:
            counted, replaced = deduplicate.count(rows, tasks, total)
        except NoTemporaryFiles as error:
            raise PrepareFailed(error.message, hint=error.hint) from error
        if counted != total:
            raise PrepareFailed(f"the spool of epoch {epoch.number} holds {counted} rows, but the tasks wrote {total}")
        return replaced

    def commit_part(self, sink: str, epoch: Epoch, ballot: Ballot, part: Committable) -> Verdict:
        """Apply the epoch's operations, then write its marker.

        Raises `RowsRejected`, `WentBack`, `OutcomeUnknown`, `SpoolMissing`.
        """
        prepared = PreparedEpoch.from_json(part)
        try:
            return self._patiently(self._commit, epoch, prepared, ballot.rows, ballot.after)
        except errors.CLIENT_ERRORS as error:
            said, hint = errors.describe(error)
            if errors.is_passing(error):
                return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} may be applied in part; {said}: {hint}")
            raise OutcomeUnknown(f"applying epoch {epoch.number} failed: {said}", hint=hint) from error
        except (errors.UnfitIndex, NoTemporaryFiles) as error:
            pending = f"epoch {epoch.number} stays pending in the ledger, its rows in the spool: nothing is lost"
            raise OutcomeUnknown(f"{error.message}; {pending}", hint=error.hint) from error

    def _just_compared(self) -> applied_epochs.Marker | None:
        """Return the marker; reuse the one that this thread has just read to compare it before the commit.

        A changed marker is still noticed, because the run ends with a conditional write of that document.
        """
        kept: applied_epochs.Marker | None
        kept, read_at = self._compared.__dict__.pop("marker", (None, 0.0))
        if time.monotonic() - read_at < _JUST_READ_SECONDS:
            return kept
        return applied_epochs.read(self._client, self._me)

    def _commit(self, epoch: Epoch, prepared: PreparedEpoch, rows: Rows, after: LastDone | None) -> Verdict:
        kept = self._just_compared()
        trusted = applied_epochs.trusted(kept, after)
        if (verdict := _told(kept, epoch)) is not None:
            # The epoch was applied, but the index may have been restored to an older state since.
            self._require_configured(trusted)
            self._forget_other_runs(kept, epoch)
            return verdict
        # The target may have been restored to an older state since the vote; or the marker may be new: a driver on
        # another copy of the checkpoint has applied an epoch since the comparison before the commit.
        self._verify(kept, after, None)
        with ThreadPoolExecutor(1, thread_name_prefix="epochsink-look") as beside:
            # Both must happen before the first document, in any order.
            looking = beside.submit(target_index.require_recorded, self._client, self._config, trusted, prepared)
            self._claim_for(epoch, after.epoch if after else -1)
            found = looking.result()
        first, self._voted = self._voted == epoch.attempt, None
        application = Application(
            self._client,
            self._config,
            self._me,
            epoch=epoch,
            prepared=prepared,
            kept=kept,
            found=found,
            pace=self._pace,
            executors=self.executors,
            require_ours=self.require_ours,
        )
        try:
            set_aside = application.run(rows)
        except Overtaken:
            return self._overtaken(epoch, kept)
        except SpoolMissing:
            # Read the marker again: another driver may have applied the epoch and dropped its spool.
            told = _told(applied_epochs.read(self._client, self._me), epoch)
            if told is None:
                raise
            return told
        except errors.GaveUp as error:
            return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} is applied in part; {error}")
        # Earlier runs, of this driver or a previous one, may have left dead letters. A driver that supersedes this one
        # during the run finds this run's marker, and deletes its own letters.
        if self._config.dead_letter_index is not None and not (first and application.runs == 1):
            self._forget_other_runs(applied_epochs.read(self._client, self._me), epoch)
        return Verdict(Outcome.COMMITTED, set_aside=set_aside)

    def _claim_for(self, epoch: Epoch, done: int) -> None:
        """Claim the epoch for this attempt: two attempts that apply one epoch would mix their documents."""
        self._claim = claim = applied_epochs.claim(self._client, self._me, epoch, self._claim, done=done)
        if (claim.epoch, claim.attempt) == (epoch.number, epoch.attempt):
            return
        raise WentBack(
            f"epoch {claim.epoch} of this query is being applied, or was applied in part, to index "
            f"{self._config.shown_index!r} by attempt {claim.attempt}, but this ledger records epoch {epoch.number} as "
            f"attempt {epoch.attempt}: a driver on another copy of this checkpoint writes for the same query; nothing "
            "of this attempt is applied",
            hint="stop the other driver, and keep the copy of the checkpoint whose ledger names that attempt "
            "(epochsink status CHECKPOINT --json): its next start completes the epoch. If that copy is gone for good, "
            f"remove that epoch's documents, and delete {claim_document(identity_key(self._me))!r} from the index "
            f"{applied_epochs.INDEX!r}",
        )

    def _overtaken(self, epoch: Epoch, kept: applied_epochs.Marker | None) -> Verdict:
        """Return the verdict on an epoch whose marker was changed by another driver."""
        now = applied_epochs.read(self._client, self._me)
        if (verdict := _told(now, epoch)) is not None:
            self._forget_other_runs(now, epoch)
            return verdict
        if kept is not None:
            # A marker that is older than before, or missing, was restored or deleted while this epoch was applied.
            self._verify(now, LastDone(kept.epoch, kept.attempt, ({},)), None)
        return Verdict(
            Outcome.UNKNOWN,
            f"epoch {epoch.number} is applied, but its marker in {applied_epochs.INDEX!r} cannot be written: "
            "somebody has deleted or changed that document",
        )

    def _forget_other_runs(self, kept: applied_epochs.Marker | None, epoch: Epoch) -> None:
        """Delete dead letters of interrupted runs, after the marker, which names the run whose letters are valid."""
        letters = self._config.dead_letter_index
        if letters is None or kept is None or kept.epoch != epoch.number:
            return
        # A driver that was killed after it wrote the marker leaves this to the next commit of the epoch.
        try:
            dead_letter.forget_other_runs(
                self._client, letters, self._me, epoch, run=kept.run, timeout=self._config.timeout
            )
        except errors.GaveUp as error:
            raise OutcomeUnknown(
                f"epoch {epoch.number} is applied, but dead letters of an interrupted run still exist: {error}",
                hint="start the query again: it deletes them",
            ) from error

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Return the part: it is never ABORTED, because only the spool is prepared."""
        return part

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Return the part if the marker is older; see `epochsink.elasticsearch.repair`."""
        refuse_several_indices(done)
        return super().lacking(sink, done)

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """Return nothing: the target holds nothing before `commit`."""
        return []

    def describe(self, part: Committable) -> str:
        """Return the number of spooled rows and their index."""
        prepared = PreparedEpoch.from_json(part)
        return f"{prepared.rows} row(s) in the spool for index {prepared.index!r}"

    def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _refuse_epoch(self, epoch: Epoch, kept: applied_epochs.Marker | None) -> None:
        if kept is not None and kept.epoch >= epoch.number:
            raise WentBack(
                f"epoch {epoch.number} is about to be written, but index {self._config.shown_index!r} already holds "
                f"epoch {kept.epoch} of this sink: the checkpoint is an older copy",
                hint="restore the newest copy of the checkpoint, or start with a new checkpoint",
            )
        # Its versions would belong to the next base, which another sink may have claimed.
        if epoch.number >= applied_epochs.EPOCHS:
            raise PrepareFailed(
                f"epoch {epoch.number} is above the limit of {applied_epochs.EPOCHS} epochs for one checkpoint",
                hint="start with a new checkpoint",
                may_pass=False,
            )


def _told(kept: applied_epochs.Marker | None, epoch: Epoch) -> Verdict | None:
    """Return the verdict of the marker on an epoch; None if the epoch is not applied yet."""
    if kept is None or kept.epoch < epoch.number:
        return None
    if (kept.epoch, kept.attempt) != (epoch.number, epoch.attempt):
        # If it is a later epoch of our successor, the caller finds the ledger taken. Otherwise another copy wrote it.
        return Verdict(
            Outcome.UNKNOWN,
            f"the marker says that attempt {kept.attempt} of epoch {kept.epoch} is applied to index {kept.index!r}, "
            f"but the ledger records attempt {epoch.attempt} of epoch {epoch.number}",
        )
    # an earlier run has applied it, and knew how many rows it set aside
    return Verdict(Outcome.COMMITTED, set_aside=None)


def _marks(kept: applied_epochs.Marker | None) -> dict[str, Mark]:
    return {} if kept is None else {"": Mark(kept.epoch, kept.attempt)}
