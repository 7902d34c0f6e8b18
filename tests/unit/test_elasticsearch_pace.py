"""How many bulk requests are sent at once, and how large, while a server answers 429 and afterwards."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import elasticsearch
import pytest
from elasticsearch_rig import rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import bulk_body
from epochsink.elasticsearch.bulk_request import Poster, post_all
from epochsink.elasticsearch.errors import GaveUp
from epochsink.elasticsearch.pace import Pace
from epochsink.elasticsearch.server import ElasticsearchServer

FINE = Answer(200, b'{"errors":false}')
FULL = Answer(429, b'{"error":{"type":"es_rejected_execution_exception","reason":"full"},"status":429}')
OVERLOADED = {"status": 429, "error": {"type": "es_rejected_execution_exception", "reason": "queue is full"}}
HEADS = bulk_body.action_heads(version=1, version_type="external_gte")
GO_ON = threading.Event()


def request_of(first: int, count: int) -> bulk_body.Request:
    batch = rendered([(f"{number:04}", {"n": 1}) for number in range(first, first + count)])
    return bulk_body.render(batch["id"], batch["source"], HEADS)


ONE = request_of(0, 1).size


def refuse(pace: Pace, requests: int = 1) -> None:
    for _ in range(requests):
        with pace.turn(GO_ON) as turn:
            turn.overloaded()


def succeed(pace: Pace, requests: int = 1) -> None:
    for _ in range(requests):
        with pace.turn(GO_ON) as turn:
            turn.taken()


def test_each_overload_halves_and_each_success_adds_a_sixteenth_between_fixed_limits() -> None:
    pace = Pace(6400, 4)
    assert (pace.threads, pace.size) == (4, 6400)
    refuse(pace)
    assert (pace.threads, pace.size) == (2, 3200)
    succeed(pace, 2)
    assert (pace.threads, pace.size) == (2, 4000)
    refuse(pace, 100)
    assert (pace.threads, pace.size) == (1, 100)
    succeed(pace, 100)
    assert (pace.threads, pace.size) == (4, 6400)


def test_requests_that_were_on_their_way_together_meet_one_overload() -> None:
    pace = Pace(6400, 4)
    with pace.turn(GO_ON) as first, pace.turn(GO_ON) as second, pace.turn(GO_ON) as third:
        first.overloaded()
        second.overloaded()
        third.overloaded()
    assert pace.share == 0.5
    refuse(pace)
    assert pace.share == 0.25


def test_who_waits_for_a_turn_gets_it_in_order_of_arrival_and_is_woken_by_a_stop() -> None:
    pace = Pace(6400, 2)
    refuse(pace)
    got: list[int] = []
    stopped = threading.Event()
    arrived = threading.Semaphore(0)

    def take(number: int) -> None:
        arrived.release()
        with pace.turn(stopped):
            got.append(number)

    with ThreadPoolExecutor(1) as pool:
        with pace.turn(GO_ON):
            ended = pool.submit(take, 1)
            assert arrived.acquire(timeout=10)
            assert got == []
        ended.result(10)
        assert got == [1]
        with pace.turn(GO_ON):
            ended = pool.submit(take, 2)
            assert arrived.acquire(timeout=10)
            stopped.set()
            pace.wake()
            ended.result(10)


def test_a_server_that_takes_one_request_at_once_gets_one_at_once_and_every_operation_once() -> None:
    """A second request is refused while one is being answered."""
    busy, most, taken = threading.Lock(), [0], []

    def behave(seen: Seen) -> Answer:
        if not busy.acquire(blocking=False):
            return FULL
        try:
            taken.append(seen.ids)
            proxy.wake.wait(0.01)
            return FINE
        finally:
            busy.release()

    pace = Pace(2 * ONE, 2)
    with Proxy(None, behave) as proxy, elasticsearch.Elasticsearch(proxy.url, request_timeout=5) as client:
        poster = Poster(ElasticsearchServer(client), "orders", 10, pace=pace)
        post_all(poster, (request_of(2 * at, 2) for at in range(40)), 2, lambda refused: most.append(len(refused)))
    assert max(most) == 0
    assert sorted(each for ids in taken for each in ids) == [f"{number:04}" for number in range(80)]


def test_a_request_that_is_too_large_for_a_busy_server_is_sent_in_smaller_ones_that_grow_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 64 operations the server takes ten at once at first, and any number once it has answered."""
    sizes: list[int] = []

    def behave(seen: Seen) -> Answer:
        if len(seen.ids) > 10 and not sizes:
            return FULL
        sizes.append(len(seen.ids))
        return FINE

    pace = Pace(64 * ONE, 2)
    with Proxy(None, behave) as proxy, elasticsearch.Elasticsearch(proxy.url, request_timeout=5) as client:
        poster = Poster(ElasticsearchServer(client), "orders", 10, pace=pace)
        assert poster.post(request_of(0, 64)) == []
        assert [len(seen.ids) for seen in proxy.seen] == [64, 32, 16, 8, 12, 16, 20, 8]
        assert sorted(each for seen in proxy.seen[3:] for each in seen.ids) == [f"{at:04}" for at in range(64)]
        for at in range(16):
            assert poster.post(request_of(64 * at, 64)) == []
        assert len(proxy.seen[-1].ids) == 64
    pace.tell("epoch 7")
    pace.tell("epoch 8")
    (record,) = [each for each in caplog.records if each.name == "epochsink"]
    assert "epoch 7: the server answered 429 to 3 bulk request(s)" in record.message
    assert f"1 at once of up to {8 * ONE} bytes at the least, 2 at once of up to {64 * ONE} bytes now" in record.message


def test_operations_refused_with_429_make_requests_smaller_too() -> None:
    def behave(seen: Seen) -> Answer:
        answers = [OVERLOADED if at >= 4 and not sent else {"status": 200} for at, _ in enumerate(seen.ids)]
        if "items" in seen.path:
            sent.extend(seen.ids)
        errors = any("error" in each for each in answers)
        return Answer(200, json.dumps({"errors": errors, "items": [{"index": each} for each in answers]}).encode())

    sent: list[str] = []
    pace = Pace(8 * ONE, 2)
    with Proxy(None, behave) as proxy, elasticsearch.Elasticsearch(proxy.url, request_timeout=5) as client:
        assert Poster(ElasticsearchServer(client), "orders", 10, pace=pace).post(request_of(0, 8)) == []
        assert [seen.ids for seen in proxy.seen[2:]] == [["0004", "0005", "0006", "0007"]]
    assert pace.share == 0.5 + 1 / 16


def test_an_overload_that_does_not_end_is_given_up_after_the_timeout() -> None:
    pace = Pace(64 * ONE, 2)
    with Proxy(None, lambda _: FULL) as proxy, elasticsearch.Elasticsearch(proxy.url, request_timeout=5) as client:
        poster = Poster(ElasticsearchServer(client), "orders", 0.4, pace=pace)
        with pytest.raises(GaveUp, match=r"nothing succeeded within 0\.4 s"):
            post_all(poster, [request_of(0, 64), request_of(64, 64)], 2, lambda _: None)
        assert 2 <= len(proxy.seen) < 40
