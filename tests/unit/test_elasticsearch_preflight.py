"""Servers on which check() may not ask everything: few privileges, serverless, pipelines that need fields."""

from __future__ import annotations

import json
from typing import Any

import elasticsearch
import pytest
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import applied_epochs, preflight
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.server import ElasticsearchServer

CONFLICT = {"type": "version_conflict_engine_exception", "reason": "no"}
PASSES = {"errors": True, "items": [{"index": {"status": 409, "error": CONFLICT}}]}
GONE = "pipeline with id [needs-fields] does not exist"


def said(status: int, body: Any) -> Answer:
    return Answer(status, json.dumps(body).encode())


def error(status: int, kind: str) -> Answer:
    return said(status, {"error": {"type": kind, "reason": "no"}, "status": status})


def test_a_user_who_may_not_create_uses_an_index_that_is_there() -> None:
    def behave(seen: Seen) -> Answer:
        return Answer(200) if seen.method == "HEAD" else error(403, "security_exception")

    with Proxy(None, behave) as server, elasticsearch.Elasticsearch(server.url) as client:
        applied_epochs.ensure(ElasticsearchServer(client))
        assert {seen.method for seen in server.seen} == {"HEAD"}


def test_a_server_that_takes_no_settings_gets_none() -> None:
    def behave(seen: Seen) -> Answer:
        if seen.method == "HEAD":
            return Answer(404)
        return error(400, "illegal_argument_exception") if b"number_of_shards" in seen.body else said(200, {})

    with Proxy(None, behave) as server, elasticsearch.Elasticsearch(server.url) as client:
        applied_epochs.ensure(ElasticsearchServer(client))
        assert b"number_of_shards" not in server.seen[-1].body
        assert b"properties" in server.seen[-1].body


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_limits_that_cannot_be_asked_are_left_to_the_server(status: int) -> None:
    with (
        Proxy(None, lambda _: error(status, "api_not_available_exception")) as server,
        elasticsearch.Elasticsearch(server.url) as client,
    ):
        preflight.refuse_too_large(ElasticsearchServer(client), 2**30)


@pytest.mark.parametrize(
    ("status", "reason", "alone", "final", "refused"),
    [
        (200, "no field", False, False, 0),
        (403, "no field", False, False, 0),
        (404, "no field", False, False, 1),
        (403, GONE, False, False, 1),
        (200, "no field", True, False, 1),
        (200, "no field", True, True, 0),
    ],
    ids=["exists", "may not be asked for", "missing", "missing and may not be asked for", "index refuses", "final"],
)
def test_only_a_missing_pipeline_and_what_the_index_alone_refuses_is_the_fault_of_the_index(
    status: int, reason: str, refused: int, *, alone: bool, final: bool
) -> None:
    """``alone``: the index refuses the document also without the pipeline, which can be left out unless it is final."""
    no = {"errors": True, "items": [{"index": {"status": 400, "error": {"type": "made_up", "reason": reason}}}]}

    def behave(seen: Seen) -> Answer:
        if "_settings" in seen.path:
            kind = "final" if final else "default"
            return said(200, {"orders": {"settings": {f"index.{kind}_pipeline": "needs-fields"}}})
        if "_ingest" in seen.path:
            return said(status, {})
        return said(200, no if alone or "pipeline=_none" not in seen.path else PASSES)

    with Proxy(None, behave) as server, elasticsearch.Elasticsearch(server.url) as client:
        asked = ElasticsearchServer(client)
        assert len(preflight.refused_by_index(asked, "orders", Poster(asked, "orders", 1))) == refused
