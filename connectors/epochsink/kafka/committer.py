"""Phase 2, in the driver: end the transactions that tasks have left open, prepare again what is lost, sweep."""
# ruff: noqa: ARG002 - there is one sink

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import Fenced, OutcomeUnknown, WentBack
from epochsink.failpoints import reach
from epochsink.identity import TransactionalId, identity_key
from epochsink.kafka import end_txn, preflight
from epochsink.kafka.applied_epochs import Markers, committables, topics_of
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.end_txn import Answer, State
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.log_ends import LogEnds
from epochsink.kafka.log_redo import produce_again
from epochsink.kafka.transactional_id import Transaction, transactional_id
from epochsink.kafka.transactions import Transactions
from epochsink.kafka.vote import Polls, vote
from epochsink.kafka.write_again import write_again
from epochsink.sink import (
    COMMITTED,
    Keeping,
    LastDone,
    Outcome,
    Participant,
    Task,
    Verdict,
    one_by_one,
    verify_marks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from epochsink.kafka.config import KafkaConfig
    from epochsink.kafka.end_txn import Description
    from epochsink.sink import Ballots, Committable, Committables, Epoch, Identity, Marks, Parts, Rows

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01
_MANY: Final = 8
"""Transactions of an epoch that are worth a way of their own."""


class KafkaCommitter(Participant):
    """The driver's side of one Kafka sink. A part is one transaction."""

    def __init__(self, members: Mapping[str, KafkaConfig]) -> None:
        super().__init__(members)
        (config,) = members.values()
        self._config = config
        self._cluster = Cluster(config.bootstrap_servers, config.options, config.timeout)
        self._transactions = Transactions(self._cluster)
        # ids that a replay uses now: a sweep beside it must not take them for orphans
        self._busy: set[str] = set()
        self._log_ends = LogEnds(config, self._cluster)
        # the topics' ids as they were when the commit of this attempt at an epoch began
        self._topics_at_commit: tuple[str, dict[str, str]] = ("", {})

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare the configuration with the cluster; see `epochsink.kafka.preflight`."""
        return preflight.findings(self._config, self._cluster, schema)

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Fix the longest transaction timeout that the brokers allow, and the largest batch that the topic takes."""
        found = {
            "transaction_timeout": preflight.transaction_timeout_cap(self._cluster),
            "largest_batch": preflight.largest_batch(self._cluster, self._config.topic),
        }
        return {name: value for name, value in found.items() if value is not None}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is."""
        self._identity = identity
        self._key = identity_key(identity)
        self._markers = Markers(self._cluster, self._key)
        self._fence = Fence(self._transactions, identity, f"Kafka at {self._config.bootstrap_servers}")
        self._seen_all = False

    def fence(self) -> None:
        """Shut out drivers on other copies of the checkpoint; see `epochsink.kafka.fence`."""
        self._fence.take(self._cluster.deadline())
        self._seen_all = False

    def marks(self, sink: str) -> Marks:
        """Return the markers of all Spark partitions."""
        return self._markers.read_all(self._cluster.deadline())

    def leftovers(self, sink: str) -> list[str]:
        """Return the open transactions of this identity."""
        return self._transactions.open_ids(TransactionalId.prefix(self._key), self._cluster.deadline())

    def newest_generation(self, sink: str) -> int:
        """Return the highest generation in the transactional ids that the brokers know, open or not."""
        return self._transactions.newest_generation(self._key, self._cluster.deadline())

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the markers of the Spark partitions that the newest epochs had with the ledger: in one request.

        At a start, those of all others too: where the checkpoint is the older copy, the ledger does not know in which
        partitions the later epochs had rows.
        """
        deadline = self._cluster.deadline()
        if not self._seen_all:
            self._fence.await_others(deadline)
        found = self._markers.read_around(done, pending, deadline=deadline)
        if not self._seen_all:
            found |= self._markers.read_all(deadline)
        if done is not None and not (self._seen_all and self._markers.marks_of(done).keys() <= found.keys()):
            # before the markers are judged: offsets go with their topic, and this says what has become of it
            self._refuse_other_topics(done, self._cluster.topic_ids(topics_of(committables(done)), deadline))
        must = None if done is None else self._markers.unexpired(done, found)
        verify_marks(f"Kafka at {self._config.bootstrap_servers}", found, must, pending, self._markers.marks_of)
        self._seen_all = True

    def keeping(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, Keeping]:
        """Let the topic's log keep the rows where it will; see `epochsink.kafka.rows_in_log`."""
        seconds = self._config.transaction_timeout_ms(self._identity) / 1000
        ((name, schema),) = schemas.items()
        if self._config.spool is None and self._log_ends.note(epoch, schema, seconds):
            return {name: Keeping.IN_TARGET}
        return super().keeping(epoch, schemas)

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Verify that each accepted task's transaction is open, or write its rows again; see `epochsink.kafka.vote`."""
        ((name, ballot),) = ballots.items()
        parts = [self._log_ends.added(epoch, KafkaCommittable.from_json(part)) for part in ballot.parts]
        if ballot.after is not None:
            self._refuse_other_topics(ballot.after, topics_of([*committables(ballot.after), *parts]))
        polls = Polls(self._config, self._cluster, self._transactions, self._identity, self._fence)
        try:
            return {name: [part.to_json() for part in vote(polls, epoch, parts, ballot.rows)]}
        except Fenced:
            for part in parts:
                self._abort(part.transaction)
            raise

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """End the transactions with "commit", however often; the coordinators' answers are the decision."""
        ((name, ballot),) = ballots.items()
        committed = self._commit_at_once(epoch, ballot.parts, ballot.after)
        return {name: one_by_one(ballot.parts, lambda part: self._commit_part(epoch, part, ballot.after), committed)}

    def _commit_part(self, epoch: Epoch, part: Committable, after: LastDone | None) -> Verdict:
        deadline = self._cluster.deadline()
        prepared = KafkaCommittable.from_json(part)
        name = prepared.transaction.transactional_id
        try:
            self._see_topics(epoch, prepared.topics, after, deadline)
            verdict = self._commit(epoch, prepared, deadline)
        except (Unreachable, Refused) as failure:
            verdict = Verdict(Outcome.UNKNOWN, f"{name}: {failure.message}; {failure.hint}")
        if verdict.outcome is not Outcome.UNKNOWN:
            self._busy.discard(name)
        reach("kafka.commit.between")
        return verdict

    def _commit_at_once(self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None) -> set[int]:
        """Send "commit" for many transactions at once; return which are committed. The others are asked one by one."""
        if len(parts) < _MANY:
            return set()
        deadline = self._cluster.deadline()
        known = [KafkaCommittable.from_json(part) for part in parts]
        written_to = topics_of(known)
        try:
            self._see_topics(epoch, written_to, after, deadline)
            whole = [part.transaction for part in known if not part.recreated(self._topics_at_commit[1])]
            decided = self._transactions.commit_many(whole, deadline)
            # asked again, once for all: see `_commit`
            topics = self._cluster.topic_ids(written_to, deadline)
        except (Unreachable, Refused) as failure:
            log.info("epoch %d: its transactions are committed one by one, after %s", epoch.number, failure)
            return set()
        self._busy -= {transaction.transactional_id for transaction in decided}
        return {index for index, part in enumerate(known) if part.transaction in decided and not part.recreated(topics)}

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Write a part's rows into a new transaction: out of the topic's log, or out of the spool as the task did."""
        lost = KafkaCommittable.from_json(part)
        # one that is still open has lost its topic: it must not hold readers back, nor be committed by anybody
        self._abort(lost.transaction)
        (ballot,) = ballots.values()
        task = Task(self._identity, epoch, lost.partition, attempt)
        again = self._again(task, lost, ballot.rows)
        try:
            self._fence.look(self._cluster.deadline())
        except Fenced:
            self._abort(again.transaction)
            raise
        return again.to_json()

    def _again(self, task: Task, lost: KafkaCommittable, rows: Rows) -> KafkaCommittable:
        if lost.log_from:
            self._busy.add(str(transactional_id(task, bounded=True)))
            return produce_again(self._config, self._cluster, task, lost)
        self._busy.add(str(transactional_id(task, bounded=self._config.is_redone)))
        return write_again(self._config, task, lost, rows)

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """Abort every open transaction of this identity that ``keep`` does not name, so that readers get on."""
        deadline = self._cluster.deadline()
        kept = {KafkaCommittable.from_json(part).transaction for part in keep}
        ids = [
            name
            for name in self._transactions.open_ids(TransactionalId.prefix(self._key), deadline)
            if self._ours(name)
        ]
        if not ids:
            return []
        described = self._transactions.describe([*ids, self._fence.name], deadline)
        if self._fence.is_lost(described.pop(self._fence.name)):
            # the newest driver sweeps: what is open may be recorded by it
            return []
        lines = []
        for name, now in described.items():
            transaction = Transaction(name, now.producer_id, now.producer_epoch)
            # asked after the listing: a replay says that it is busy before it begins
            if now.state is not State.ONGOING or transaction in kept or name in self._busy:
                continue
            self._refuse_done(transaction, done)
            _, answer = self._transactions.end(transaction, deadline, commit=False)
            lines.append(
                f"aborted transaction {name} (producer {now.producer_id}, epoch {now.producer_epoch}): {answer}"
            )
        return lines

    def _refuse_done(self, transaction: Transaction, done: Sequence[Committable]) -> None:
        if transaction in {KafkaCommittable.from_json(part).transaction for part in done}:
            raise WentBack(
                f"transaction {transaction.transactional_id} (producer {transaction.producer_id}, epoch "
                f"{transaction.producer_epoch}) is open, and the ledger says that its epoch is done: the cluster has "
                "lost the commit, as after an unclean leader election; its rows are not visible",
                hint="put the newer state of the cluster back; the transaction is left as it is",
            )

    def await_visible(self, epoch: Epoch, ballots: Ballots) -> None:
        """Wait until the coordinators have written their decisions to the partitions: for all parts together.

        Then each partition must show the markers of this epoch and of the one before it: EndTxn takes no condition, so
        what came between is seen only now. Raises `OutcomeUnknown` if that cannot be seen.
        """
        deadline = self._cluster.deadline()
        (ballot,) = ballots.values()
        parts, after = ballot.parts, ballot.after
        ending = [KafkaCommittable.from_json(part).transaction.transactional_id for part in parts]
        try:
            while ending and time.monotonic() < deadline:
                now = self._transactions.describe(ending, deadline)
                ending = [name for name in ending if now[name].state in end_txn.ENDING]
                if ending:
                    time.sleep(_LOOK_AGAIN_SECONDS)
            if not ending:
                self._expect_marked(LastDone(epoch.number, epoch.attempt, tuple(parts)), after, deadline)
        except (Unreachable, Refused) as failure:
            raise self._unseen(epoch, f"{failure.message}; {failure.hint}") from failure
        if ending:
            raise self._unseen(epoch, f"not written to the partitions yet: {', '.join(ending)}")

    def _unseen(self, epoch: Epoch, why: str) -> OutcomeUnknown:
        # not done without that: a marker that is missing later on would say that the cluster was set back
        return OutcomeUnknown(
            f"epoch {epoch.number} is committed, and Kafka at {self._config.bootstrap_servers} has not shown its "
            f"markers within {self._config.timeout:g} s: {why}",
            hint="nothing is lost: the epoch stays in the ledger, and the next start looks again; see that all "
            "brokers run",
            epoch=epoch.number,
        )

    def _expect_marked(self, this: LastDone, after: LastDone | None, deadline: float) -> None:
        """Raise `WentBack` unless there is the marker of each part, of those of the epoch before too."""
        ours = self._markers.marks_of(this)
        groups = ours | (self._markers.marks_of(after) if after else {})
        while True:
            found = self._markers.read(groups, deadline)
            late = [name for name in ours if name not in found or found[name].epoch < this.epoch]
            if not late or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN_SECONDS)
        # in the same group (no rows in between) this epoch's marker has replaced that of the one before
        before = self._markers.marks_of(self._markers.unexpired(after, found)) if after else {}
        wanted = before | ours
        wrong = next((name for name, mark in wanted.items() if not mark.agrees(found.get(name))), None)
        if wrong is not None:
            raise WentBack(
                f"epoch {this.epoch} was committed by attempt {this.attempt}, and group {wrong} of Kafka at "
                f"{self._config.bootstrap_servers} shows {found.get(wrong)} in place of {wanted[wrong]}: the cluster "
                "was set back, or a driver on another copy of this checkpoint writes for the same query",
                hint="stop the other driver; look in the topic whether the rows of the last epochs are there, and once "
                "only; start again: the message then says how to go on",
            )

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # ---- steps

    def _commit(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> Verdict:
        transaction = part.transaction
        if recreated := part.recreated(self._topics_at_commit[1]):
            return self._without_topic(epoch, part, recreated, deadline)
        while True:
            answer, name = self._transactions.end(transaction, deadline, commit=True)
            if answer is Answer.REFUSED:
                return Verdict(
                    Outcome.UNKNOWN,
                    f"{transaction.transactional_id}: the coordinator answers {name}; then start again",
                )
            if answer is Answer.DECIDED:
                # asked again: a topic deleted between the first question and this answer has taken its rows along
                recreated = part.recreated(self._cluster.topic_ids(part.topics, deadline))
                return self._lost_with_topic(part, recreated) if recreated else COMMITTED
            verdict = self._look(epoch, part, deadline)
            if verdict is not None:
                return verdict
            if time.monotonic() >= deadline:
                return Verdict(
                    Outcome.UNKNOWN,
                    f"{transaction.transactional_id}: {name}, and no more after {self._config.timeout:g} s",
                )
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _see_topics(self, epoch: Epoch, written_to: Mapping[str, str], after: LastDone | None, deadline: float) -> None:
        """Ask which topics there are now, once for an epoch; they must be those of the epoch before."""
        attempt, topics = self._topics_at_commit
        if attempt == epoch.attempt and topics.keys() >= written_to.keys():
            return
        before = topics_of(committables(after)) if after else {}
        topics = self._cluster.topic_ids(written_to.keys() | before.keys(), deadline)
        self._topics_at_commit = (epoch.attempt, topics)
        if after is not None:
            self._refuse_other_topics(after, topics)

    def _refuse_other_topics(self, last: LastDone, now: Mapping[str, str]) -> None:
        """Raise `WentBack` if a topic is not the one that an epoch was written to; ``now`` has the ids by name."""
        if others := sorted({topic for part in committables(last) for topic in part.recreated(now)}):
            raise WentBack(
                f"topic(s) {', '.join(others)} of Kafka at {self._config.bootstrap_servers} are not those that epoch "
                f"{last.epoch} was written to: they were deleted, and perhaps created again, or this is another "
                f"cluster; the rows up to epoch {last.epoch} are not in them",
                hint="if that is meant, say so, and later epochs go there: epochsink accept CHECKPOINT "
                f"{last.epoch} --sink NAME; to fill them from the source, start with a new checkpoint folder",
            )

    def _without_topic(self, epoch: Epoch, part: KafkaCommittable, recreated: list[str], deadline: float) -> Verdict:
        """Say what became of a transaction whose topic is another one now: if not committed, it is written again."""
        now = self._describe(part.transaction, deadline)
        spooled = self._config.is_redone and not part.log_from  # what the topic kept has gone with it
        if now.is_of(part.transaction) and now.state is State.ONGOING and spooled:
            return Verdict(
                Outcome.ABORTED,
                f"{part.transaction.transactional_id} is open, and topic(s) {', '.join(recreated)}, which it has "
                "written to, were deleted and perhaps created again",
            )
        verdict = None if now.state is State.ONGOING else self._look(epoch, part, deadline)
        if verdict is None or verdict.outcome is Outcome.COMMITTED:
            return self._lost_with_topic(part, recreated)
        return verdict

    def _lost_with_topic(self, part: KafkaCommittable, recreated: list[str]) -> Verdict:
        return Verdict(
            Outcome.UNKNOWN,
            f"topic(s) {', '.join(recreated)} were deleted, and perhaps created again, since {part.rows} row(s) of "
            f"Spark partition {part.partition} were written to them; {part.transaction.transactional_id} may have been "
            "committed before that or after it",
        )

    def _look(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> Verdict | None:
        now = self._describe(part.transaction, deadline)
        marker = self._markers.of_partition(part.partition, deadline)
        age = time.time() - part.prepared_at
        return end_txn.verdict(
            part.transaction,
            now,
            epoch=epoch.number,
            marker=marker,
            marker_may_be_gone=marker is None and age > self._markers.retention(),
        )

    def _describe(self, of: Transaction, deadline: float) -> Description:
        return self._transactions.describe([of.transactional_id], deadline)[of.transactional_id]

    def _abort(self, transaction: Transaction) -> None:
        self._busy.discard(transaction.transactional_id)
        try:
            self._transactions.end(transaction, self._cluster.deadline(), commit=False)
        except (Unreachable, Refused) as failure:
            log.warning("%s is left for the next sweep: %s", transaction.transactional_id, failure)

    def _ours(self, name: str) -> bool:
        return (parsed := TransactionalId.parse(name)) is not None and parsed.generation <= self._identity.generation
