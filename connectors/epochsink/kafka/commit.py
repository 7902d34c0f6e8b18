"""Commit the transactions of a decided epoch: look whether they are whole, end them, say what became of each."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from epochsink.errors import OutcomeUnknown, WentBack
from epochsink.failpoints import reach
from epochsink.kafka import end_txn
from epochsink.kafka.applied_epochs import committables, topics_of
from epochsink.kafka.end_txn import Answer, State
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.witness import Witness
from epochsink.sink import COMMITTED, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.kafka.applied_epochs import Markers
    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import KafkaCommittable
    from epochsink.kafka.config import KafkaConfig
    from epochsink.kafka.end_txn import Description
    from epochsink.kafka.leaders import Partition
    from epochsink.kafka.transactional_id import Transaction
    from epochsink.kafka.transactions import Transactions
    from epochsink.sink import Epoch, LastDone

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01
_MANY: Final = 8
"""Transactions of an epoch that are ended side by side: fewer are not worth it."""


class Commits:
    """The commits of the sink ``name``, whose ``markers`` these are. Used by one thread at a time."""

    def __init__(
        self, name: str, config: KafkaConfig, cluster: Cluster, transactions: Transactions, markers: Markers
    ) -> None:
        self._name = name
        self._config = config
        self._cluster = cluster
        self._transactions = transactions
        self._markers = markers
        self._witness = Witness(cluster)
        self._attempt = ""
        # where partitions ended when a transaction was seen whole, for the attempt that is committed now
        self._ends: dict[Transaction, Mapping[Partition, int]] = {}

    def commit(self, epoch: Epoch, parts: Sequence[KafkaCommittable], after: LastDone | None) -> list[Verdict]:
        """Decide that parts become visible; return a verdict for each. May be repeated.

        Each part gets one look at its partitions before it is ended, all parts in one request a broker. The first
        unknown outcome is that of the parts after it, too. Raises `WentBack` if ``after`` was written to other topics.
        """
        deadline = self._cluster.deadline()
        before = topics_of(committables(after)) if after else {}
        try:
            seen = self._witness.look(parts, before, deadline)
            # after the look: whoever commits a transaction tells the coordinator before the partitions
            now = self._describe([parts[index] for index in seen.missing], deadline)
        except (Unreachable, Refused) as failure:
            return [_unknown(part, failure) for part in parts]
        if after is not None:
            refuse_other_topics(self._target, after, seen.topics)
        self._note(epoch, [parts[index].transaction for index in seen.whole], seen.ends)
        decided = self._side_by_side(epoch, [parts[index] for index in seen.whole], deadline)
        verdicts: list[Verdict] = []
        for index, part in enumerate(parts):
            if verdicts and verdicts[-1].outcome is Outcome.UNKNOWN:
                verdicts.append(verdicts[-1])
                continue
            if part.transaction in decided:
                verdicts.append(COMMITTED)
                continue
            try:
                if index in seen.whole:
                    verdict = self._end(epoch, part, deadline)
                elif index in seen.missing:
                    verdict = self._without_rows(epoch, part, now[part.transaction], seen.missing[index], deadline)
                else:
                    verdict = self._without_topic(epoch, part, part.recreated(seen.topics), deadline)
            except (Unreachable, Refused) as failure:
                verdict = _unknown(part, failure)
            verdicts.append(verdict)
            reach("kafka.commit.between")
        return self._unless_recreated(parts, verdicts, deadline)

    def verify_whole(self, epoch: Epoch, parts: Sequence[KafkaCommittable], deadline: float) -> None:
        """Raise `OutcomeUnknown` if partitions have lost rows of committed parts, or have aborted them.

        What is lost between the look at the partitions and the commit is seen only now.
        """
        lost = self._witness.lost(parts, self._ends if self._attempt == epoch.attempt else {}, deadline)
        if lost is not None:
            raise OutcomeUnknown(
                f"epoch {epoch.number} was committed, and its rows are not all in {self._target}: {lost}. It is not "
                "written again, because the rows of other partitions would be duplicated",
                hint="find the rows of this epoch that are missing from the topic, and load them from the source; then "
                f"close the epoch: epochsink resolve CHECKPOINT {epoch.number} --sink {self._name} --as committed",
                epoch=epoch.number,
            )

    @property
    def _target(self) -> str:
        return f"Kafka at {self._config.bootstrap_servers}"

    def _note(self, epoch: Epoch, whole: Sequence[Transaction], ends: Mapping[Partition, int]) -> None:
        if self._attempt != epoch.attempt:
            self._attempt, self._ends = epoch.attempt, {}
        for transaction in whole:
            # the first look: an abort that came after it counts
            self._ends.setdefault(transaction, ends)

    def _side_by_side(self, epoch: Epoch, parts: Sequence[KafkaCommittable], deadline: float) -> set[Transaction]:
        """Send "commit" for many transactions without waiting for one before the next; return which are decided.

        Nothing is said of the others: whatever went wrong is met again, and named, when they are ended one by one.
        """
        if len(parts) < _MANY:
            return set()
        try:
            return self._transactions.commit_many([part.transaction for part in parts], deadline)
        except (Unreachable, Refused) as failure:
            log.info("epoch %d: its transactions are committed one by one, after %s", epoch.number, failure)
            return set()

    def _end(self, epoch: Epoch, part: KafkaCommittable, deadline: float) -> Verdict:
        while True:
            answer, name = self._transactions.end(part.transaction, deadline, commit=True)
            if answer is Answer.DECIDED:
                return COMMITTED
            if answer is Answer.REFUSED:
                return _unknown(part, f"the coordinator answers {name}; then start again")
            verdict = self._judge(epoch, part, self._describe([part], deadline)[part.transaction], deadline)
            if verdict is not None:
                return verdict
            self._wait(part, name, deadline)

    def _without_rows(
        self, epoch: Epoch, part: KafkaCommittable, now: Description, missing: str, deadline: float
    ) -> Verdict:
        """Say what became of a transaction that the partitions do not hold whole: lost, unless it was ended before."""
        while True:
            if now.is_of(part.transaction) and now.state is State.ONGOING:
                return Verdict(Outcome.ABORTED, missing)
            if now.is_of(part.transaction) and now.state is State.COMPLETE_COMMIT:
                return COMMITTED
            verdict = self._judge(epoch, part, now, deadline)
            if verdict is not None:
                return verdict
            self._wait(part, now.state.value, deadline)
            now = self._describe([part], deadline)[part.transaction]

    def _without_topic(
        self, epoch: Epoch, part: KafkaCommittable, recreated: Sequence[str], deadline: float
    ) -> Verdict:
        """Say what became of a transaction whose topic is another one now: if not committed, it is written again."""
        now = self._describe([part], deadline)[part.transaction]
        spooled = self._config.is_redone and not part.kept_in_topic  # what the topic kept has gone with it
        if now.is_of(part.transaction) and now.state is State.ONGOING and spooled:
            return Verdict(
                Outcome.ABORTED,
                f"{part.transaction.transactional_id} is open, and topic(s) {', '.join(recreated)}, which it has "
                "written to, were deleted and perhaps created again",
            )
        verdict = None if now.state is State.ONGOING else self._judge(epoch, part, now, deadline)
        if verdict is None or verdict.outcome is Outcome.COMMITTED:
            return _lost_with_topic(part, recreated)
        return verdict

    def _unless_recreated(
        self, parts: Sequence[KafkaCommittable], verdicts: list[Verdict], deadline: float
    ) -> list[Verdict]:
        """Ask for the topics again: one that was deleted since the look has taken its rows along."""
        committed = [index for index, verdict in enumerate(verdicts) if verdict is COMMITTED]
        try:
            topics = self._cluster.topic_ids(topics_of(parts[index] for index in committed), deadline)
        except (Unreachable, Refused) as failure:
            return [_unknown(part, failure) for part in parts]
        for index in committed:
            if recreated := parts[index].recreated(topics):
                verdicts[index] = _lost_with_topic(parts[index], recreated)
        return verdicts

    def _judge(self, epoch: Epoch, part: KafkaCommittable, now: Description, deadline: float) -> Verdict | None:
        marker = self._markers.of_partition(part.partition, deadline)
        age = time.time() - part.prepared_at
        return end_txn.verdict(
            part.transaction,
            now,
            epoch=epoch.number,
            marker=marker,
            marker_may_be_gone=marker is None and age > self._markers.retention(),
        )

    def _describe(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Transaction, Description]:
        ids = [part.transaction.transactional_id for part in parts]
        now = self._transactions.describe(ids, deadline) if ids else {}
        return {part.transaction: now[part.transaction.transactional_id] for part in parts}

    def _wait(self, part: KafkaCommittable, state: str, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise Unreachable(
                f"{part.transaction.transactional_id}: {state}, and no more after {self._config.timeout:g} s",
                hint="see that all brokers run; nothing is lost meanwhile",
            )
        time.sleep(_LOOK_AGAIN_SECONDS)


def refuse_other_topics(target: str, last: LastDone, now: Mapping[str, str]) -> None:
    """Raise `WentBack` if a topic is not the one that an epoch was written to; ``now`` has the ids by name."""
    if others := sorted({topic for part in committables(last) for topic in part.recreated(now)}):
        raise WentBack(
            f"topic(s) {', '.join(others)} of {target} are not those that epoch {last.epoch} was written to: they were "
            f"deleted, and perhaps created again, or this is another cluster; the rows up to epoch {last.epoch} are "
            "not in them",
            hint="if that is meant, accept it, and later epochs go there: epochsink accept CHECKPOINT "
            f"{last.epoch} --sink NAME; to fill them from the source, start with a new checkpoint folder",
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
