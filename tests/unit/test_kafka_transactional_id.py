"""Transactional ids: bounded with a spool, never used again without one."""

from __future__ import annotations

import uuid

from epochsink.identity import TransactionalId
from epochsink.kafka.committable import ATTEMPTS, transactional_id
from epochsink.sink import Epoch, Identity, Task

WHO = Identity("query", "sink", 3)


def of(epoch: int, partition: int = 5, name: str | None = None, *, bounded: bool = True) -> TransactionalId:
    return transactional_id(Task(WHO, Epoch(epoch, "a" * 32), partition, name or uuid.uuid4().hex), bounded=bounded)


def test_the_ids_of_all_attempts_at_all_epochs_are_bounded() -> None:
    ids = {str(of(epoch)) for epoch in range(4000)}
    assert len(ids) == 2 * ATTEMPTS
    assert all(str(TransactionalId.parse(text)) == text for text in ids)


def test_an_epoch_never_shares_an_id_with_the_one_before_it() -> None:
    assert not {str(of(6)) for _ in range(200)} & {str(of(7)) for _ in range(200)}


def test_partitions_and_generations_never_share_an_id() -> None:
    name = uuid.uuid4().hex
    assert of(0, partition=1, name=name) != of(0, partition=2, name=name)


def test_without_a_spool_each_attempt_has_an_id_of_its_own() -> None:
    name = uuid.uuid4().hex
    assert of(0, name=name, bounded=False).nonce == name
    assert TransactionalId.parse(str(of(0, name=name, bounded=False))) == of(0, name=name, bounded=False)
