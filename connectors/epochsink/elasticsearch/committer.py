"""Commit recorded epochs: apply their rows from the spool, then write the marker."""
# ruff: noqa: ARG002 - there is only one sink, and only its spool is prepared

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from epochsink.elasticsearch import applied_epochs, dead_letter, deduplicate, errors, preflight, target_index
from epochsink.elasticsearch.applied_epochs import MarkerDocument, Overtaken
from epochsink.elasticsearch.apply import Application, SinkContext
from epochsink.elasticsearch.committable import SpooledEpoch, WrittenTask
from epochsink.elasticsearch.config import MOST_AT_ONCE, MOST_INDICES, ElasticsearchConfig
from epochsink.elasticsearch.deduplicate import NoTemporaryFiles
from epochsink.elasticsearch.operator import ElasticsearchOperator, marks_in, read_marker
from epochsink.elasticsearch.pace import Pace
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.target import ElasticsearchTarget
from epochsink.elasticsearch.writer import too_many_indices
from epochsink.errors import OutcomeUnknown, PrepareFailed, SpoolMissing, WentBack
from epochsink.identity import claim_document
from epochsink.retry import Clock, RetryPolicy, retrying
from epochsink.sink import (
    Ballot,
    Ballots,
    Committable,
    Epoch,
    Identity,
    Joining,
    LastDone,
    Marks,
    Outcome,
    Participant,
    Parts,
    Recorded,
    Remnant,
    Rows,
    Verdict,
    WriterContext,
    identity_key,
    only_compares,
    over_limit,
)

_JUST_READ_SECONDS: Final = 0.05


class _Compared(threading.local):
    """The marker that this thread compared last, and when. Another thread may have read it before a newer one."""

    marker: MarkerDocument | None = None
    read_at = -math.inf


class ElasticsearchCommitter(Participant):
    """Applies epochs to one index. Phase 1 is the spool; any process can repeat everything here."""

    def __init__(
        self,
        members: Mapping[str, ElasticsearchConfig],
        connect: Callable[[], ElasticsearchServer],
        clock: Clock = time,
    ) -> None:
        super().__init__(members)
        ((self._sink, self._config),) = members.items()
        self._connect = connect
        self._connected: ElasticsearchServer | None = None
        self._clock = clock
        self._seen_index = False
        self._claim: applied_epochs.Claim | None = None
        self._compared = _Compared()
        self._voted: str | None = None
        self._run = ""
        self._passed = preflight.ASK_ABOUT_SIZE
        # One for all epochs: an overload may last longer than an epoch of a few requests.
        self._pace: Pace | None = None
        self._schema: pa.Schema | None = None
        # By uuid: the indices of which a vote knows that they take rows of that schema.
        self._fit: set[str] = set()

    @property
    def _server(self) -> ElasticsearchServer:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    @property
    def _me(self) -> Identity:
        (identity,) = self.identities.values()
        return identity

    def operator(self) -> ElasticsearchOperator:
        """Return what answers an operator's commands."""
        return ElasticsearchOperator(self, self._server, self._clock, self._config)

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare the configuration with the server; create what may be created."""
        return preflight.findings(self._server, self._config, schema)

    def open(self, identity: Identity) -> Joining:
        """Set the identity of this sink; claim its version base if it joins.

        It leaves nothing in the target that has a generation.
        """
        super().open(identity)
        self._seen_index = False
        self._claim = None
        return Joining() if identity.generation or only_compares() else self._joined()

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return nothing: the target holds nothing before `commit`."""
        return []

    def _joined(self) -> Joining:
        with errors.explained(PrepareFailed, "claiming a version base"):
            # If the answer to a claim is lost, no sink uses that base; the next try claims another second.
            return Joining({"base": self._patiently(applied_epochs.claim_base, self._server, self._clock)})

    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return what the marker records as applied and, at a start, whether the index is the one that it names.

        Later, each vote and each commit compare the index.
        """
        # Before the read: another driver may write the marker while its answer is on the way.
        begun = self._clock.monotonic()
        kept = read_marker(self._server, self._config, self._me, self._clock)
        marks = marks_in(kept, self._config, done, pending)
        if only_compares():
            return marks
        self._compared.marker, self._compared.read_at = kept, begun
        if marks.disagreement(done, pending) is not None:
            return marks
        if not self._seen_index and applied_epochs.trusted(kept, done) is not None:
            try:
                with errors.explained(OutcomeUnknown, f"looking at index {self._config.shown_index!r}"):
                    self._patiently(self._require_configured, kept)
            except WentBack as another:
                return replace(marks, refusal=another)
        self._seen_index = True
        return marks

    def _require_configured(self, kept: MarkerDocument | None, names: Sequence[str] = ()) -> ElasticsearchTarget:
        """Return the configured target, or with ``index_by`` the named indices, which are created if missing."""
        if self._config.index:
            return target_index.require_same(self._server, self._config, kept)
        create = partial(preflight.create_index, self._server, self._config, self._schema)
        return target_index.require_each(self._server, self._config, kept, names, create=create)

    @property
    def _patiently(self) -> RetryPolicy:
        """Retries temporary failures: a server that restarts or is overloaded for a while must not end the query."""
        return retrying(errors.is_passing, seconds=self._config.timeout, clock=self._clock)

    def _verify(self, kept: MarkerDocument | None, done: LastDone | None, pending: LastDone | None) -> None:
        marks_in(kept, self._config, done, pending).verify(done, pending)

    def begin(
        self, epoch: Epoch, schemas: Mapping[str, pa.Schema], *, retained: bool = False
    ) -> Mapping[str, WriterContext]:
        """Remember the schema, from which the vote makes missing indices."""
        if self._schema != schemas[self._sink]:
            self._schema = schemas[self._sink]
            self._fit.clear()
        return super().begin(epoch, schemas, retained=retained)

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
            kept = applied_epochs.read(self._server, self._me)
            self._refuse_epoch(epoch, kept)
            target = self._require_configured(applied_epochs.trusted(kept, after), names)
            # Before the record: a recorded epoch with such a document could never be applied.
            preflight.refuse_too_large(self._server, max(share.largest for share in shares))
            self._require_fit(target)
            self._refuse_on_the_way(rows, shares, target.index_behind(target.posted_to))
        total, unfit = sum(expected.values()), sum(share.unfit for share in shares)
        if over_limit(unfit, total, self._config.letters_limit):
            raise errors.too_many_unfit(unfit, total, self._config.letters_limit, epoch.number)
        # A task that was not part of the shuffle may share ids with any other task.
        by_task = all(share.by_task for share in shares)
        replaced = 0 if by_task else self._replaced(epoch, rows, tasks, total)
        self._voted = epoch.attempt
        spooled = SpooledEpoch(
            tasks=tasks,
            rows=total,
            replaced=replaced,
            index=self._config.shown_index,
            index_uuid=target.incarnation[0],
            by_task=by_task,
            placed_by=self._config.placed_by,
            pipeline=self._config.pipeline,
            indices=None if self._config.index else target.indices,
            stream=target.stream,
        )
        return {name: [spooled.to_json()]}

    def _refuse_on_the_way(self, rows: Rows, shares: Sequence[WrittenTask], index: str) -> None:
        """Try whether the longest document reaches the server, if none of its length has. Raises `RowsRejected`."""
        longest = max(shares, key=lambda share: share.largest)
        if longest.largest <= self._passed:
            return
        for batch in rows.read(longest.task):
            place = pc.index(pc.binary_length(batch["source"]), longest.largest).as_py()
            if place >= 0:
                preflight.refuse_on_the_way(self._server, self._config, index, batch.slice(place, 1))
                break
        self._passed = longest.largest

    def _require_fit(self, target: ElasticsearchTarget) -> None:
        """Raise `UnfitIndex` or `PrepareFailed` if an index would not take the rows, of each that no vote has met yet.

        `check` cannot look at indices that rows name, nor at those that a data stream gets later.
        """
        for name, settings in target.unchecked.items():
            if settings["index.uuid"] in self._fit:
                continue
            try:
                unfit = preflight.unfit_for_rows(self._server, self._config, self._schema, name, settings)
            except errors.GaveUp as error:
                raise PrepareFailed(f"looking whether index {name!r} takes the rows: {error}") from error
            if unfit:
                raise errors.UnfitIndex(
                    f"index {name!r} does not take the rows: {'; '.join(unfit)}",
                    "correct the index, and its template if it has one, or the rows in select=; then start again",
                )
            self._fit.add(settings["index.uuid"])

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

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Apply the epoch's operations, then write its marker.

        Raises `RowsRejected`, `WentBack`, `OutcomeUnknown`, `SpoolMissing`.
        """
        ((name, ballot),) = ballots.items()
        return {name: [self._committed(epoch, ballot, SpooledEpoch.from_json(part)) for part in ballot.parts]}

    def _committed(self, epoch: Epoch, ballot: Ballot, spooled: SpooledEpoch) -> Verdict:
        try:
            return self._patiently(self._commit, epoch, spooled, ballot.rows, ballot.after)
        except errors.CLIENT_ERRORS as error:
            reason, hint = errors.describe(error)
            if errors.is_passing(error):
                return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} may be applied in part; {reason}: {hint}")
            raise OutcomeUnknown(f"applying epoch {epoch.number} failed: {reason}", hint=hint) from error
        except (errors.UnfitIndex, NoTemporaryFiles) as error:
            pending = f"epoch {epoch.number} stays pending in the ledger, its rows in the spool: nothing is lost"
            raise OutcomeUnknown(f"{error.message}; {pending}", hint=error.hint) from error

    def _just_compared(self) -> MarkerDocument | None:
        """Return the marker; reuse the one that this thread has just read to compare it before the commit.

        A changed marker is still noticed, because the run ends with a conditional write of that document.
        """
        # Once only: a retry of the commit must see what the first try, or another driver, has written.
        read_at, self._compared.read_at = self._compared.read_at, -math.inf
        if self._clock.monotonic() - read_at < _JUST_READ_SECONDS:
            return self._compared.marker
        return applied_epochs.read(self._server, self._me)

    def _commit(self, epoch: Epoch, spooled: SpooledEpoch, rows: Rows, after: LastDone | None) -> Verdict:
        kept = self._just_compared()
        trusted = applied_epochs.trusted(kept, after)
        if (verdict := _verdict_of(kept, epoch)) is not None:
            # The epoch was applied, but the index may have been restored to an older state since.
            self._require_configured(trusted)
            self._forget_other_runs(kept, epoch)
            return verdict
        # The target may have been restored to an older state since the vote; or the marker may be new: a driver on
        # another copy of the checkpoint has applied an epoch since the comparison before the commit.
        self._verify(kept, after, None)
        with self._server.threads.pool(1, "epochsink-look") as beside:
            # Both must happen before the first document, in any order.
            looking = beside.submit(target_index.require_recorded, self._server, self._config, trusted, spooled)
            self._claim_for(epoch, after.epoch if after else -1)
            target = looking.result()
        first, self._voted = self._voted == epoch.attempt, None
        # One name for all runs of this driver that end with their marker: the marker lists those that have letters.
        run, self._run = self._run or uuid.uuid4().hex, ""
        sink = SinkContext(
            self._server, self._clock, self._config, self._me, self._pace_of_cluster(), self.require_ours
        )
        application = Application(sink, epoch, spooled, kept=kept, target=target, run=run)
        try:
            set_aside = application.run(rows)
        except Overtaken:
            return self._overtaken(epoch, kept)
        except SpoolMissing:
            # Read the marker again: another driver may have applied the epoch and dropped its spool.
            verdict = _verdict_of(applied_epochs.read(self._server, self._me), epoch)
            if verdict is None:
                raise
            return verdict
        except errors.GaveUp as error:
            return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} is applied in part; {error}")
        # Earlier runs, of this driver or a previous one, may have left dead letters. A driver that supersedes this one
        # during the run finds this run's marker, and deletes its own letters.
        if self._config.dead_letter_index is not None and not (first and application.runs == 1):
            self._forget_other_runs(applied_epochs.read(self._server, self._me), epoch)
        if application.runs == 1:
            self._run = run
        return Verdict(Outcome.COMMITTED, set_aside=set_aside)

    def _pace_of_cluster(self) -> Pace:
        """Return the pace, whose number of requests at once follows the number of data nodes at the first commit."""
        if self._pace is None:
            at_once = self._config.per_node * max(1, self._server.data_nodes() or 1)
            self._pace = Pace(self._config.bulk_bytes, min(at_once, MOST_AT_ONCE))
        return self._pace

    def _claim_for(self, epoch: Epoch, done: int) -> None:
        """Claim the epoch for this attempt: two attempts that apply one epoch would mix their documents."""
        self._claim = claim = applied_epochs.claim(self._server, self._me, epoch, self._claim, done=done)
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

    def _overtaken(self, epoch: Epoch, kept: MarkerDocument | None) -> Verdict:
        """Return the verdict on an epoch whose marker was changed by another driver."""
        now = applied_epochs.read(self._server, self._me)
        if (verdict := _verdict_of(now, epoch)) is not None:
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

    def _forget_other_runs(self, kept: MarkerDocument | None, epoch: Epoch) -> None:
        """Delete dead letters of interrupted runs, after the marker, which names the run whose letters are valid."""
        letters = self._config.dead_letter_index
        if letters is None or kept is None or kept.epoch != epoch.number:
            return
        # A driver that was killed after it wrote the marker leaves this to the next commit of the epoch.
        try:
            dead_letter.forget_other_runs(
                self._server, letters, self._me, epoch, run=kept.run, timeout=self._config.timeout
            )
        except errors.GaveUp as error:
            raise OutcomeUnknown(
                f"epoch {epoch.number} is applied, but dead letters of an interrupted run still exist: {error}",
                hint="start the query again: it deletes them",
            ) from error

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Return the part: it is never ABORTED, because only the spool is prepared."""
        return part

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """Return nothing: there is nothing to end."""
        return []

    def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _refuse_epoch(self, epoch: Epoch, kept: MarkerDocument | None) -> None:
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


def _verdict_of(kept: MarkerDocument | None, epoch: Epoch) -> Verdict | None:
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
