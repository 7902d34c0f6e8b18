"""What the driver remembers of a cluster."""

from __future__ import annotations

import logging
import threading
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kafka.protocol.metadata import CoordinatorType

from epochsink.kafka import cluster
from epochsink.kafka.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Answering(Cluster):
    """Knows the coordinator of whatever it is asked for, without a broker."""

    def ask(self, request: Any, node: int | None) -> Any:
        assert node is None
        keys = request.coordinator_keys
        return SimpleNamespace(coordinators=[SimpleNamespace(error_code=0, key=key, node_id=1) for key in keys])


def test_coordinators_of_ids_that_are_used_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a spool each task has an id of its own, for as long as the query runs."""
    monkeypatch.setattr(cluster, "_COORDINATORS_KEPT", 100)
    asked = Answering("127.0.0.1:1", {}, 1.0)
    for _ in range(50):
        ids = [uuid.uuid4().hex for _ in range(20)]
        assert asked._by_coordinator(CoordinatorType.TRANSACTION, ids) == {1: ids}
        assert len(asked._coordinators) <= 120


class Growing(Cluster):
    """Has the brokers ``there``, and answers a request with itself and the broker that got it."""

    there: tuple[int, ...] = (1,)

    def ask_all(self, requests: Sequence[tuple[int | None, Any]]) -> list[Any]:
        listed = SimpleNamespace(brokers=[SimpleNamespace(node_id=number) for number in self.there])
        return [listed if node is None else (node, request) for node, request in requests]


def test_each_broker_that_is_there_now_is_asked_with_a_request_of_its_own() -> None:
    """kafka-python's own list of them may be older, and what a broker coordinates would be left out of a listing."""
    cluster = Growing("127.0.0.1:1", {}, 1.0)
    for there in ((1,), (1,), (2, 1), (2,)):
        cluster.there = there
        asked = cluster.ask_brokers(object)
        assert [node for node, _ in asked] == sorted(there)
        assert len({id(request) for _, request in asked}) == len(there)


def test_questions_are_asked_at_the_same_time_and_answered_in_their_order() -> None:
    each = threading.Barrier(3)

    def question(number: int) -> Callable[[], int]:
        def ask() -> int:
            each.wait(10)
            return number

        return ask

    cluster = Cluster("127.0.0.1:1", {}, 1.0)
    assert cluster.beside(*map(question, range(3))) == [0, 1, 2]
    cluster.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_question_that_fails_lets_the_others_end_first(failing: int) -> None:
    ended: list[int] = []
    fails = threading.Event()

    def question(number: int) -> Callable[[], None]:
        def ask() -> None:
            if number == failing:
                fails.set()
                raise ConnectionError
            fails.wait(10)
            ended.append(number)

        return ask

    cluster = Cluster("127.0.0.1:1", {}, 1.0)
    with pytest.raises(ConnectionError):
        cluster.beside(*map(question, range(3)))
    assert sorted(ended) == [number for number in range(3) if number != failing]
    cluster.close()


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """Return the client's own logger, without a level."""
    found = logging.getLogger("kafka")
    level = found.level
    found.setLevel(logging.NOTSET)
    yield found
    found.setLevel(level)


def test_the_clients_own_log_is_quiet_unless_it_is_asked_for(log: logging.Logger) -> None:
    Cluster("127.0.0.1:1", {}, 1.0)
    assert not log.getChild("net").isEnabledFor(logging.INFO)
    assert log.getChild("net").isEnabledFor(logging.WARNING)
    log.setLevel(logging.DEBUG)
    Cluster("127.0.0.1:1", {}, 1.0)
    assert log.getChild("net").isEnabledFor(logging.DEBUG)
