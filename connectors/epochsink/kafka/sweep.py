"""Abort open transactions that no recorded epoch names, because they block the readers of their partitions."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from epochsink.errors import WentBack
from epochsink.identity import TransactionalId, identity_key
from epochsink.kafka.commit import unseen
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.transactions import ENDING, State
from epochsink.kafka.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import Producer
    from epochsink.kafka.fence import Fence
    from epochsink.kafka.leaders import Partition
    from epochsink.kafka.transactions import Transactions
    from epochsink.sink import Committable, Committables, Epoch, Identity, Recorded

log = logging.getLogger("epochsink.kafka")

_LOOK_AGAIN_SECONDS: Final = 0.01


class Sweep:
    """The sweeps of one identity. ``busy`` holds the transactional ids of running replays: no sweep aborts them."""

    def __init__(self, cluster: Cluster, transactions: Transactions, fence: Fence, identity: Identity) -> None:
        self._cluster = cluster
        self._transactions = transactions
        self._witness = Witness(cluster)
        self._fence = fence
        self._generation = identity.generation
        self._prefix = TransactionalId.prefix(identity_key(identity))
        self.busy: set[str] = set()
        self._others: Mapping[Producer, Partition] = {}
        self._told: set[int] = set()

    def abort_orphans(self, keep: Committables, done: Committables) -> list[str]:
        """See `epochsink.sink.Participant.abort_orphans`."""
        deadline = self._cluster.deadline()
        kept = _transactions(keep)
        ongoing = self._unended((State.ONGOING,), deadline)
        return self._abort([each for each in ongoing if each not in kept], done, deadline)

    def unblock(self, epoch: Epoch, parts: Sequence[KafkaCommittable], recorded: Callable[[], Recorded]) -> list[str]:
        """See `epochsink.sink.Participant.unblock`: abort our transactions that are open before the parts' rows.

        They hold the last stable offset back. They belong to attempts that lost: an attempt at the next epoch begins to
        write after this epoch was recorded, unless a replay has moved this epoch's rows behind it.

        Warns of transactions there that no coordinator knows: nothing ends them.
        """
        deadline = self._cluster.deadline()
        lines: list[str] = []
        try:
            blocking = self._blocking(parts, deadline)
            # after the leaders answered: a transaction that was recorded until then must not be aborted
            keep, done = recorded() if blocking else ((), ())
            kept = _transactions(keep)
            while blocking := {each: state for each, state in blocking.items() if each not in kept}:
                if time.monotonic() >= deadline:
                    names = ", ".join(each.transactional_id for each in blocking)
                    raise unseen(epoch, self._cluster, f"transactions before its rows do not end: {names}")
                ongoing = [each for each, state in blocking.items() if state is State.ONGOING]
                lines += self._abort(ongoing, done, deadline)
                # wait: the coordinator answers before it writes the ends to the partitions
                time.sleep(_LOOK_AGAIN_SECONDS)
                blocking = self._blocking(parts, deadline)
            self._warn_of_unknown(parts, deadline)
        except (Unreachable, Refused) as failure:
            raise unseen(epoch, self._cluster, f"{failure.message}; {failure.hint}") from failure
        return lines

    def abort(self, transaction: Transaction) -> None:
        """Abort a transaction of this driver that will not be recorded, and let sweeps abort it if that fails."""
        self.busy.discard(transaction.transactional_id)
        self._transactions.give_up(transaction)

    def _blocking(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Transaction, State]:
        """Return our transactions, open or ending, that hold readers back from the parts' rows; note the others."""
        self._others = producers = self._witness.open_before(parts, deadline)
        if not producers:
            return {}
        ids = {producer_id for producer_id, _ in producers}
        ours = {
            each: state
            for each, state in self._unended((State.ONGOING, *ENDING), deadline).items()
            # match the producer epoch too, unless it is ending: the id may be used again, for rows after this epoch
            if each.producer in producers or (state in ENDING and each.producer_id in ids)
        }
        self._others = {each: at for each, at in producers.items() if each not in {mine.producer for mine in ours}}
        return ours

    def _warn_of_unknown(self, parts: Sequence[KafkaCommittable], deadline: float) -> None:
        """Warn, once for each producer id, of open transactions before the parts' rows that no coordinator has."""
        others = {each: at for each, at in self._others.items() if each.producer_id not in self._told}
        if not others:
            return
        known = self._transactions.unended({producer_id for producer_id, _ in others}, deadline)
        unknown = {each: at for each, at in others.items() if each.producer_id not in known}
        # look again: one that has ended since the first look is not listed either
        still = self._witness.open_before(parts, deadline) if unknown else {}
        for each in unknown.keys() & still.keys():
            self._told.add(each.producer_id)
            topic, partition = unknown[each]
            log.warning(
                "read_committed readers of %s-%d wait for an open transaction (producer %d, epoch %d) that no "
                "coordinator lists: either no coordinator knows it, and it never ends by itself, or this user may not "
                "DESCRIBE its transactional id. Find out: kafka-transactions.sh --bootstrap-server %s find-hanging "
                "--topic %s --partition %d; end what it shows by the tool's command 'abort'",
                topic,
                partition,
                *each,
                self._cluster.servers,
                topic,
                partition,
            )

    def _unended(self, states: Sequence[State], deadline: float) -> dict[Transaction, State]:
        """Return the transactions in these states that this driver may abort, with their states."""
        names = [name for name in self._transactions.ids(self._prefix, states, deadline) if self._is_ours(name)]
        if not names:
            return {}
        described = self._transactions.describe([*names, self._fence.name], deadline)
        if self._fence.is_lost(described.pop(self._fence.name)):
            # another driver has taken the fence: it may have recorded the open transactions, and sweeps itself
            return {}
        return {
            Transaction(name, now.producer_id, now.producer_epoch): now.state
            for name, now in described.items()
            # `busy` is read after the listing: a replay adds its id before it begins
            if now.state in states and name not in self.busy
        }

    def _is_ours(self, name: str) -> bool:
        return (parsed := TransactionalId.parse(name)) is not None and parsed.generation <= self._generation

    def _abort(self, orphans: Sequence[Transaction], done: Committables, deadline: float) -> list[str]:
        """Abort transactions that no recorded epoch names; their tasks may still run, and are fenced off."""
        lost = _transactions(done)
        for each in orphans:
            if each in lost:
                raise WentBack(
                    f"transaction {_named(each)} is open, and the ledger says that its epoch is done: the cluster has "
                    "lost the commit, as after an unclean leader election; its rows are not visible",
                    hint="restore the newer state of the cluster; the transaction is left open",
                )
        self._transactions.fence_off(orphans, deadline)
        return [f"aborted transaction {_named(each)}" for each in orphans]


def _transactions(parts: Iterable[Committable]) -> set[Transaction]:
    return {KafkaCommittable.from_json(part).transaction for part in parts}


def _named(transaction: Transaction) -> str:
    name, producer_id, producer_epoch = transaction
    return f"{name} (producer {producer_id}, epoch {producer_epoch})"
