"""Fence drivers on other copies of the checkpoint: only the newest driver may prepare.

The ledger fences drivers of one checkpoint. A copy of the checkpoint has its own ledger, and EndTxn takes no
condition. So each driver initialises the same transactional id at its start, and the brokers give that id a new
producer epoch. No transaction is begun under this id. A later look at the id shows whether another driver has started.

Two copies cannot commit the same epoch, because of this order. A driver looks at the fence after it prepares and before
it records (in the vote, and in each replay). The other driver takes the fence first, then aborts every open
transaction, waits for those that are being committed, and reads the markers last. If the look came before the fence was
taken, the other driver aborts the transaction or sees its marker. If the look came after, the driver that looks stops.
"""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from typing import Final

from epochsink.errors import Fenced, WentBack
from epochsink.identity import FenceHolder, TransactionalId, fence_id
from epochsink.kafka.committable import Producer
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.server import Description, KafkaServer, TransactionState
from epochsink.kafka.transactions import Transactions
from epochsink.sink import Identity, identity_key

_LOOK_AGAIN_SECONDS: Final = 0.01


class Fence:
    """The fence of one identity in a cluster. Deadlines are monotonic seconds.

    Raises what `Transactions` raises.
    """

    def __init__(self, cluster: KafkaServer, transactions: Transactions, identity: Identity) -> None:
        self._transactions = transactions
        self._key = identity_key(identity)
        self._generation = identity.generation
        self._target = cluster.target
        self._clock = cluster.clock
        self.name = fence_id(self._key)
        self._taken: Producer | None = None

    def take(self, deadline: float) -> None:
        """Fence the drivers that took it before. Raises `WentBack` if one of them has a later generation."""
        # first: a driver of a later generation must not be fenced by this one
        self._refuse_newer(deadline)
        self._taken = self._transactions.initialise(self.name, deadline)
        # a second id that only names this driver: the error of the fenced driver shows it
        ours = FenceHolder(self._key, *self._taken, int(self._clock.time()), os.getpid(), socket.gethostname())
        self._transactions.initialise(str(ours), deadline)

    @property
    def is_taken(self) -> bool:
        """Whether this driver has taken the fence, so that a sweep has aborted what others had open."""
        return self._taken is not None

    def await_others(self, deadline: float) -> None:
        """Wait until the markers of other drivers' commits are visible. Called after the first sweep under the fence.

        Does nothing if this driver has not taken the fence.
        """
        if self._taken is None:
            return
        while self._transactions.ids(TransactionalId.prefix(self._key), (TransactionState.PREPARE_COMMIT,), deadline):
            if self._clock.monotonic() >= deadline:
                raise Unreachable(
                    f"{self._target} has not ended transactions of this query in time",
                    hint="check that all brokers run; no row is lost",
                )
            self._clock.sleep(_LOOK_AGAIN_SECONDS)
        # again: a driver of a later generation may have begun a transaction during the wait
        self._refuse_newer(deadline)

    def _refuse_newer(self, deadline: float) -> None:
        """Raise `WentBack` if a transaction of a later generation is open: this driver must not abort it.

        A later generation on the same checkpoint would be in the ledger, so the other driver runs on another copy and
        has started later, or the clock of its machine was ahead.
        """
        for name in self._transactions.open_ids(TransactionalId.prefix(self._key), deadline):
            parsed = TransactionalId.parse(name)
            if parsed is not None and parsed.generation > self._generation:
                raise WentBack(
                    f"transaction {name} of {self._target} is open: a driver of this query in generation "
                    f"{parsed.generation} has begun it, and this one is generation {self._generation}, so a driver on "
                    "another copy of this checkpoint has started later, and runs or has run until now",
                    hint="stop the other driver, or use its copy of the checkpoint. If neither exists, wait "
                    "until the brokers abort the transaction (transaction_timeout=), or abort it: "
                    "epochsink orphans --bootstrap-servers SERVERS",
                )

    def is_lost(self, now: Description) -> bool:
        """Whether another driver has taken the fence since; ``now`` describes the id ``name``."""
        if self._taken is None or now.state is TransactionState.NOT_FOUND:
            # brokers forget an id after days without use, so no other driver has taken it
            return False
        # an older epoch is not a loss: the cluster was set back, and the markers show that
        return now.producer_id != self._taken.producer_id or now.producer_epoch > self._taken.producer_epoch

    def look(self, deadline: float) -> None:
        """Ask the coordinator, and raise `Fenced` if another driver has taken the fence."""
        self.verify(self._transactions.describe([self.name], deadline)[self.name], deadline)

    def verify(self, now: Description, deadline: float) -> None:
        """Raise `Fenced` if another driver has taken the fence; ``now`` describes the id ``name``."""
        if not self.is_lost(now):
            return
        names = self._transactions.ids(FenceHolder.prefix(self._key), (TransactionState.EMPTY,), deadline)
        holders = [holder for holder in map(FenceHolder.parse, names) if holder is not None]
        at = (now.producer_id, now.producer_epoch)
        who = next((_described(one) for one in holders if (one.producer_id, one.producer_epoch) == at), "just now")
        raise Fenced(
            f"another driver writes for this query to {self._target} ({who}), and the ledger of this checkpoint does "
            "not name it, so it runs on another copy of the checkpoint; this query stops and writes nothing more",
            hint="keep one copy of the checkpoint, and run one driver on it: stop the other one, or remove this copy. "
            "No row is lost: a driver on the older copy stops at its start, with an error that says so",
        )


def _described(holder: FenceHolder) -> str:
    since = datetime.fromtimestamp(holder.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"since {since}, process {holder.process} on host {holder.host}"
