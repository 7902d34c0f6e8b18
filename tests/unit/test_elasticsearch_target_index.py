"""Indices that cannot be written by _id and version, as servers with all modules describe them."""

from __future__ import annotations

import json
from typing import Any

import elasticsearch
import pytest
from http_proxy import Answer, Proxy

from epochsink.elasticsearch import target_index
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import UnfitIndex

BY_ALIAS: dict[str, Any] = {"orders": {}}


def find(name: str, described: dict[str, Any]) -> target_index.Target | None:
    with (
        Proxy(None, lambda _: Answer(200, json.dumps(described).encode())) as server,
        elasticsearch.Elasticsearch(server.url) as client,
    ):
        return target_index.find(client, ElasticsearchConfig(server.url, index=name))


def described_as(*, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"aliases": {}, "mappings": {}, "settings": {"index.uuid": "u1", **(settings or {})}, **more}


def test_an_index_is_found_with_its_uuid() -> None:
    found = find("orders", {"orders": described_as()})
    assert found is not None
    assert (found.index, found.uuid) == ("orders", "u1")


def test_an_alias_is_found_with_its_index() -> None:
    found = find("orders", {"orders-v2": described_as(aliases=BY_ALIAS)})
    assert found is not None
    assert found.index == "orders-v2"


@pytest.mark.parametrize(
    ("described", "reason", "hint"),
    [
        ({".ds-orders-000001": described_as(data_stream="orders")}, "is a data stream", "name an index"),
        (
            {"orders-1": described_as(aliases=BY_ALIAS), "orders-2": described_as(aliases=BY_ALIAS)},
            "alias of 2 indices",
            "an alias of just one",
        ),
        (
            {"orders-000007": described_as(aliases=BY_ALIAS, settings={"index.lifecycle.rollover_alias": "orders"})},
            "rolls over from 'orders-000007'",
            "remove its setting index.lifecycle.rollover_alias",
        ),
        (
            {"orders": described_as(settings={"index.mode": "time_series"})},
            "makes every _id itself",
            "a standard index",
        ),
    ],
)
def test_an_unfit_index_is_refused_with_reason_and_way_out(described: dict[str, Any], reason: str, hint: str) -> None:
    with pytest.raises(UnfitIndex, match=reason) as caught:
        find("orders", described)
    assert hint in caught.value.hint
