"""What an Elasticsearch sink refuses before it connects, and what it never shows."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from epochsink.elasticsearch import Elasticsearch
from epochsink.errors import ConfigurationError
from epochsink.sink import Epoch, Identity, Sink, SinkCommitter, SinkWriter, Task

CANARY = "canary-5f3a"


def sink(hosts: str | list[str] = "http://127.0.0.1:9200", **changed: Any) -> Elasticsearch:
    return Elasticsearch(hosts, **{"index": "orders", "id": "order_id", **changed})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"index": ""}, "index is empty"),
        ({"index": "Orders"}, "'Orders'"),
        ({"index": "orders,others"}, "'orders,others'"),
        ({"index": "orders-*"}, "'orders-*'"),
        ({"index": "_all"}, "'_all'"),
        ({"index": "x" * 256}, "255 bytes"),
        ({"id": []}, "empty list"),
        ({"id": None, "delete_when": "gone"}, "delete_when='gone' needs an id"),
        ({"id": None, "order_by": "at"}, "order_by='at' needs an id"),
        ({"on_rejected": "skip"}, "on_rejected='skip'"),
        ({"on_rejected": "dead_letter"}, "do not go together"),
        ({"dead_letter_index": "dead"}, "do not go together"),
        ({"on_rejected": "dead_letter", "dead_letter_index": "orders"}, "index of their own"),
        ({"on_rejected": "dead_letter", "dead_letter_index": "dead", "validate": True}, "choose one"),
        ({"bulk_bytes": 0}, "bulk_bytes=0"),
        ({"threads": 0}, "threads=0"),
        ({"patience": -1}, "patience=-1"),
        ({"gc_deletes": "soon"}, "gc_deletes='soon'"),
        ({"max_retries": 3}, "max_retries"),
        ({"sniff_on_start": True}, "sniff_on_start"),
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": "search.example"}, "'search.example'"),
        ({"hosts": "https://search.example"}, "port"),
        ({"hosts": "https://search.example:none"}, "port"),
        ({"hosts": "ftp://search.example:21"}, "scheme"),
    ],
)
def test_bad_value_is_named_with_its_rule_and_way_out(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sink(**options)
    assert named in str(caught.value)
    assert "Hint:" in str(caught.value)


def test_a_missing_client_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochsink.elasticsearch.sink.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"(?s)package elasticsearch.*install epochsink\[elasticsearch\]"):
        sink()


@pytest.mark.parametrize(
    "secret",
    [{"api_key": CANARY}, {"basic_auth": ("elastic", CANARY)}, {"bearer_auth": CANARY}, {"headers": {"x": CANARY}}],
)
def test_credentials_travel_in_the_clear_only_where_asked_for(secret: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"in the clear to http://search\.example:9200") as caught:
        sink("http://search.example:9200", **secret)
    assert CANARY not in str(caught.value)
    sink("http://search.example:9200", allow_insecure=True, **secret)
    sink("https://search.example:9200", **secret)
    sink("http://localhost:9200", **secret)
    sink("http://[::1]:9200", **secret)


def test_one_plain_host_among_others_is_found() -> None:
    with pytest.raises(ConfigurationError, match="in the clear"):
        sink(["https://a.example:9200", "http://b.example:9200"], api_key=CANARY)


def test_credentials_in_a_url_count_and_are_masked() -> None:
    with pytest.raises(ConfigurationError, match="in the clear") as caught:
        sink(f"http://elastic:{CANARY}@search.example:9200")
    assert CANARY not in str(caught.value)
    assert CANARY not in repr(sink(f"https://elastic:{CANARY}@search.example:9200"))


def test_repr_shows_options_and_masks_secrets() -> None:
    shown = repr(sink(api_key=CANARY, ca_certs="/etc/ca.pem"))
    assert CANARY not in shown
    assert "/etc/ca.pem" in shown
    assert "order_id" in shown


def test_sink_survives_pickling_with_its_options() -> None:
    copy = pickle.loads(pickle.dumps(sink(basic_auth=("elastic", CANARY), order_by="at")))  # noqa: S301 - our own bytes
    assert copy.order_by == "at"
    assert repr(copy) == repr(sink(basic_auth=("elastic", CANARY), order_by="at"))


def test_spool_is_forced_and_rows_may_lie_anywhere() -> None:
    assert sink().spool is True
    assert sink().distribute_by == ()


def test_sink_committer_and_writer_are_what_the_protocol_asks_for() -> None:
    """A static truth, which the type checker verifies."""
    made: Sink = sink()
    committer: SinkCommitter = made.committer()
    writer: SinkWriter = made.writer(Task(Identity("query", "search"), Epoch(0, "0" * 32), 0, "1" * 32))
    assert writer.prepare() == {"task": "1" * 32, "rows": 0, "largest": 0}
    committer.close()
