"""The driver's side of a Kafka sink: vote on an epoch's open transactions, commit them, prepare lost rows again."""
# ruff: noqa: ARG002 - a participant has one sink

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from epochsink.errors import Fenced, LogIncomplete, PrepareFailed, RowsRejected, WentBack
from epochsink.kafka import preflight
from epochsink.kafka.applied_epochs import Markers, committables, topics_of
from epochsink.kafka.commit import TransactionCommits, not_aborted, refuse_other_topics
from epochsink.kafka.committable import KafkaCommittable, Transaction, transactional_id
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.operator import KafkaOperator
from epochsink.kafka.redo import prepare_again
from epochsink.kafka.repair import LogRepair
from epochsink.kafka.rows_in_log import LogEnds
from epochsink.kafka.server import KafkaServer, TransactionState
from epochsink.kafka.sweep import TransactionSweep
from epochsink.kafka.transactions import EndTxnResult, Transactions
from epochsink.kafka.witness import Seen, Witness
from epochsink.sink import (
    Ballots,
    Committable,
    Epoch,
    Identity,
    Joining,
    Keeping,
    LastDone,
    Marks,
    Outcome,
    Participant,
    Parts,
    Recorded,
    Remnant,
    Rows,
    Task,
    Verdict,
    WriterContext,
    identity_key,
    only_compares,
    over_limit,
)

log = logging.getLogger("epochsink.kafka")

_TURNS: Final = 3
"""How often the vote writes lost parts again before it fails."""
_NOT_ABORTED: Final = frozenset(
    {TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT}
)


class KafkaCommitter(Participant):
    """The driver's side of one Kafka sink. A part is one transaction."""

    def __init__(self, members: Mapping[str, KafkaConfig], cluster: KafkaServer) -> None:
        super().__init__(members)
        (config,) = members.values()
        self._config = config
        self._cluster = cluster
        self._transactions = Transactions(self._cluster)
        self._log_ends = LogEnds(config, self._cluster)
        self._witness = Witness(self._cluster)

    def operator(self) -> KafkaOperator:
        """Return what answers an operator's commands."""
        return KafkaOperator(self, self._config, self._cluster, self._log_repair)

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare the configuration with the cluster; see `epochsink.kafka.preflight`."""
        return preflight.findings(self._config, self._cluster, schema)

    def open(self, identity: Identity) -> Joining:
        """Prepare the driver's side of this identity. Connects only if it joins."""
        super().open(identity)
        self._identity = identity
        self._key = identity_key(identity)
        self._markers = Markers(self._cluster, self._key, self._config.topic)
        self._commits = TransactionCommits(
            identity.sink, self._config, self._cluster, self._transactions, self._markers
        )
        self._fence = Fence(self._cluster, self._transactions, identity)
        self._sweep = TransactionSweep(self._cluster, self._transactions, self._fence, identity)
        self._seen_all = False
        self._seen_before: Seen | None = None
        return Joining() if identity.generation or only_compares() else self._joined()

    def _joined(self) -> Joining:
        """Return the longest transaction timeout that the brokers allow, and the largest batch that the topic takes.

        The generation is the highest in the transactional ids that the brokers know, open or not.
        """
        marks = {
            "transaction_timeout": preflight.transaction_timeout_cap(self._cluster),
            "largest_batch": preflight.largest_batch(self._cluster, self._config.topic),
        }
        origin = {name: value for name, value in marks.items() if value is not None}
        return Joining(origin, self._transactions.newest_generation(self._key, self._cluster.deadline()))

    def fence(self) -> None:
        """Fence drivers on other copies of the checkpoint; see `epochsink.kafka.fence`."""
        self._fence.take(self._cluster.deadline())
        self._seen_all = False

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return the open transactions of this identity, which block readers."""
        return self._sweep.remnants(recorded)

    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return the markers of the newest epochs' Spark partitions, in one request.

        At a start, those of all partitions. An older copy of the checkpoint does not know in which partitions the later
        epochs had rows.
        """
        deadline = self._cluster.deadline()
        if only_compares():
            return self._markers.compared(self._markers.read_all(deadline), done, pending)
        if not self._seen_all:
            # before the markers are read: a driver on another copy may be committing, and its markers count too
            self._fence.await_others(deadline)
        by_group = self._markers.read_around(done, pending, deadline=deadline)
        if not self._seen_all:
            by_group |= self._markers.read_all(deadline, settled=self._fence.is_taken, besides=pending)
        if done is not None and not (self._seen_all and self._markers.marks_of(done).keys() <= by_group.keys()):
            # before the markers are compared: they are deleted with their topic, and this error names the topic
            try:
                refuse_other_topics(
                    self._cluster.target, done, self._cluster.topic_ids(topics_of(committables(done)), deadline)
                )
            except WentBack as recreated:
                return Marks(self._cluster.target, by_group, refusal=recreated)
        marks = self._markers.compared(by_group, done, pending)
        self._seen_all = marks.disagreement(done, pending) is None
        return marks

    def begin(
        self, epoch: Epoch, schemas: Mapping[str, pa.Schema], *, retained: bool = False
    ) -> Mapping[str, WriterContext]:
        """Say where an epoch's rows are kept (see `epochsink.kafka.rows_in_log`), and which become dead letters."""
        seconds = self._config.transaction_timeout_ms(self._identity) / 1000
        ((name, schema),) = schemas.items()
        context = super().begin(epoch, schemas, retained=retained)[name]
        if self._config.spool is None and not retained and self._log_ends.note(epoch, schema, seconds):
            context = WriterContext(Keeping.IN_TARGET)
        return {name: replace(context, settings=self._rules_of_letters(epoch))}

    def _rules_of_letters(self, epoch: Epoch) -> Mapping[str, Any]:
        """Return the rules by which tasks find dead letters: they follow from the topics' settings as they are now."""
        if self._config.letters_topic is None:
            return {}
        try:
            return preflight.rules_of_letters(self._config, self._cluster).to_json()
        except (Unreachable, Refused) as failure:
            raise PrepareFailed(
                f"epoch {epoch.number}: the limits of topic '{self._config.topic}' could not be read: {failure}",
                hint="Spark runs the epoch again",
            ) from failure

    # ---- the vote

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Return parts whose transactions were all open, with all rows, at the same time.

        A transaction may be lost before the vote: the epoch took longer than the transaction timeout, another attempt
        at the task used its id, or a topic was deleted. If its rows are kept, they are written again, into a
        transaction that may stay open for as long as the brokers allow.
        """
        ((name, ballot),) = ballots.items()
        parts = self._log_ends.added(epoch, [KafkaCommittable.from_json(part) for part in ballot.parts])
        _refuse_shared_marker(parts)
        if ballot.after is not None:
            refuse_other_topics(self._cluster.target, ballot.after, topics_of([*committables(ballot.after), *parts]))
        try:
            self._refuse_many_letters(parts)
            return {name: [part.to_json() for part in self._voted(epoch, parts, ballot.rows)]}
        except (Fenced, RowsRejected):
            # this attempt will not be recorded, and its transactions would hold readers back until they expire
            for part in parts:
                self._sweep.abort(part.transaction)
            raise

    def _refuse_many_letters(self, parts: Sequence[KafkaCommittable]) -> None:
        letters, rows, limit = (
            sum(part.letters for part in parts),
            sum(part.rows for part in parts),
            self._config.letters_limit,
        )
        if over_limit(letters, rows, limit):
            raise RowsRejected(
                f"topic '{self._config.topic}' cannot take {letters} of {rows} rows, more than letters_limit={limit}: "
                f"{next(part.why for part in parts if part.letters)}",
                hint="correct the topic or the stream, and start again; or raise letters_limit=",
            )

    def _voted(self, epoch: Epoch, parts: list[KafkaCommittable], rows: Rows) -> list[KafkaCommittable]:
        for turn in range(_TURNS + 1):
            # look at all parts in every turn: one may expire while another is written again
            lost, whole = self._asked(epoch, parts, is_first=turn == 0)
            if not lost:
                return [whole[index] for index in range(len(parts))]
            if turn == _TURNS or not self._config.is_redone:
                break
            log.info("epoch %d: %d of %d transactions are written again: %s", epoch.number, len(lost), len(parts), lost)
            for index in lost:
                task = Task(self._identity, epoch, parts[index].partition, uuid.uuid4().hex)
                try:
                    parts[index] = prepare_again(self._config, self._cluster, task, parts[index], rows)
                except LogIncomplete as gone:
                    # before the record, the source still has the rows: fail the attempt, not the query
                    hint = "nothing is recorded yet: Spark runs the epoch again"
                    raise PrepareFailed(gone.message, hint=hint) from gone
        raise PrepareFailed(
            f"epoch {epoch.number}: {next(iter(lost.values()))}",
            hint="no row is lost, and Spark runs the epoch again; if the write took longer than transaction_timeout=, "
            "raise it, or make epochs smaller (maxOffsetsPerTrigger, maxFilesPerTrigger)",
        )

    def _asked(
        self, epoch: Epoch, parts: Sequence[KafkaCommittable], *, is_first: bool
    ) -> tuple[dict[int, str], Mapping[int, KafkaCommittable]]:
        """Return why parts cannot be committed, and the complete parts with their places; both by index.

        The first time, raise `PrepareFailed` if a topic that is to keep the rows no longer does.
        """
        deadline = self._cluster.deadline()
        # the fence in the same request, and after the last part was prepared: see `epochsink.kafka.fence`
        wanted = [*(part.transaction.transactional_id for part in parts), self._fence.name]
        # in any order, since each comes after the last part was prepared: what is lost after one of these looks, the
        # commit notices
        questions: list[Callable[[], Any]] = [
            lambda: self._transactions.describe(wanted, deadline),
            lambda: self._witness.look(parts, (), deadline, self._seen_before),
        ]
        if is_first and any(part.kept_in_topic for part in parts):
            questions.append(lambda: self._log_ends.require_kept(epoch))
        try:
            now, seen, *_ = self._cluster.beside(*questions)
            self._fence.verify(now[self._fence.name], deadline)
        except (Unreachable, Refused) as failure:
            raise PrepareFailed(
                f"epoch {epoch.number}: the brokers could not be asked for its transactions: {failure}",
                hint="Spark runs the epoch again",
            ) from failure
        # for later votes, whose parts are begun after this look
        self._seen_before = seen
        lost = {}
        for index, part in enumerate(parts):
            name, producer_id, producer_epoch = part.transaction
            description = now[name]
            if description.state is not TransactionState.ONGOING or not description.is_of(part.transaction):
                lost[index] = (
                    f"transaction {name}, prepared by producer {producer_id} in epoch {producer_epoch}, is now "
                    f"{description.state.value} (producer {description.producer_id}, epoch "
                    f"{description.producer_epoch})"
                )
            elif recreated := part.recreated(seen.topics):
                lost[index] = f"topic(s) {', '.join(recreated)} were deleted while rows were written to them"
            elif index in seen.missing:
                lost[index] = seen.missing[index]
        return lost, seen.whole

    # ---- the commit

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Commit the transactions. May be repeated; see `epochsink.kafka.commit`."""
        ((name, ballot),) = ballots.items()
        known = [KafkaCommittable.from_json(part) for part in ballot.parts]
        verdicts = self._commits.commit(epoch, known, ballot.after)
        both = list(zip(known, verdicts, strict=True))
        for part, verdict in both:
            # after an unknown outcome the id stays busy, because the same replay may be committed again
            if verdict.outcome is not Outcome.UNKNOWN:
                self._sweep.busy.discard(part.transaction.transactional_id)
        outcomes = [
            replace(verdict, set_aside=part.letters) if verdict.outcome is Outcome.COMMITTED else verdict
            for part, verdict in both
        ]
        return {name: outcomes}

    def visible(self, epoch: Epoch, ballots: Ballots, recorded: Callable[[], Recorded]) -> list[str]:
        """Wait until the partitions show the commits, and check rows and markers.

        Abort transactions of attempts that Spark did not accept, if they are open before this epoch's rows.
        """
        (ballot,) = ballots.values()
        ended: list[str] = []
        # the look before the commit has already shown that; this saves a request
        if self._commits.may_be_blocked(epoch):
            ended = self._sweep.unblock(epoch, [KafkaCommittable.from_json(part) for part in ballot.parts], recorded)
        self._commits.await_visible(epoch, ballot)
        return ended

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Write a part's rows into a new transaction, from the topic's log or from the spool."""
        lost = KafkaCommittable.from_json(part)
        # first: a late commit of the lost transaction would duplicate rows
        self._end_lost(epoch, lost.transaction)
        (ballot,) = ballots.values()
        task = Task(self._identity, epoch, lost.partition, attempt or uuid.uuid4().hex)
        # before it begins: otherwise a sweep in the other thread would abort it as an orphan
        self._sweep.busy.add(str(transactional_id(task, bounded=lost.kept_in_topic or self._config.is_redone)))
        again = prepare_again(self._config, self._cluster, task, lost, ballot.rows)
        deadline = self._cluster.deadline()
        try:
            # after the rows are prepared: a driver that takes the fence later finds the transaction in its sweep
            self._fence.look(deadline)
            return self._seen_whole(epoch, again, deadline).to_json()
        except (Fenced, PrepareFailed):
            self._sweep.abort(again.transaction)
            raise

    def _end_lost(self, epoch: Epoch, transaction: Transaction) -> None:
        """Abort what is left of a lost transaction. Raises `OutcomeUnknown` if it is open still, or committed."""
        deadline = self._cluster.deadline()
        answer, detail = self._transactions.end(transaction, deadline, commit=False)
        if answer is EndTxnResult.DECIDED:
            return
        now = self._transactions.describe([transaction.transactional_id], deadline)[transaction.transactional_id]
        if now.is_of(transaction) and now.state in _NOT_ABORTED:
            raise not_aborted(epoch, transaction, detail, now.state)

    def _seen_whole(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> KafkaCommittable:
        seen = self._witness.look([part], (), deadline)
        if not seen.whole:
            raise PrepareFailed(
                f"epoch {epoch.number}: rows that were prepared again are lost: "
                f"{seen.missing.get(0, 'their topic was deleted')}",
                hint="the epoch stays in the ledger: start the query again, and its rows are prepared once more",
            )
        return seen.whole[0]

    def _log_repair(self) -> LogRepair:
        return LogRepair(self._cluster, self._markers, self._key, self._fence, self._commits.lost)

    # ---- the sweep

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """Abort open transactions; their tasks may still run, and are fenced off."""
        return self._sweep.end(remnants)

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()


def _refuse_shared_marker(parts: Sequence[KafkaCommittable]) -> None:
    """Raise unless each part has a Spark partition of its own, whose marker proves the commit of that part alone."""
    if twice := [str(each) for each, count in Counter(part.partition for part in parts).items() if count > 1]:
        raise PrepareFailed(
            f"several parts of the epoch are of Spark partition(s) {', '.join(twice)}, and one marker would "
            "have to prove the commit of each",
            hint="nothing is recorded yet, and no row is lost: please report this with the version of Spark",
            may_pass=False,
        )
