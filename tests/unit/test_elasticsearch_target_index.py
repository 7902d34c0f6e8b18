"""Indices that cannot be written by _id and version, as servers with all modules describe them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import elasticsearch
import pytest
from http_proxy import Answer, Proxy

from epochsink.elasticsearch import target_index
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer

if TYPE_CHECKING:
    from epochsink.elasticsearch.target import ElasticsearchTarget

BY_ALIAS: dict[str, Any] = {"orders": {}}


def find(name: str, described: dict[str, Any], **arguments: Any) -> ElasticsearchTarget | None:
    with (
        Proxy(None, lambda _: Answer(200, json.dumps(described).encode())) as server,
        elasticsearch.Elasticsearch(server.url) as client,
    ):
        return target_index.find(ElasticsearchServer(client), ElasticsearchConfig(server.url, index=name, **arguments))


def described_as(*, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"aliases": {}, "mappings": {}, "settings": {"index.uuid": "u1", **(settings or {})}, **more}


def test_an_index_is_found_with_its_uuid() -> None:
    found = find("orders", {"orders": described_as()})
    assert found is not None
    assert (found.index, found.incarnation) == ("orders", ("u1", ""))


def test_an_alias_is_found_with_its_index() -> None:
    found = find("orders", {"orders-v2": described_as(aliases=BY_ALIAS)})
    assert found is not None
    assert found.index == "orders-v2"


@pytest.mark.parametrize(
    ("described", "reason", "hint"),
    [
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
            {
                "orders-000007": described_as(
                    aliases=BY_ALIAS,
                    settings={"index.plugins.index_state_management.rollover_alias": "orders"},
                )
            },
            "rolls over from 'orders-000007'",
            "remove its setting index.plugins.index_state_management.rollover_alias",
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


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (described_as(settings={"index.lifecycle.rollover_alias": "letters"}), "rolls over from 'letters-000007'"),
        (described_as(data_stream="letters"), "is a data stream, which accepts neither versions nor deletes"),
    ],
)
def test_a_dead_letter_index_that_rolls_over_is_refused(described: dict[str, Any], reason: str) -> None:
    found = {"orders": described_as(), "letters-000007": {**described, "aliases": {"letters": {}}}}
    with pytest.raises(UnfitIndex, match=f"dead_letter_index=: .*{reason}") as caught:
        find("orders", found, on_rejected="dead_letter", dead_letter_index="letters")
    assert "name an index" in caught.value.hint or "name the index 'letters-000007'" in caught.value.hint


STREAM: dict[str, Any] = {".ds-orders-000001": described_as(data_stream="orders")}


def of_stream(setting: str, value: str) -> dict[str, Any]:
    return {".ds-orders-000001": described_as(data_stream="orders", settings={setting: value})}


@pytest.mark.parametrize(
    ("described", "arguments", "reason"),
    [
        (STREAM, {"key": "id"}, "takes no second row of a key"),
        (STREAM, {"routing": "customer"}, "cannot be used with routing='customer'"),
        (STREAM, {"validate": True}, "cannot be used with validate=True"),
        ({".ds-other-000001": described_as(data_stream="other", aliases=BY_ALIAS)}, {}, "belongs to other"),
        ({"orders": described_as(data_stream="other")}, {}, "belongs to other"),
        (of_stream("index.mode", "time_series"), {}, "time series stream, which makes every _id itself"),
        (of_stream("index.mapping.synthetic_id", "true"), {}, "its _id is made from other fields"),
        (of_stream("index.logsdb.route_on_sort_fields", "true"), {}, "makes every _id itself"),
    ],
)
def test_a_data_stream_that_cannot_be_exact_is_refused_with_the_reason(
    described: dict[str, Any], arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnfitIndex, match=reason):
        find("orders", described, **arguments)
