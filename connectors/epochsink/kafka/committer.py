"""Phase 2, in the driver: end the transactions that tasks have left open, prepare again what is lost, sweep."""
# ruff: noqa: ARG002 - there is one sink

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import Fenced, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.identity import TransactionalId, identity_key
from epochsink.kafka import end_txn, preflight
from epochsink.kafka.applied_epochs import Markers, committables, topics_of
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.commit import Commits, refuse_other_topics
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.end_txn import Answer, State
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.log_ends import LogEnds
from epochsink.kafka.log_redo import produce_again
from epochsink.kafka.transactional_id import Transaction, transactional_id
from epochsink.kafka.transactions import Transactions
from epochsink.kafka.vote import Polls, vote
from epochsink.kafka.witness import Witness
from epochsink.kafka.write_again import write_again
from epochsink.sink import Keeping, LastDone, Outcome, Participant, Task, verify_marks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from epochsink.kafka.config import KafkaConfig
    from epochsink.sink import (
        Ballots,
        Committable,
        Committables,
        Epoch,
        Identity,
        Marks,
        Parts,
        Recorded,
        Rows,
        Verdict,
    )

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01
_NOT_ABORTED: Final = frozenset({State.ONGOING, State.PREPARE_COMMIT, State.COMPLETE_COMMIT})


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
        self._witness = Witness(self._cluster)
        self._target = f"Kafka at {config.bootstrap_servers}"

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
        self._commits = Commits(identity.sink, self._config, self._cluster, self._transactions, self._markers)
        self._fence = Fence(self._transactions, identity, self._target)
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
            refuse_other_topics(self._target, done, self._cluster.topic_ids(topics_of(committables(done)), deadline))
        must = None if done is None else self._markers.unexpired(done, found)
        verify_marks(self._target, found, must, pending, self._markers.marks_of)
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
        parts = self._log_ends.added(epoch, [KafkaCommittable.from_json(part) for part in ballot.parts])
        if ballot.after is not None:
            refuse_other_topics(self._target, ballot.after, topics_of([*committables(ballot.after), *parts]))
        polls = Polls(self._config, self._cluster, self._transactions, self._witness, self._identity, self._fence)
        try:
            return {name: [part.to_json() for part in vote(polls, epoch, parts, ballot.rows)]}
        except Fenced:
            for part in parts:
                self._abort(part.transaction)
            raise

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """End the transactions with "commit", however often; see `epochsink.kafka.commit`."""
        ((name, ballot),) = ballots.items()
        known = [KafkaCommittable.from_json(part) for part in ballot.parts]
        verdicts = self._commits.commit(epoch, known, ballot.after)
        for part, verdict in zip(known, verdicts, strict=True):
            if verdict.outcome is not Outcome.UNKNOWN:
                self._busy.discard(part.transaction.transactional_id)
        return {name: verdicts}

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Write a part's rows into a new transaction: out of the topic's log, or out of the spool as the task did."""
        lost = KafkaCommittable.from_json(part)
        self._end_lost(epoch, lost.transaction)
        (ballot,) = ballots.values()
        again = self._again(Task(self._identity, epoch, lost.partition, attempt), lost, ballot.rows)
        deadline = self._cluster.deadline()
        try:
            self._fence.look(deadline)
            return self._seen_whole(epoch, again, deadline).to_json()
        except (Fenced, PrepareFailed):
            self._abort(again.transaction)
            raise

    def _end_lost(self, epoch: Epoch, transaction: Transaction) -> None:
        """Abort what is left of a lost transaction, so that it holds no reader back, and nobody can commit it.

        Raises `OutcomeUnknown` if it was committed meanwhile.
        """
        deadline = self._cluster.deadline()
        answer, told = self._transactions.end(transaction, deadline, commit=False)
        if answer is Answer.DECIDED:
            return
        now = self._transactions.describe([transaction.transactional_id], deadline)[transaction.transactional_id]
        if now.is_of(transaction) and now.state in _NOT_ABORTED:
            raise OutcomeUnknown(
                f"epoch {epoch.number}: transaction {transaction.transactional_id} has lost rows, and cannot be "
                f"aborted: the coordinator answers {told}, and it is {now.state.value}",
                hint="nothing is written again; see 'epochsink status'",
                epoch=epoch.number,
            )

    def _again(self, task: Task, lost: KafkaCommittable, rows: Rows) -> KafkaCommittable:
        self._busy.add(str(transactional_id(task, bounded=lost.kept_in_topic or self._config.is_redone)))
        if lost.kept_in_topic:
            return produce_again(self._config, self._cluster, task, lost)
        return write_again(self._config, task, lost, rows)

    def _seen_whole(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> KafkaCommittable:
        seen = self._witness.look([part], (), deadline)
        if not seen.whole:
            raise PrepareFailed(
                f"epoch {epoch.number}: rows that were prepared again are lost: "
                f"{seen.missing.get(0, 'their topic was deleted')}",
                hint="the epoch stays in the ledger: start the query again, and its rows are prepared once more",
            )
        return seen.whole[0]

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """Abort every open transaction of this identity that ``keep`` does not name, so that readers get on."""
        deadline = self._cluster.deadline()
        kept = {KafkaCommittable.from_json(part).transaction for part in keep}
        ongoing = self._unended((State.ONGOING,), deadline)
        return [self._abort_orphan(transaction, done, deadline) for transaction in ongoing if transaction not in kept]

    def unblock(self, epoch: Epoch, ballots: Ballots, recorded: Callable[[], Recorded]) -> list[str]:
        """Abort transactions of attempts that lost, if the partitions' leaders show them open before the epoch's rows.

        They hold the last stable offset back. Every other attempt of ours that is open there has lost: the one under
        way began to write after the epoch was recorded, unless a replay has overtaken it.
        """
        deadline = self._cluster.deadline()
        (ballot,) = ballots.values()
        parts = [KafkaCommittable.from_json(part) for part in ballot.parts]
        lines: dict[Transaction, str] = {}
        try:
            blocking = self._blocking(parts, deadline)
            keep, done = recorded() if blocking else ((), ())
            kept = {KafkaCommittable.from_json(part).transaction for part in keep}
            while blocking := {each: state for each, state in blocking.items() if each not in kept}:
                if time.monotonic() >= deadline:
                    raise self._unseen(epoch, f"held back by {', '.join(each.transactional_id for each in blocking)}")
                for transaction, state in blocking.items():
                    if state is State.ONGOING:
                        lines[transaction] = self._abort_orphan(transaction, done, deadline)
                time.sleep(_LOOK_AGAIN_SECONDS)
                blocking = self._blocking(parts, deadline)
        except (Unreachable, Refused) as failure:
            raise self._unseen(epoch, f"{failure.message}; {failure.hint}") from failure
        return list(lines.values())

    def _blocking(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Transaction, State]:
        """Return our transactions that hold readers back from parts: those that go on, and those that are ending."""
        producers = self._witness.open_before(parts, deadline)
        if not producers:
            return {}
        ids = {producer_id for producer_id, _ in producers}
        unended = self._unended((State.ONGOING, *end_txn.ENDING), deadline)
        return {
            each: state
            for each, state in unended.items()
            # exactly, unless it is ending: the same id may be used by now for rows that hold nobody back
            if each[1:] in producers or (state in end_txn.ENDING and each.producer_id in ids)
        }

    def _unended(self, states: Sequence[State], deadline: float) -> dict[Transaction, State]:
        """Return the transactions of this identity in some states that are ours to end."""
        prefix = TransactionalId.prefix(self._key)
        names = [name for name in self._transactions.ids(prefix, states, deadline) if self._ours(name)]
        if not names:
            return {}
        described = self._transactions.describe([*names, self._fence.name], deadline)
        if self._fence.is_lost(described.pop(self._fence.name)):
            # the newest driver sweeps: what is open may be recorded by it
            return {}
        return {
            Transaction(name, now.producer_id, now.producer_epoch): now.state
            for name, now in described.items()
            # asked after the listing: a replay says that it is busy before it begins
            if now.state in states and name not in self._busy
        }

    def _abort_orphan(self, transaction: Transaction, done: Committables, deadline: float) -> str:
        self._refuse_done(transaction, done)
        name, producer_id, producer_epoch = transaction
        _, answer = self._transactions.end(transaction, deadline, commit=False)
        return f"aborted transaction {name} (producer {producer_id}, epoch {producer_epoch}): {answer}"

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

        EndTxn takes no condition, so what came between is seen only now: the topics' partitions must hold the rows, and
        each Spark partition must show the markers of this epoch and of the one before it. Raises `OutcomeUnknown` if
        that cannot be seen, or if rows are gone.
        """
        deadline = self._cluster.deadline()
        (ballot,) = ballots.values()
        parts, after = ballot.parts, ballot.after
        known = [KafkaCommittable.from_json(part) for part in parts]
        ending = [part.transaction.transactional_id for part in known]
        try:
            while ending and time.monotonic() < deadline:
                now = self._transactions.describe(ending, deadline)
                ending = [name for name in ending if now[name].state in end_txn.ENDING]
                if ending:
                    time.sleep(_LOOK_AGAIN_SECONDS)
            if not ending:
                self._commits.verify_whole(epoch, known, deadline)
                self._expect_marked(LastDone(epoch.number, epoch.attempt, tuple(parts)), after, deadline)
        except (Unreachable, Refused) as failure:
            raise self._unseen(epoch, f"{failure.message}; {failure.hint}") from failure
        if ending:
            raise self._unseen(epoch, f"not written to the partitions yet: {', '.join(ending)}")

    def _unseen(self, epoch: Epoch, why: str) -> OutcomeUnknown:
        # not done without that: a marker that is missing later on would say that the cluster was set back
        return OutcomeUnknown(
            f"epoch {epoch.number} is committed, and {self._target} has not shown it to readers within "
            f"{self._config.timeout:g} s: {why}",
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
                f"epoch {this.epoch} was committed by attempt {this.attempt}, and group {wrong} of "
                f"{self._target} shows {found.get(wrong)} in place of {wanted[wrong]}: the cluster "
                "was set back, or a driver on another copy of this checkpoint writes for the same query",
                hint="stop the other driver; look in the topic whether the rows of the last epochs are there, and once "
                "only; start again: the message then says how to go on",
            )

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # ---- steps

    def _abort(self, transaction: Transaction) -> None:
        self._busy.discard(transaction.transactional_id)
        try:
            self._transactions.end(transaction, self._cluster.deadline(), commit=False)
        except (Unreachable, Refused) as failure:
            log.warning("%s is left for the next sweep: %s", transaction.transactional_id, failure)

    def _ours(self, name: str) -> bool:
        return (parsed := TransactionalId.parse(name)) is not None and parsed.generation <= self._identity.generation
