"""What an Elasticsearch sink refuses before it connects, and what it never shows."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from epochsink.elasticsearch import Elasticsearch
from epochsink.errors import ConfigurationError
from epochsink.sink import Epoch, Identity, Participant, Sink, SinkWriter, Task

CANARY = "canary-5f3a"


def sink(hosts: str | list[str] = "http://127.0.0.1:9200", **changed: Any) -> Elasticsearch:
    return Elasticsearch(hosts, **{"index": "orders", "key": "order_id", **changed})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"index": ""}, "invalid index=''"),
        ({"index": 5}, "invalid index=5"),
        ({"index": "Orders"}, "'Orders'"),
        ({"index": "Ör"}, "'Ör'"),
        ({"index": "orders,others"}, "'orders,others'"),
        ({"index": "orders-*"}, "'orders-*'"),
        ({"index": "_all"}, "'_all'"),
        ({"index": "x" * 256}, "255 bytes"),
        ({"index": None}, "give either index= or index_by="),
        ({"index_by": "month"}, "give either index= or index_by="),
        ({"index": None, "index_by": "month", "validate": True}, "validate=True asks an index before"),
        ({"key": []}, "key=[] is empty"),
        ({"key": 5}, "invalid key=5"),
        ({"keys": "a"}, "did you mean key=?"),
        ({"id": "a"}, "there is no such argument"),
        ({"create_index": False}, "or create=?"),
        ({"api_key": CANARY}, "options={'api_key': ...}"),
        ({"create": "yes"}, "invalid create='yes'"),
        ({"create": {"number_of_shards": object()}}, "not JSON"),
        ({"refresh": "no"}, "invalid refresh='no'"),
        ({"validate": 1}, "invalid validate=1"),
        ({"select": []}, "select=[] is empty"),
        ({"select": 5}, "invalid select=5"),
        ({"where": ["a"]}, "invalid where=['a']"),
        ({"options": "api_key"}, "invalid options='api_key'"),
        ({"key": None, "delete_when": "gone"}, "delete_when= is given without key="),
        ({"key": None, "order_by": "at"}, "order_by= is given without key="),
        ({"on_rejected": "skip"}, "invalid on_rejected='skip'"),
        ({"on_rejected": "dead_letter"}, "contradict each other"),
        ({"dead_letter_index": "dead"}, "contradict each other"),
        ({"on_rejected": "dead_letter", "dead_letter_index": "orders"}, "index of their own"),
        ({"on_rejected": "dead_letter", "dead_letter_index": "dead", "validate": True}, "choose one"),
        ({"timeout": -1}, "invalid timeout=-1"),
        ({"gc_deletes": "soon"}, "gc_deletes='soon'"),
        ({"gc_deletes": 60}, "gc_deletes=60"),
        *(({"gc_deletes": short}, f"gc_deletes='{short}' is less than 60 s") for short in ("2s", "59999ms", "-1")),
        ({"options": {"max_retries": 3}}, "max_retries"),
        ({"options": {"sniff_on_start": True}}, "sniff_on_start"),
        ({"hosts": []}, "hosts=[] is empty"),
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
    monkeypatch.setattr("epochsink.arguments.find_spec", lambda _: None)
    with pytest.raises(
        ConfigurationError, match=r'(?s)needs the package\(s\) elasticsearch.*"epochsink\[elasticsearch\]"'
    ):
        sink()


@pytest.mark.parametrize(
    "secret",
    [{"api_key": CANARY}, {"basic_auth": ("elastic", CANARY)}, {"bearer_auth": CANARY}, {"headers": {"x": CANARY}}],
)
def test_credentials_are_sent_unencrypted_only_if_allowed(secret: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"unencrypted to http://search\.example:9200") as caught:
        sink("http://search.example:9200", options=secret)
    assert CANARY not in str(caught.value)
    sink("http://search.example:9200", allow_insecure=True, options=secret)
    sink("https://search.example:9200", options=secret)
    sink("http://localhost:9200", options=secret)
    sink("http://[::1]:9200", options=secret)


def test_one_plain_host_among_others_is_found() -> None:
    with pytest.raises(ConfigurationError, match="unencrypted"):
        sink(["https://a.example:9200", "http://b.example:9200"], options={"api_key": CANARY})


def test_credentials_in_a_url_count_and_are_masked() -> None:
    with pytest.raises(ConfigurationError, match="unencrypted") as caught:
        sink(f"http://elastic:{CANARY}@search.example:9200")
    assert CANARY not in str(caught.value)
    assert CANARY not in repr(sink(f"https://elastic:{CANARY}@search.example:9200"))


@pytest.mark.parametrize(
    "host",
    [
        "elastic:{}@search.example:9200",
        "https://elastic:{}/x@search.example:9200",
        "https://elastic:1/{}@search.example:9200",
        "https://[elastic:{}@search:9",
    ],
)
def test_a_host_that_is_no_url_prints_no_password(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a URL|percent-encode") as caught:
        sink(host.format(CANARY))
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_repr_shows_options_and_masks_secrets() -> None:
    shown = repr(sink(options={"api_key": CANARY, "ca_certs": "/etc/ca.pem"}))
    assert CANARY not in shown
    assert "/etc/ca.pem" in shown
    assert "order_id" in shown


def test_sink_survives_pickling_with_its_options() -> None:
    given = sink(options={"basic_auth": ["elastic", CANARY], "headers": {"x": CANARY}}, order_by="at")
    copy = pickle.loads(pickle.dumps(given))  # noqa: S301 - our own bytes
    assert copy.order_by == ("at",)
    assert copy.client_options["basic_auth"] == ("elastic", CANARY)
    assert copy.client_options["headers"] == {"x": CANARY}
    assert copy == given


def test_configurations_are_equal_by_value_hashable_and_frozen() -> None:
    same: Any = {"create": {"b": 1, "a": [2]}, "options": {"headers": {"x": "1", "y": "2"}}}
    assert sink(**same) == sink(create={"a": [2], "b": 1}, options={"headers": {"y": "2", "x": "1"}})
    assert len({sink(**same), sink(**same), sink()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        sink().index = "other"  # type: ignore[misc]


def test_one_expression_may_be_a_string() -> None:
    assert sink(select="order_id").select == ("order_id",)
    assert sink(order_by=["a", "b"]).order_by == ("a", "b")
    assert sink().select == ("*",)


def test_every_argument_has_a_line_in_the_docstring_and_on_the_reference_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "elasticsearch.md").read_text()
    for name in set(inspect.signature(Elasticsearch).parameters):
        assert re.search(rf"^        {name}: ", Elasticsearch.__doc__ or "", re.MULTILINE), name
        assert f"| `{name}` |" in page, name


def test_the_hint_for_an_unknown_argument_lists_all() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sink(zzzz=1)
    listed = caught.value.hint.removeprefix("the arguments are: ").partition(";")[0].split(", ")
    assert listed == sorted(set(inspect.signature(Elasticsearch).parameters))


def test_spool_is_forced_and_rows_may_lie_anywhere() -> None:
    assert sink().spool is True
    assert sink().distribute_by == ()


@pytest.mark.parametrize(
    ("key", "select", "spread"),
    [
        ("id", "*", ["`id`"]),
        (["id", "concat(a, b)"], ["upper(x) AS id", "a", "b"], ["upper(x)", "concat(a, b)"]),
        ("id", ["n"], ["id"]),
    ],
)
def test_rows_of_a_key_are_brought_together_by_the_texts_of_its_id(key: Any, select: Any, spread: list[str]) -> None:
    made = sink(key=key, select=select, order_by="n", partition_by_key=True)
    assert [each.replace("\n", "") for each in made.distribute_by] == [f"TRY_CAST(({one}) AS STRING)" for one in spread]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"key": None}, "needs key="),
        ({}, "and order_by="),
        ({"order_by": "n", "select": ["upper(x) id"]}, "with AS"),
    ],
)
def test_what_a_shuffle_would_mix_up_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        sink(**{"key": "id", "partition_by_key": True, **options})


def test_sink_participant_and_writer_are_what_the_protocol_asks_for() -> None:
    """A static truth, which the type checker verifies."""
    made: Sink = sink()
    participant: Participant = made.participant({"search": made})
    writer: SinkWriter = made.writer(Task(Identity("query", "search"), Epoch(0, "0" * 32), 0, "1" * 32))
    told = {"task": "1" * 32, "rows": 0, "largest": 0, "by_task": False, "indices": [], "unfit": 0}
    assert writer.prepare() == {**told, "version": 1}
    participant.close()
