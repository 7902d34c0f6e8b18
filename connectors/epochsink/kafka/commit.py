"""Commit the transactions of a decided epoch, and wait until readers see them.

EndTxn takes no condition. So the partitions' leaders are asked for the rows before EndTxn and again after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epochsink.errors import OutcomeUnknown, WentBack, sink_option
from epochsink.failpoints import reach
from epochsink.kafka.applied_epochs import Markers, committables, topics_of
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.server import Description, End, KafkaServer, Partition, ProducerState, TransactionState
from epochsink.kafka.transactions import ENDING, EndTxnResult, Transactions, verdict_on
from epochsink.kafka.witness import Seen, Witness
from epochsink.sink import COMMITTED, Ballot, Epoch, LastDone, Mark, Outcome, Verdict, one_by_one

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01
_MARKERS_SECONDS: Final = 2.0
"""After how long the brokers are asked why a marker does not show; it takes milliseconds."""
_MANY: Final = 8
"""The least number of transactions that are ended side by side: for fewer it saves no time."""


class TransactionCommits:
    """The commits of the sink ``name``; ``markers`` are its markers. Used by one thread at a time."""

    def __init__(
        self, name: str, config: KafkaConfig, cluster: KafkaServer, transactions: Transactions, markers: Markers
    ) -> None:
        self._name = name
        self._config = config
        self._cluster = cluster
        self._transactions = transactions
        self._markers = markers
        self._witness = Witness(cluster)
        self._attempt = ""
        # the ends of the partitions when a transaction was first seen whole; for the attempt that is committed now
        self._ends: dict[Transaction, Mapping[Partition, End]] = {}
        self._decided: set[Transaction] = set()
        self._blocked = False
        self.lost: set[Transaction] = set()
        """Those that a search of the log has shown to be lost, while the fence keeps others out."""

    def commit(self, epoch: Epoch, parts: Sequence[KafkaCommittable], after: LastDone | None) -> list[Verdict]:
        """Commit the parts; return a verdict for each. May be repeated.

        The leaders are asked about all parts at once, before the first transaction is ended. After the first unknown
        outcome, the outcomes of the later parts are unknown too. Raises `WentBack` if ``after`` was written to other
        topics, and `OutcomeUnknown` if the coordinator refuses to abort a transaction that has lost its rows.
        """
        deadline = self._cluster.deadline()
        before = topics_of(committables(after)) if after else {}
        try:
            seen = self._witness.look(parts, before, deadline)
            # after the look: a commit reaches the partitions last, so the other order could miss it
            now = self._describe([parts[index] for index in seen.missing], deadline)
        except (Unreachable, Refused) as failure:
            return [_unknown(part, failure) for part in parts]
        if after is not None:
            refuse_other_topics(self._cluster.target, after, seen.topics)
        self._note(epoch, [parts[index].transaction for index in seen.whole], seen)
        decided = self._side_by_side(epoch, [parts[index] for index in seen.whole], deadline)

        def commit_one(index: int) -> Verdict:
            part = parts[index]
            try:
                if index in seen.whole:
                    verdict = self._end(epoch, part, deadline)
                elif index in seen.missing:
                    verdict = self._without_rows(epoch, part, now[part.transaction], seen.missing[index], deadline)
                else:
                    verdict = self._without_topic(epoch, part, part.recreated(seen.topics), deadline)
            except (Unreachable, Refused) as failure:
                verdict = _unknown(part, failure)
            reach("kafka.commit.between")
            return verdict

        # after an unknown outcome nothing more is ended: a later call tries again
        return one_by_one(
            range(len(parts)), commit_one, {index for index in seen.whole if parts[index].transaction in decided}
        )

    def await_visible(self, epoch: Epoch, ballot: Ballot) -> None:
        """See `epochsink.sink.Participant.visible`.

        EndTxn takes no condition, so a loss between the look and the commit is seen only now. The topics' partitions
        must hold the rows, and each Spark partition must show the markers of this epoch and of the one before it.
        """
        deadline = self._cluster.deadline()
        parts = [KafkaCommittable.from_json(part) for part in ballot.parts]
        try:
            self._expect_whole(epoch, parts, deadline)
            self._expect_marked(epoch, ballot, deadline)
        except (Unreachable, Refused) as failure:
            raise unseen(epoch, self._cluster, f"{failure.message}; {failure.hint}") from failure

    def await_whole(self, epoch: Epoch, part: KafkaCommittable) -> None:
        """Wait until readers see a committed part, with all rows; its marker may be a later one's by now."""
        try:
            self._expect_whole(epoch, [part], self._cluster.deadline())
        except (Unreachable, Refused) as failure:
            raise unseen(epoch, self._cluster, failure.message) from failure

    def _expect_whole(self, epoch: Epoch, parts: Sequence[KafkaCommittable], deadline: float) -> None:
        """Wait until partitions show the ends of committed parts, with all rows.

        Raises `OutcomeUnknown` if partitions lost or aborted rows between the look before the commit and the commit.
        """
        ends = self._ends if self._attempt == epoch.attempt else {}
        ended = False
        while True:
            loss = self._witness.lost(parts, ends, deadline, ended=ended, decided=self._decided)
            if loss.words is not None:
                raise self._lost(epoch, loss.words)
            if not loss.unseen:
                return
            if ended:
                # the ends were deleted since, or never written
                if not (opened := self._witness.left_open(parts, deadline)):
                    return
                self._write_ends(epoch, parts, opened, deadline)
            else:
                # the ends are still being written, or are not there: only the coordinator can tell
                ended = not self._ending(epoch, loss.unseen, deadline)

    def _write_ends(
        self,
        epoch: Epoch,
        parts: Sequence[KafkaCommittable],
        opened: Mapping[Partition, Sequence[ProducerState]],
        deadline: float,
    ) -> None:
        """Write ends of committed parts that their coordinator has left out; see `Witness.left_open`."""
        places = ", ".join("{}-{}".format(*at) for at in sorted(opened))
        why = (
            f"{places} had no leader when the ends of its transactions were written, and brokers from Kafka 4.2 on "
            "leave such partitions out (KAFKA-20734)"
        )
        epochs = dict(part.transaction.producer for part in parts)
        for at, states in opened.items():
            if any(each.producer_epoch != epochs[each.producer_id] for each in states):
                raise self._lost(
                    epoch,
                    "in {}-{}, the end of a transaction was left out, and another attempt at its task has written "
                    "there since: these rows are aborted together with its own".format(*at),
                )
        left_out = {each.producer_id for states in opened.values() for each in states}
        waiting = [part for part in parts if part.transaction.producer_id in left_out]
        now = self._describe(waiting, deadline)
        verdicts = [self._judge(epoch, part, now[part.transaction], deadline) for part in waiting]
        if verdicts != [COMMITTED] * len(waiting) or self._cluster.clock.monotonic() >= deadline:
            raise unseen(epoch, self._cluster, why)
        log.warning("epoch %d: %s: they are written now", epoch.number, why)
        try:
            self._witness.write_ends(opened, deadline)
        except Refused as refusal:
            raise OutcomeUnknown(
                f"epoch {epoch.number} is committed, and read_committed readers do not get it: {why}. This user may "
                f"not write the ends: {refusal.message}",
                hint="no row is lost. Give this user the right to alter the cluster (operation Alter, resource "
                "Cluster), and start again: the start writes the ends. Do not abort the transaction with Kafka's own "
                "tools: its rows are committed",
                epoch=epoch.number,
            ) from refusal

    def _ending(self, epoch: Epoch, transactions: Iterable[Transaction], deadline: float) -> list[str]:
        """Return the ids of the transactions whose end is still being written to partitions."""
        ids = [each.transactional_id for each in transactions]
        now = self._transactions.describe(ids, deadline)
        ending = [name for name in ids if now[name].state in ENDING]
        if ending and self._cluster.clock.monotonic() >= deadline:
            raise unseen(epoch, self._cluster, f"not written to the partitions yet: {', '.join(ending)}")
        return ending

    def _expect_marked(self, epoch: Epoch, ballot: Ballot, deadline: float) -> None:
        """Raise `WentBack` unless the marker of each part of this epoch and of the epoch before exists."""
        this, after = LastDone(epoch.number, epoch.attempt, tuple(ballot.parts)), ballot.after
        # also the epoch before: the cluster may have been set back behind it just before EndTxn
        groups = self._markers.marks_of(this).keys() | (self._markers.marks_of(after).keys() if after else set())
        patience = self._cluster.clock.monotonic() + _MARKERS_SECONDS
        while True:
            marks = self._markers.read(groups, deadline)
            # if the epoch was prepared long ago, its own marker expires as soon as it is committed
            ours = self._markers.marks_of(self._markers.unexpired(this, marks))
            if all(name in marks and marks[name].epoch >= this.epoch for name in ours):
                break
            if self._cluster.clock.monotonic() >= min(patience, deadline):
                # a group's offsets are in a partition too: the end may be written there later than in the topic
                parts = committables(this)
                if not self._ending(epoch, [part.transaction for part in parts], deadline):
                    if opened := self._markers_left_open(parts, deadline):
                        self._write_ends(epoch, parts, opened, deadline)
                    elif self._cluster.clock.monotonic() >= deadline:
                        break
                patience = self._cluster.clock.monotonic() + _MARKERS_SECONDS
            self._cluster.clock.sleep(_LOOK_AGAIN_SECONDS)
        # if only empty epochs are in between, both may share a group: this marker has replaced the one before
        before = self._markers.marks_of(self._markers.unexpired(after, marks)) if after else {}
        wanted = before | ours
        wrong = next((name for name, mark in wanted.items() if not mark.agrees(marks.get(name))), None)
        if wrong is not None:
            raise WentBack(
                f"epoch {this.epoch} was committed by attempt {this.attempt}, and group {wrong} of "
                f"{self._cluster.target} shows {marks.get(wrong)} in place of {wanted[wrong]}: the cluster "
                "was set back, or a driver on another copy of this checkpoint writes for the same query",
                hint=f"its rows are in the topic, and its marker was deleted or lost: each start says the same. {_STOP}"
                f"If it does: epochsink accept CHECKPOINT {this.epoch} {sink_option(self._name)}; then start again"
                if _lacks_only_its_own(wanted, ours, marks)
                else f"{_STOP}Then start again: the next message says how to continue",
            )

    def _markers_left_open(
        self, parts: Sequence[KafkaCommittable], deadline: float
    ) -> Mapping[Partition, Sequence[ProducerState]]:
        try:
            return self._witness.markers_left_open(parts, deadline)
        except (Refused, Unreachable):
            # without the right to read the internal topic: the markers are missing then
            return {}

    def _lost(self, epoch: Epoch, what: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"epoch {epoch.number} was committed, and its rows are not all in {self._cluster.target}: {what}. It "
            "is not written again, because the rows of other partitions would be duplicated",
            hint="find the rows of this epoch that are missing from the topic, and load them from the source; then "
            f"close the epoch: epochsink resolve CHECKPOINT {epoch.number} {sink_option(self._name)} --as committed",
            epoch=epoch.number,
        )

    def may_be_blocked(self, epoch: Epoch) -> bool:
        """Whether other transactions were open before an epoch's rows when its commit began; True if unknown."""
        return self._attempt != epoch.attempt or self._blocked

    def _note(self, epoch: Epoch, whole: Sequence[Transaction], seen: Seen) -> None:
        if self._attempt != epoch.attempt:
            self._attempt, self._ends, self._decided, self._blocked = epoch.attempt, {}, set(), False
        self._blocked |= bool(seen.before)
        for transaction in whole:
            # keep the first look: an abort after it has to be found
            self._ends.setdefault(transaction, seen.ends)

    def _side_by_side(self, epoch: Epoch, parts: Sequence[KafkaCommittable], deadline: float) -> set[Transaction]:
        """Commit many transactions without waiting for each answer; return those that the coordinator has decided.

        The others are ended one by one afterwards, so that the error names the transaction.
        """
        # few are ended one by one: after an unknown outcome no further transaction is ended
        if len(parts) < _MANY:
            return set()
        try:
            decided = self._transactions.commit_many([part.transaction for part in parts], deadline)
        except (Unreachable, Refused) as failure:
            log.info("epoch %d: its transactions are committed one by one, because of %s", epoch.number, failure)
            return set()
        self._decided |= decided
        return decided

    def _end(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> Verdict:
        while True:
            answer, name = self._transactions.end(part.transaction, deadline, commit=True)
            # the coordinator has stored the decision: it writes the ends to the partitions by itself
            if answer is EndTxnResult.DECIDED:
                self._decided.add(part.transaction)
                return COMMITTED
            if answer is EndTxnResult.REFUSED:
                return _unknown(part, f"the coordinator answers {name}; then start again")
            # the id may be in use again, after a commit whose answer was lost: the marker decides
            verdict = self._judge(epoch, part, self._describe([part], deadline)[part.transaction], deadline)
            if verdict is not None and verdict.outcome is Outcome.UNKNOWN and part.transaction in self.lost:
                # set back: its rows are nowhere, though another transaction has got its producer id and its place
                return Verdict(Outcome.ABORTED, verdict.evidence)
            if verdict is not None:
                return verdict
            self._wait(part, name, deadline)

    def _without_rows(
        self, epoch: Epoch, part: KafkaCommittable, now: Description, missing: str, deadline: float
    ) -> Verdict:
        """Return the verdict on a transaction that the partitions do not hold whole."""
        if part.transaction in self.lost:
            # whatever a marker may say that has expired, or an id that is used again
            return Verdict(Outcome.ABORTED, missing)
        is_open = now.is_of(part.transaction) and now.state is TransactionState.ONGOING
        if is_open:
            # its rows were lost, or were committed, and a request that came twice has opened it again: the marker
            # tells, and brokers show no marker of the group while a transaction holds one
            answer, detail = self._transactions.end(part.transaction, deadline, commit=False)
            if answer is EndTxnResult.REFUSED:
                raise not_aborted(epoch, part.transaction, detail, now.state)
            now = self._describe([part], deadline)[part.transaction]
        while (verdict := self._judge(epoch, part, now, deadline)) is None:
            self._wait(part, now.state.value, deadline)
            now = self._describe([part], deadline)[part.transaction]
        return Verdict(Outcome.ABORTED, missing) if is_open and verdict.outcome is Outcome.ABORTED else verdict

    def _without_topic(
        self, epoch: Epoch, part: KafkaCommittable, recreated: Sequence[str], deadline: float
    ) -> Verdict:
        """Return the verdict on a transaction whose topic was deleted, and perhaps created again."""
        now = self._describe([part], deadline)[part.transaction]
        spooled = self._config.is_redone and not part.kept_in_topic  # rows that only the topic kept are gone with it
        is_open = now.state is TransactionState.ONGOING and not part.is_reopened(now.partitions)
        if now.is_of(part.transaction) and is_open and spooled:
            return Verdict(
                Outcome.ABORTED,
                f"{part.transaction.transactional_id} is open, and its topic(s) {', '.join(recreated)} were deleted, "
                "and perhaps created again",
            )
        verdict = None if now.state is TransactionState.ONGOING else self._judge(epoch, part, now, deadline)
        # even if it was committed, its rows are gone with the topic: an operator has to decide
        if verdict is None or verdict.outcome is Outcome.COMMITTED:
            return _lost_with_topic(part, recreated)
        return verdict

    def _judge(self, epoch: Epoch, part: KafkaCommittable, now: Description, deadline: float) -> Verdict | None:
        # read after `now`: a commit in between then shows in the marker
        marker = self._markers.of_partition(part.partition, deadline)
        verdict = self._verdict(epoch, part, now, marker)
        if verdict is None or verdict.outcome is not Outcome.ABORTED:
            return verdict
        # brokers may show a marker late, and a commit that counts as aborted would be written again
        seen = {each for each in (marker, self._markers.settled(epoch.number, part, deadline)) if each is not None}
        return self._verdict(epoch, part, now, max(seen, default=None))

    def _verdict(self, epoch: Epoch, part: KafkaCommittable, now: Description, marker: int | None) -> Verdict | None:
        age = self._cluster.clock.time() - part.prepared_at
        gone = marker is None and age > self._markers.retention()
        return verdict_on(part.transaction, now, epoch=epoch.number, marker=marker, marker_may_be_gone=gone)

    def _describe(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Transaction, Description]:
        ids = [part.transaction.transactional_id for part in parts]
        now = self._transactions.describe(ids, deadline) if ids else {}
        return {part.transaction: now[part.transaction.transactional_id] for part in parts}

    def _wait(self, part: KafkaCommittable, state: str, deadline: float) -> None:
        if self._cluster.clock.monotonic() >= deadline:
            raise Unreachable(
                f"{part.transaction.transactional_id} is still {state} after {self._config.timeout:g} s",
                hint="check that all brokers run; no row is lost",
            )
        self._cluster.clock.sleep(_LOOK_AGAIN_SECONDS)


_STOP: Final = (
    "Stop the other driver, if there is one. Check that the topic has the rows of the last epochs, without duplicates. "
)


def _lacks_only_its_own(wanted: Mapping[str, Mark], ours: Mapping[str, Mark], marks: Mapping[str, Mark]) -> bool:
    """Whether only markers of an epoch itself are missing or older, so that nothing shows another driver or a loss."""
    wrong = [name for name, mark in wanted.items() if not mark.agrees(marks.get(name))]
    return all(name in ours and (name not in marks or marks[name].epoch < ours[name].epoch) for name in wrong)


def refuse_other_topics(target: str, last: LastDone, now: Mapping[str, str]) -> None:
    """Raise `WentBack` if an epoch was written to a topic of another id; ``now`` has the ids by name."""
    if others := sorted({topic for part in committables(last) for topic in part.recreated(now)}):
        raise WentBack(
            f"topic(s) {', '.join(others)} of {target} are not those that epoch {last.epoch} was written to: they were "
            f"deleted, and perhaps created again, or this is another cluster; the rows up to epoch {last.epoch} are "
            "not in them",
            hint="if this was intended, later epochs can go to the new topics: epochsink accept CHECKPOINT "
            f"{last.epoch} --sink NAME; to load all rows from the source, start with a new checkpoint folder",
        )


def _unknown(part: KafkaCommittable, why: Unreachable | Refused | str) -> Verdict:
    text = why if isinstance(why, str) else f"{why.message}; {why.hint}"
    return Verdict(Outcome.UNKNOWN, f"{part.transaction.transactional_id}: {text}")


def _lost_with_topic(part: KafkaCommittable, recreated: Sequence[str]) -> Verdict:
    return Verdict(
        Outcome.UNKNOWN,
        f"topic(s) {', '.join(recreated)} were deleted, and perhaps created again, since {part.rows} row(s) of "
        f"Spark partition {part.partition} were written to them; {part.transaction.transactional_id} may have been "
        "committed before that or after it",
    )


def not_aborted(epoch: Epoch, transaction: Transaction, detail: str, state: TransactionState) -> OutcomeUnknown:
    """Return the error for a transaction that has lost its rows, and that the coordinator refuses to abort."""
    return OutcomeUnknown(
        f"epoch {epoch.number}: transaction {transaction.transactional_id} has lost rows, and cannot be "
        f"aborted: the coordinator answers {detail}, and its state is {state.value}",
        hint="its rows are not written again; look at the epoch: epochsink status CHECKPOINT",
        epoch=epoch.number,
    )


def unseen(epoch: Epoch, cluster: KafkaServer, why: str) -> OutcomeUnknown:
    """Return the error for a committed epoch that the cluster does not show in time."""
    # such an epoch is not done yet: if it were, a missing marker would later mean that the cluster was set back
    return OutcomeUnknown(
        f"epoch {epoch.number} is committed, and {cluster.target} has not shown it to readers within "
        f"{cluster.timeout:g} s: {why}",
        hint="no row is lost: the epoch stays in the ledger, and the next start looks again; check that all "
        "brokers run",
        epoch=epoch.number,
    )
