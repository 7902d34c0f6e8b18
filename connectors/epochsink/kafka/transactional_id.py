"""Which transactional id a task attempt uses, and what names its transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from epochsink.identity import TransactionalId, identity_key, identity_label

if TYPE_CHECKING:
    from epochsink.sink import Task

ATTEMPTS: Final = 16
"""How many ids the attempts of one Spark partition and parity share.

Two attempts of one task that live at the same time (a retry or a speculative copy) should differ, or the later one
aborts what the earlier one prepared. With this number they collide one time in sixteen. A collision costs time and
never rows: before the vote it is seen there and the epoch runs again; after it, the marker in the Spark partition's
group proves that the transaction was not applied, and its rows are prepared again, out of the topic or the spool.
"""


def transactional_id(task: Task, *, bounded: bool) -> TransactionalId:
    """Return the id that one attempt at one Spark partition of an epoch uses.

    Epoch N may be prepared and uncommitted while N+1 is written: hence the parity. Where nobody keeps the rows, nothing
    repairs a collision, so the id is not ``bounded`` then: it bears the whole uuid and is never used again.
    """
    return TransactionalId(
        key=identity_key(task.identity),
        generation=task.identity.generation,
        partition=task.partition,
        parity=task.epoch.number % 2,
        attempt=int(task.uuid, 16) % ATTEMPTS,
        nonce="" if bounded else task.uuid,
        label=identity_label(task.identity),
    )


class Transaction(NamedTuple):
    """What names one transaction for good: an id that is used again has another producer epoch then."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
