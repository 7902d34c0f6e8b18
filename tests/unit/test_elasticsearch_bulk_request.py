"""Posting against a server that answers badly: what is sent again, what is given up, what is refused for good."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import elasticsearch
import pytest
from elasticsearch_rig import rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import bulk_body
from epochsink.elasticsearch.bulk_request import Poster, PosterStopped
from epochsink.elasticsearch.errors import GaveUp, UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer

if TYPE_CHECKING:
    from collections.abc import Callable

OVERLOADED = {"status": 429, "error": {"type": "es_rejected_execution_exception", "reason": "queue is full"}}
DONE = {"status": 200}
FINE = Answer(200, b'{"errors":false}')


def request_of(*ids: str) -> bulk_body.Request:
    batch = rendered([(each, {"n": 1}) for each in ids])
    return bulk_body.render(
        batch["id"], batch["source"], bulk_body.action_heads(version=1, version_type="external_gte")
    )


def items(answers: list[dict[str, Any]]) -> Answer:
    failed = any("error" in each for each in answers)
    return Answer(200, json.dumps({"errors": failed, "items": [{"index": each} for each in answers]}).encode())


def post(
    behave: Callable[[Seen, int], Answer | None],
    request: bulk_body.Request,
    timeout: float = 5,
    request_timeout: float = 5,
) -> tuple[Proxy, list[Any]]:
    """Post against a server that answers the n-th request as told."""
    proxy = Proxy(None, lambda seen: behave(seen, len(proxy.seen)))
    with proxy, elasticsearch.Elasticsearch(proxy.url, request_timeout=request_timeout) as client:
        return proxy, Poster(ElasticsearchServer(client), "orders", timeout).post(request)


def test_only_the_overloaded_operations_are_sent_again() -> None:
    turns = {
        1: Answer(200, b'{"errors":true}'),
        2: items([DONE, OVERLOADED, DONE, OVERLOADED]),
        3: items([OVERLOADED, DONE]),
        4: items([DONE]),
    }
    proxy, refused = post(lambda _, turn: turns[turn], request_of("a", "b", "c", "d"))
    assert refused == []
    assert [seen.ids for seen in proxy.seen] == [list("abcd"), list("abcd"), ["b", "d"], ["b"]]


@pytest.mark.parametrize("statuses", [(500, 503), (503, 500), (408, 429), (502, 504)])
def test_operations_that_fail_in_passing_are_sent_again_whatever_their_status(statuses: tuple[int, int]) -> None:
    """In one request beside others that are applied: none of them counts as applied, nor as refused."""
    failed = [{"status": status, "error": {"type": "made_up", "reason": "no"}} for status in statuses]
    turns = {1: Answer(200, b'{"errors":true}'), 2: items([DONE, *failed, DONE]), 3: items([DONE, DONE])}
    proxy, refused = post(lambda _, turn: turns[turn], request_of("a", "b", "c", "d"))
    assert refused == []
    assert [seen.ids for seen in proxy.seen] == [list("abcd"), list("abcd"), ["b", "c"]]


def test_the_first_answer_costs_the_server_no_list_of_operations() -> None:
    proxy, _ = post(lambda *_: FINE, request_of("a"))
    assert "filter_path=errors&" in proxy.seen[0].path + "&"
    assert "items" not in proxy.seen[0].path


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_overloaded_server_is_asked_again(status: int) -> None:
    proxy, refused = post(lambda _, turn: FINE if turn > 2 else Answer(status), request_of("a"))
    assert refused == []
    assert len(proxy.seen) == 3


def test_a_request_that_times_out_is_sent_again() -> None:
    wake = threading.Event()

    def behave(_: Seen, turn: int) -> Answer:
        if turn == 1:
            wake.wait(5)
        return FINE

    try:
        proxy, refused = post(behave, request_of("a"), request_timeout=0.3)
    finally:
        wake.set()
    assert refused == []
    assert [seen.ids for seen in proxy.seen] == [["a"], ["a"]]


def test_a_server_that_is_not_there_is_given_up_after_the_timeout() -> None:
    with Proxy(None, lambda _: FINE) as proxy:
        url = proxy.url
    begin = time.monotonic()
    with elasticsearch.Elasticsearch(url) as client, pytest.raises(GaveUp, match=r"within 0\.5 s"):
        Poster(ElasticsearchServer(client), "orders", 0.5).post(request_of("a"))
    # a busy machine takes some seconds
    assert time.monotonic() - begin < 30


def test_the_timeout_begins_anew_with_each_success() -> None:
    names = [str(number) for number in range(8)]

    def behave(seen: Seen, _: int) -> Answer:
        time.sleep(0.2)
        return items([DONE, *[OVERLOADED] * (len(seen.ids) - 1)])

    proxy, refused = post(behave, request_of(*names), timeout=0.8)
    assert refused == []
    assert len(proxy.seen) >= len(names)


def test_a_server_that_is_too_busy_for_any_operation_is_asked_again() -> None:
    def behave(_: Seen, nth: int) -> Answer:
        return items([OVERLOADED]) if nth <= 2 else items([DONE])

    proxy, refused = post(behave, request_of("a"))
    assert refused == []
    assert len(proxy.seen) == 3


def test_giving_up_says_the_last_reason() -> None:
    with pytest.raises(GaveUp, match="429 es_rejected_execution_exception: queue is full"):
        post(lambda *_: items([OVERLOADED]), request_of("a"), timeout=0.4)


def test_stopping_ends_the_wait() -> None:
    proxy = Proxy(None, lambda _: Answer(429))
    with proxy, elasticsearch.Elasticsearch(proxy.url) as client:
        poster = Poster(ElasticsearchServer(client), "orders", 60)
        timer = threading.Timer(0.2, poster.stop)
        timer.start()
        with pytest.raises(PosterStopped):
            poster.post(request_of("a"))
        timer.join()


def test_a_request_that_is_too_large_is_sent_in_halves() -> None:
    def behave(seen: Seen, _: int) -> Answer:
        return Answer(413) if len(seen.ids) > 2 else FINE

    proxy, refused = post(behave, request_of("a", "b", "c", "d", "e"))
    assert refused == []
    assert sorted(each for seen in proxy.seen if len(seen.ids) <= 2 for each in seen.ids) == list("abcde")


def test_a_document_that_is_too_large_alone_is_refused_for_good() -> None:
    def behave(seen: Seen, _: int) -> Answer:
        return Answer(413) if "b" in seen.ids else FINE

    _, refused = post(behave, request_of("a", "b", "c"))
    assert [(each.id, each.status) for each in refused] == [("b", 413)]
    assert "a proxy in front of it" in refused[0].reason


def test_refused_documents_come_back_with_id_source_and_reason() -> None:
    error = {"type": "document_parsing_exception", "reason": "failed", "caused_by": {"reason": "not a date"}}
    _, refused = post(lambda *_: items([DONE, {"status": 400, "error": error}]), request_of("a", "b"))
    (only,) = refused
    assert (only.id, only.source, only.status) == ("b", '{"n": 1}', 400)
    assert only.reason == "failed (not a date)"
    assert not only.conflict


def test_a_delete_of_nothing_is_done() -> None:
    _, refused = post(lambda *_: items([{"status": 404}]), request_of("a"))
    assert refused == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, "cluster_block_exception"), (400, "index_closed_exception"), (404, "index_not_found_exception")],
)
def test_an_index_that_takes_no_writes_is_no_fault_of_the_documents(status: int, kind: str) -> None:
    refusal = {"status": status, "error": {"type": kind, "reason": "no"}}
    with pytest.raises(UnfitIndex, match="accepts no writes") as caught:
        post(lambda *_: items([refusal, refusal]), request_of("a", "b"))
    assert kind in caught.value.message


@pytest.mark.parametrize(("status", "hint"), [(401, "api_key or basic_auth"), (403, "privileges")])
def test_refused_credentials_are_not_tried_again(status: int, hint: str) -> None:
    body = json.dumps({"error": {"type": "security_exception", "reason": "no"}, "status": status}).encode()
    seen = []

    def behave(request: Seen, _: int) -> Answer:
        seen.append(request)
        return Answer(status, body)

    with pytest.raises(UnfitIndex) as caught:
        post(behave, request_of("a"))
    assert hint in caught.value.hint
    assert len(seen) == 1


def judged(by: dict[str, dict[str, Any]], another: dict[str, Any]) -> Callable[[Seen, int], Answer]:
    """Answer each operation as ``by`` says by its ``_id``, others are done; an empty document in its place: another."""

    def behave(seen: Seen, _: int) -> Answer:
        if b"if_seq_no" in seen.body:
            assert seen.body.endswith(b"\n{}\n")
            return items([another])
        return items([by.get(each, DONE) for each in seen.ids])

    return behave


CONFLICT = {"status": 409, "error": {"type": "version_conflict_engine_exception", "reason": "no"}}
STRANGE = {"status": 500, "error": {"type": "null_pointer_exception", "reason": "in processor [x] of [secret]"}}
FORBIDDEN = {"status": 403, "error": {"type": "security_exception", "reason": "no"}}


@pytest.mark.parametrize("answer", [STRANGE, FORBIDDEN], ids=["500", "403"])
def test_an_error_that_another_document_in_its_place_does_not_get_is_a_refusal_whatever_its_status(
    answer: dict[str, Any],
) -> None:
    proxy, refused = post(judged({"b": answer, "d": answer}, CONFLICT), request_of(*"abcd"), timeout=0.5)
    assert [(each.id, each.status) for each in refused] == [("b", answer["status"]), ("d", answer["status"])]
    assert sum(b"if_seq_no" in seen.body for seen in proxy.seen) == 1


@pytest.mark.parametrize("another", [STRANGE, FORBIDDEN, OVERLOADED], ids=["500", "403", "429"])
def test_an_error_that_every_document_gets_blames_no_row_and_quotes_none(another: dict[str, Any]) -> None:
    with pytest.raises(GaveUp, match="HTTP 500 null_pointer_exception for 1 operation") as gave_up:
        post(judged({"b": STRANGE}, another), request_of("a", "b"), timeout=0.3)
    assert "secret" not in str(gave_up.value)
    with pytest.raises(UnfitIndex, match="accepts no writes"):
        post(judged({"b": FORBIDDEN}, another), request_of("a", "b"), timeout=0.3)


def test_an_answer_with_fewer_operations_than_were_sent_is_no_success() -> None:
    def behave(seen: Seen, _: int) -> Answer:
        return items([DONE] * (len(seen.ids) - 1))

    with Proxy(None, lambda seen: behave(seen, 0)) as proxy, elasticsearch.Elasticsearch(proxy.url) as client:
        with pytest.raises(UnfitIndex, match="2 operations were sent, and the answer has 1"):
            Poster(ElasticsearchServer(client), "orders", 5, counted=True).post(request_of("a", "b"))
        assert Poster(ElasticsearchServer(client), "orders", 5).post(request_of("a", "b")) == []
