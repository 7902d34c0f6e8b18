"""What security, a proxy or serverless would answer, put before a real node that has none of them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_requests import OneByOne, SmallRequests
from elasticsearch_rig import SCHEMA, Rig, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch.connection import connect
from epochsink.errors import OutcomeUnknown
from epochsink.sink import Outcome
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

ROWS: list[Document] = [(f"d{number}", {"n": number}) for number in range(40)]
PASSING = [408, 429, 500, 502, 503, 504]


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Arguments of a sink whose epoch has many requests."""
    settings = {"number_of_shards": 1, "number_of_replicas": 0}
    common = {"key": "id", "timeout": 30.0, "refresh": True}
    return {"hosts": elasticsearch.url, "index": fresh_index(), "create": settings, **common}


def error(status: int, kind: str) -> Answer:
    return Answer(status, json.dumps({"error": {"type": kind, "reason": "made up"}, "status": status}).encode())


def check(options: dict[str, Any], behave: Callable[[Seen], Answer | None]) -> list[str]:
    """Return the sink's findings where something answers before the server."""
    with (
        Proxy(options["hosts"], behave) as proxy,
        closing(OneSink.of(SmallRequests(**{**options, "hosts": proxy.url}))) as committer,
    ):
        return committer.check(SCHEMA)


def test_every_request_of_a_commit_may_meet_an_overloaded_server(options: dict[str, Any]) -> None:
    """Each in turn gets one of the statuses that pass, as a proxy says them: without JSON."""
    met: list[tuple[str, str, bytes]] = []

    def behave(seen: Seen) -> Answer | None:
        request = (seen.method, seen.path, b"" if "markers" in seen.path else seen.body)
        if request in met:
            return None
        met.append(request)
        return Answer(PASSING[len(met) % len(PASSING)], b"<html>", {"content-type": "text/html"})

    with closing(Rig.joining(SmallRequests(**options))) as rig:
        prepared = rig.prepare(0, [rendered(ROWS)])
        with Proxy(options["hosts"], behave) as proxy:
            through = SmallRequests(**{**options, "hosts": proxy.url})
            with closing(Rig(through, rig.identity)) as unlucky:
                assert unlucky.commit(prepared).outcome is Outcome.COMMITTED
        assert len(met) > len(PASSING)
        assert rig.stored() == dict(ROWS)


def test_a_refresh_that_reaches_no_shard_is_tried_again(options: dict[str, Any]) -> None:
    """As a server answers that has just started; of the target, of the dead letters, and of the markers."""
    dead = f"{options['index']}_dead"
    letters = {"on_rejected": "dead_letter", "dead_letter_index": dead}
    none = Answer(200, json.dumps({"_shards": {"total": 2, "successful": 0, "failed": 0}}).encode())
    asked: Counter[str] = Counter()

    def behave(seen: Seen) -> Answer | None:
        index, refresh, _ = seen.path.partition("/_refresh")
        asked[index] += bool(refresh)
        return none if refresh and asked[index] == 1 else None

    with Proxy(options["hosts"], behave) as proxy:
        sink = SmallRequests(**{**options, **letters, "hosts": proxy.url})
        with closing(Rig.joining(sink)) as rig:
            prepared = rig.prepare(0, [rendered(ROWS)])
            with closing(rig.another_driver()) as other:
                # which does not know that it is the only run, so it looks for dead letters of others
                assert other.commit(prepared).outcome is Outcome.COMMITTED
            assert rig.stored() == dict(ROWS)
    assert all(asked[index] > 1 for index in (f"/{options['index']}", f"/{dead}", "/epochsink-markers"))


@pytest.mark.parametrize("where", ["/_bulk", "/epochsink-markers/_doc/"])
@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (error(401, "security_exception"), "api_key or basic_auth"),
        (error(403, "security_exception"), "privileges"),
        (
            Answer(404, b"no such route", {"content-type": "text/plain"}),
            "the answers of a proxy in front of the server",
        ),
        (Answer(404, b'{"message":"no such route"}'), "the answers of a proxy in front of the server"),
    ],
    ids=["401", "403", "404", "404 in JSON"],
)
def test_a_refusal_is_named_blames_no_row_and_leaves_the_epoch_pending(
    options: dict[str, Any], where: str, answer: Answer, hint: str
) -> None:
    dead: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"}
    with closing(Rig.joining(SmallRequests(**options, **dead))) as rig:
        prepared = rig.prepare(0, [rendered(ROWS)])
        with Proxy(options["hosts"], lambda seen: answer if where in seen.path else None) as proxy:
            through = SmallRequests(**{**options, **dead, "hosts": proxy.url})
            with closing(Rig(through, rig.identity)) as refused, pytest.raises(OutcomeUnknown) as caught:
                refused.commit(prepared)
        assert str(answer.status) in str(caught.value)
        assert hint in caught.value.hint
        assert rig.committer.newest() is None
        assert rig.stored(rig.sink.dead_letter_index) == {}
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert rig.stored() == dict(ROWS)


@pytest.mark.parametrize(("status", "said"), [(200, []), (403, []), (404, ["refuses an empty document"])])
def test_a_pipeline_that_needs_fields_is_accepted_and_a_missing_one_is_not(
    options: dict[str, Any], status: int, said: list[str]
) -> None:
    """The node has no processors: what stands for a pipeline refuses the empty document, unless it is left out."""
    with closing(connect(SmallRequests(**options))) as client:
        client.indices.create(index=options["index"], settings={"index.default_pipeline": "needs-fields"})
    lacks = {"type": "illegal_argument_exception", "reason": "field [n] not present as part of path [n]"}
    refused = json.dumps({"errors": True, "items": [{"index": {"status": 400, "error": lacks}}]}).encode()

    def behave(seen: Seen) -> Answer | None:
        if "/_ingest/" in seen.path:
            return Answer(status)
        return Answer(200, refused) if seen.is_bulk and "pipeline=_none" not in seen.path else None

    findings = check(options, behave)
    assert len(findings) == len(said)
    assert all(part in finding for part, finding in zip(said, findings, strict=True))


def test_a_user_without_the_right_to_create_uses_what_is_there(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        may_not = error(403, "security_exception")

        def behave(seen: Seen) -> Answer | None:
            creates = seen.method == "PUT" and "_doc" not in seen.path and "_bulk" not in seen.path
            return may_not if creates or "/_nodes" in seen.path else None

        assert check(options, behave) == []
        with (
            Proxy(options["hosts"], behave) as proxy,
            closing(Rig(SmallRequests(**{**options, "hosts": proxy.url}), rig.identity)) as limited,
        ):
            limited.apply(0, [rendered(ROWS)])
        assert rig.stored() == dict(ROWS)


def test_serverless_takes_an_index_without_settings_of_its_own(options: dict[str, Any]) -> None:
    """It knows neither nodes nor shards nor `gc_deletes`."""

    def behave(seen: Seen) -> Answer | None:
        if "/_nodes" in seen.path:
            return error(410, "api_not_available_exception")
        unknown = any(name in seen.body for name in (b"number_of_shards", b"replicas", b"gc_deletes", b"hidden"))
        return error(400, "illegal_argument_exception") if seen.method == "PUT" and unknown else None

    options |= {"create": True, "delete_when": "gone", "gc_deletes": "60s"}
    assert check(options, behave) == []
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        rig.apply(0, [rendered(ROWS)])
        assert rig.stored() == dict(ROWS)


def test_an_error_leaves_the_document_out(options: dict[str, Any]) -> None:
    """The server refuses a field that is named twice, and would quote the document up to there."""
    twice = '{"card":"4111","n":1,"n":2}'
    letters: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"}
    with closing(Rig.joining(SmallRequests(**options, **letters))) as rig:
        rig.apply(0, [pa.RecordBatch.from_pydict({"id": pa.array(['"_id":"a"}']), "source": pa.array([twice])})])
        (letter,) = rig.stored(rig.sink.dead_letter_index).values()
        with closing(connect(rig.sink)) as client:
            body = f'{{"index":{{"_id":"a"}}}}\n{twice}\n'.encode()
            (quoted,) = client.bulk(index=rig.sink.index, operations=[body])["items"]  # type: ignore[list-item]
    assert "Duplicate field 'n'" in letter["reason"]
    assert "4111" in json.dumps(quoted)
    assert "4111" not in letter["reason"]


def test_an_older_server_takes_the_same_requests_without_the_parameter_that_it_does_not_know(
    options: dict[str, Any],
) -> None:
    unknown = "include_source_on_error"

    def behave(seen: Seen) -> Answer | None:
        return error(400, "illegal_argument_exception") if unknown in seen.path else None

    with Proxy(options["hosts"], behave) as proxy, closing(Rig.joining(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [rendered(ROWS)])
        with closing(Rig(OneByOne(**{**options, "hosts": proxy.url}), rig.identity)) as older:
            assert older.commit(prepared).outcome is Outcome.COMMITTED
        assert [unknown in seen.path for seen in proxy.bulks[:3]] == [True, False, False]
        assert not any(unknown in seen.path for seen in proxy.bulks[1:])
        assert rig.stored() == dict(ROWS)
