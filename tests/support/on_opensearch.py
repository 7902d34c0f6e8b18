"""Runs the tests of Elasticsearch on OpenSearch: `make test ON=opensearch`.

The variable EPOCHSINK_TESTS_ON_OPENSEARCH has the server's major version. Tests and pipelines get `OpenSearch` as
their sink, with its own client. What a test itself asks of the server, it asks with the client of Elasticsearch, which
here sends what OpenSearch takes. To be imported before what it changes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import elasticsearch
import pytest
from elasticsearch._sync.client import _base

import epochsink
import epochsink_devkit.services
from epochsink.elasticsearch import connection, server
from epochsink.opensearch import OpenSearch
from epochsink.opensearch.server import OpenSearchServer

if TYPE_CHECKING:
    from epochsink.elasticsearch.config import ElasticsearchConfig

VERSION: Final = os.environ["EPOCHSINK_TESTS_ON_OPENSEARCH"]
_DIFFERENT: Final = {
    "test_a_refusal_is_named_blames_no_row_and_leaves_the_epoch_pending": "hints name this product's permissions",
    "test_an_error_leaves_the_document_out": "it has no include_source_on_error",
    "test_an_older_server_takes_the_same_requests_without_the_parameter_that_it_does_not_know": "likewise",
    "test_small_decimals_are_numbers_with_plain_digits": "it searches in maps, which are stored only",
    "test_an_older_server_is_refused_and_others_take_an_epoch": "every version of its client goes with every server",
    "test_the_role_for_search_operators_allows_what_a_sink_does_and_nothing_that_it_does_not": "permissions; own test",
    "test_each_request_is_answered_in_memory": "it compares classes, not servers",
}
"""Tests of what is not the same, and why."""
_JSON: Final = {"accept": "application/json", "content-type": "application/json"}
_OPTIONS: Final = {"request_timeout": "timeout", "basic_auth": "http_auth"}
"""Options of Elasticsearch's client, and the names that OpenSearch's has for them."""


class Elasticsearch(OpenSearch):
    """The sink of the tests: OpenSearch, with arguments for Elasticsearch."""

    def __init__(self, hosts: Any, **arguments: Any) -> None:
        options = arguments.pop("options", None)
        if options is not None:
            arguments["options"] = {_OPTIONS.get(name, name): value for name, value in options.items()}
        super().__init__(hosts, **arguments)


class ServerOfTests(OpenSearchServer):
    """The requests of the sink, sent by the client of a test."""

    def __init__(self, client: elasticsearch.Elasticsearch) -> None:
        self.threads = server.Threads()
        self.client = connection.ElasticsearchClient(client)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of what is not the same."""
    for item in items:
        if reason := _DIFFERENT.get(getattr(item, "originalname", "")):
            item.add_marker(pytest.mark.skip(reason=f"OpenSearch differs: {reason}"))


class ClientOfTests(elasticsearch.Elasticsearch):
    """The client of tests and readers, with the point in time that OpenSearch has."""

    def open_point_in_time(self, *, index: str, keep_alive: str) -> Any:  # type: ignore[override]
        params = {"keep_alive": keep_alive}
        answer = self.perform_request("POST", f"/{index}/_search/point_in_time", params=params, headers=_JSON)
        return {"id": answer.body["pit_id"]}

    def close_point_in_time(self, *, id: str) -> Any:  # type: ignore[override] # noqa: A002 - as there
        return self.perform_request("DELETE", "/_search/point_in_time", headers=_JSON, body={"pit_id": [id]})

    def search(self, **wanted: Any) -> Any:
        if "pit" in wanted:
            # before 3.3 it has no _shard_doc, which a second page would need
            assert wanted.pop("search_after", None) is None, "more than a page"
            wanted["sort"] = "_doc"
        return super().search(**wanted)


def _connect(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    return ClientOfTests(list(config.hosts), request_timeout=60)


def _patch(version: str) -> None:
    # neither the header that only Elasticsearch understands, nor the one that only Elasticsearch sends
    _base._COMPAT_MIMETYPE_RE = re.compile(r"(?!)(.)(.)")
    _base.BaseClient._verified_elasticsearch = property(lambda _: True, lambda _, __: None)  # type: ignore[assignment]
    services: Any = epochsink_devkit.services
    services.LocalElasticsearch = services.LocalOpenSearch3 if version == "3" else services.LocalOpenSearch
    vendor: Any = elasticsearch
    vendor.Elasticsearch = ClientOfTests
    changed: Any = epochsink
    changed.Elasticsearch = changed.elasticsearch.Elasticsearch = Elasticsearch
    connection.connect = _connect
    changed.elasticsearch.server.ElasticsearchServer = ServerOfTests


_patch(VERSION)
