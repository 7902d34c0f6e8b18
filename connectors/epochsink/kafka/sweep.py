"""Abort open transactions that no recorded epoch names, because they block the readers of their partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, cast

from epochsink.identity import TransactionalId
from epochsink.kafka.commit import unseen
from epochsink.kafka.committable import KafkaCommittable, Producer, Transaction
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.server import Description, KafkaServer, Partition, TransactionState
from epochsink.kafka.transactions import ENDING, Transactions
from epochsink.kafka.witness import Witness
from epochsink.sink import Epoch, Identity, Recorded, Remnant, identity_key, orphans

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01


class TransactionSweep:
    """The sweeps of one identity. ``busy`` holds the transactional ids of running replays: no sweep aborts them."""

    def __init__(self, cluster: KafkaServer, transactions: Transactions, fence: Fence, identity: Identity) -> None:
        self._cluster = cluster
        self._transactions = transactions
        self._witness = Witness(cluster)
        self._fence = fence
        self._generation = identity.generation
        self._prefix = TransactionalId.prefix(identity_key(identity))
        self.busy: set[str] = set()
        self._others: Mapping[Producer, Partition] = {}
        self._told: set[int] = set()

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return the open transactions, unless another driver has taken the fence: it sweeps itself."""
        return _remnants(self._unended((TransactionState.ONGOING,), self._cluster.deadline()), recorded)

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """Abort open transactions; their tasks may still run, and are fenced off."""
        return self._abort(remnants, self._cluster.deadline())

    def unblock(self, epoch: Epoch, parts: Sequence[KafkaCommittable], recorded: Callable[[], Recorded]) -> list[str]:
        """See `epochsink.sink.Participant.visible`: abort our transactions that are open before the parts' rows.

        They hold the last stable offset back. They belong to attempts that lost: an attempt at the next epoch begins to
        write after this epoch was recorded, unless a replay has moved this epoch's rows behind it.

        Warns of transactions there that no coordinator knows: nothing ends them.
        """
        deadline = self._cluster.deadline()
        lines: list[str] = []
        try:
            blocking = self._blocking(parts, deadline)
            # after the leaders answered: a transaction that was recorded until then must not be aborted
            known = recorded() if blocking else ((), ())
            while left := orphans(_remnants(blocking, known), self._generation, known):
                if self._cluster.clock.monotonic() >= deadline:
                    names = ", ".join(each.name for each in left)
                    raise unseen(epoch, self._cluster, f"transactions before its rows do not end: {names}")
                ongoing = [each for each in left if blocking[_transaction(each)].state is TransactionState.ONGOING]
                lines += self._abort(ongoing, deadline)
                # wait: the coordinator answers before it writes the ends to the partitions
                self._cluster.clock.sleep(_LOOK_AGAIN_SECONDS)
                blocking = self._blocking(parts, deadline)
            lines += self._end_others(parts, recorded, deadline)
        except (Unreachable, Refused) as failure:
            raise unseen(epoch, self._cluster, f"{failure.message}; {failure.hint}") from failure
        return lines

    def abort(self, transaction: Transaction) -> None:
        """Abort a transaction of this driver that will not be recorded, and let sweeps abort it if that fails."""
        self.busy.discard(transaction.transactional_id)
        self._transactions.give_up(transaction)

    def _blocking(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Transaction, Description]:
        """Return our transactions, open or ending, that hold readers back from the parts' rows; note the others."""
        self._others = producers = self._witness.open_before(parts, deadline)
        if not producers:
            return {}
        ids = {producer_id for producer_id, _ in producers}
        ours = {
            each: now
            for each, now in self._unended((TransactionState.ONGOING, *ENDING), deadline).items()
            # match the producer epoch too, unless it is ending: the id may be used again, for rows after this epoch
            if each.producer in producers or (now.state in ENDING and each.producer_id in ids)
        }
        self._others = {each: at for each, at in producers.items() if each not in {mine.producer for mine in ours}}
        return ours

    def _end_others(
        self, parts: Sequence[KafkaCommittable], recorded: Callable[[], Recorded], deadline: float
    ) -> list[str]:
        """End what no coordinator has open before the parts' rows, if it is ours, or warn, once for each producer id.

        Where a partition has no leader when an end is to be written, Kafka from 4.2 on leaves it out (KAFKA-20734).
        """
        others = {each: at for each, at in self._others.items() if each.producer_id not in self._told}
        if not others:
            return []
        known = self._transactions.unended({producer_id for producer_id, _ in others}, deadline)
        unknown = {each: at for each, at in others.items() if each.producer_id not in known}
        # look again: one that has ended since the first look is not listed either
        still = self._witness.open_before(parts, deadline) if unknown else {}
        left = unknown.keys() & still.keys()
        aborted = self._aborted(left, recorded, deadline) if left else {}
        refusal = self._write_aborts(parts, aborted, deadline) if aborted else ""
        for each in left if refusal else left - aborted.keys():
            self._tell(each, unknown[each], refusal if each in aborted else "")
        return [] if refusal else [f"wrote the left-out end of aborted transaction {aborted[each]}" for each in aborted]

    def _tell(self, producer: Producer, held: Partition, refusal: str) -> None:
        """Warn of a transaction that this driver does not end; ``refusal`` says why it may not."""
        self._told.add(producer.producer_id)
        topic, partition = held
        log.warning(
            "read_committed readers of %s-%d wait for an open transaction (producer %d, epoch %d) that no "
            "coordinator lists: %s. Find out: kafka-transactions.sh --bootstrap-server %s find-hanging "
            "--topic %s --partition %d. If other queries write to this topic, start them first: it may be a commit "
            "of theirs (KAFKA-20734). End what is still shown then by the tool's command 'abort'",
            topic,
            partition,
            *producer,
            f"it was aborted, and this user may not write its end ({refusal}), for want of the right to alter the "
            "cluster (operation Alter, resource Cluster)"
            if refusal
            else "either no coordinator knows it, and it never ends by itself, or this user may not DESCRIBE its "
            "transactional id",
            self._cluster.servers,
            topic,
            partition,
        )

    def _aborted(
        self, opened: Collection[Producer], recorded: Callable[[], Recorded], deadline: float
    ) -> dict[Producer, str]:
        """Return those of open transactions that are ours and were aborted, with the names of their ids."""
        ours = _remnants(self._unended((TransactionState.COMPLETE_ABORT,), deadline), ((), ()))
        names = {_transaction(each).producer_id: each.name for each in ours if each.generation <= self._generation}
        # whatever became of their ids since
        kept = {KafkaCommittable.from_json(part).transaction.producer for parts in recorded() for part in parts}
        return {each: names[each.producer_id] for each in opened if each.producer_id in names and each not in kept}

    def _write_aborts(self, parts: Sequence[KafkaCommittable], aborted: Collection[Producer], deadline: float) -> str:
        """Write ends; return why this user may not."""
        opened = self._witness.open_in({topic for part in parts for topic in part.topics}, aborted, deadline)
        try:
            self._witness.write_ends(opened, deadline, are_commits=False)
        except Refused as refusal:
            return refusal.message
        return ""

    def _unended(self, states: Sequence[TransactionState], deadline: float) -> dict[Transaction, Description]:
        """Return the transactions in these states, described; none if this driver may abort none."""
        names = self._transactions.ids(self._prefix, states, deadline)
        if not names:
            return {}
        described = self._transactions.describe([*names, self._fence.name], deadline)
        if self._fence.is_lost(described.pop(self._fence.name)):
            # another driver has taken the fence: it may have recorded the open transactions, and sweeps itself
            return {}
        return {
            Transaction(name, now.producer_id, now.producer_epoch): now
            for name, now in described.items()
            # `busy` is read after the listing: a replay adds its id before it begins
            if now.state in states and name not in self.busy
        }

    def _abort(self, left: Sequence[Remnant], deadline: float) -> list[str]:
        self._transactions.fence_off([_transaction(each) for each in left], deadline)
        return [f"aborted transaction {_named(_transaction(each))}" for each in left]


def _remnants(transactions: Mapping[Transaction, Description], recorded: Recorded) -> list[Remnant]:
    pending, done = ([(KafkaCommittable.from_json(part), part) for part in parts] for parts in recorded)
    named = {known.transaction: part for known, part in done if not _is_reopened(known, transactions)}
    named |= {known.transaction: part for known, part in pending}
    return [
        Remnant("transaction", each.transactional_id, name.generation, of=named.get(each), handle=each)
        for each in transactions
        if (name := TransactionalId.parse(each.transactional_id)) is not None
    ]


def _is_reopened(done: KafkaCommittable, transactions: Mapping[Transaction, Description]) -> bool:
    now = transactions.get(done.transaction)
    return now is not None and done.is_reopened(now.partitions)


def _transaction(remnant: Remnant) -> Transaction:
    return cast("Transaction", remnant.handle)


def _named(transaction: Transaction) -> str:
    name, producer_id, producer_epoch = transaction
    return f"{name} (producer {producer_id}, epoch {producer_epoch})"
