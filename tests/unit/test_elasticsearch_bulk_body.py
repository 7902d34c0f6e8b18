"""Bulk bodies: every byte once, in order, and readable again."""

from __future__ import annotations

import itertools
import json

import pyarrow as pa
import pytest
from elasticsearch_rig import Document, ListedRows, rendered
from hypothesis import given
from hypothesis import strategies as st

from epochsink.elasticsearch import bulk_body
from epochsink.sink import Epoch, Identity

HEADS = bulk_body.action_heads(version=7, version_type="external_gte")
HOSTILE = 'x"}}\n{"delete":{"_id":"y"}}\r\n\u2028\\ü\x00'


def request_of(documents: list[Document]) -> bulk_body.Request:
    batch = rendered(documents)
    return bulk_body.render(batch["id"], batch["source"], HEADS)


documents = st.lists(
    st.tuples(
        st.text(min_size=1).filter(lambda text: text.isprintable()),
        st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=20), max_size=3),
    ),
    min_size=1,
    max_size=30,
)


def test_lines_carry_id_version_and_document() -> None:
    body = request_of([("a", {"n": 1}), ("b", None)]).body.decode()
    assert [json.loads(line) for line in body.splitlines()] == [
        {"index": {"version": 7, "version_type": "external_gte", "_id": "a"}},
        {"n": 1},
        {"delete": {"version": 7, "version_type": "external_gte", "_id": "b"}},
    ]


def test_a_plain_epoch_has_these_very_bytes_and_a_routing_stands_before_the_id() -> None:
    identity = Identity("query", "search", 1, {"base": 2**40})
    keys = rendered([("a", {"n": 1}), ("b", None)])
    plain, routed = (
        b"".join(each.body for each in operations.requests(ListedRows({"t": [batch]}), None))
        for batch in (keys, rendered([("a", {"n": 1}), ("b", None)], routings=['x"', "y"]))
        for operations in [bulk_body.Operations(identity, Epoch(7, "attempt"), 0, "t", size=1000)]
    )
    version = b'"version":1099511627783,"version_type":"external_gte"'
    assert plain == (b'{"index":{' + version + b',"_id":"a"}}\n{"n": 1}\n{"delete":{' + version + b',"_id":"b"}}\n')
    assert routed == plain.replace(b'"_id":"a"', b'"routing":"x\\"","_id":"a"').replace(
        b'"_id":"b"', b'"routing":"y","_id":"b"'
    )


@given(documents)
def test_each_operation_can_be_read_again(given_documents: list[Document]) -> None:
    request = request_of(given_documents)
    read = [bulk_body.parse(request.operation(position)) for position in range(len(request))]
    assert [(name, None if text is None else json.loads(text)) for name, text in read] == given_documents


@given(documents, st.integers(1, 400))
def test_cutting_keeps_every_byte_in_order_and_the_size(given_documents: list[Document], size: int) -> None:
    whole = request_of(given_documents)
    parts = list(bulk_body.cut(whole, size))
    assert b"".join(part.body for part in parts) == whole.body
    assert sum(map(len, parts)) == len(whole)
    assert all(len(part.body) <= size or len(part) == 1 for part in parts)


@given(st.lists(documents, min_size=1, max_size=10), st.integers(1, 1000))
def test_small_requests_go_together_and_keep_every_operation(several: list[list[Document]], size: int) -> None:
    requests = [request_of(each) for each in several]
    joined = list(bulk_body.gathered(requests, size))
    assert b"".join(each.body for each in joined) == b"".join(each.body for each in requests)
    assert [each.operation(n) for each in joined for n in range(len(each))] == [
        each.operation(n) for each in requests for n in range(len(each))
    ]
    given_sizes = {each.size for each in requests}
    assert all(each.size <= size or each.size in given_sizes for each in joined)
    assert all(one.size + another.size > size for one, another in itertools.pairwise(joined))


@given(st.lists(documents, min_size=1, max_size=4), st.integers(1, 400), st.integers(1, 400))
def test_the_ids_of_a_request_are_those_of_its_operations_however_it_was_cut_and_joined(
    several: list[list[Document]], size: int, later: int
) -> None:
    for joined in bulk_body.gathered(map(request_of, several), size):
        for request in [*bulk_body.cut(joined, later), *joined.halves()]:
            operations = [request.operation(position) for position in range(len(request))]
            told = [] if len(request) == 0 else request.own_fields()
            assert [fields["_id"] for fields in told or ()] == [bulk_body.parse(each)[0] for each in operations]


def test_the_fields_of_a_request_are_index_routing_and_id_and_not_known_of_picked_operations() -> None:
    batch = rendered([("a", {"n": 1}), ("b", None)], routings=['x"', "y"])
    ids = bulk_body.indexed(pa.array(["one", "two"]), bulk_body.routed(batch["routing"], batch["id"]))
    request = bulk_body.render(ids, batch["source"], HEADS)
    assert request.own_fields() == [
        {"_index": "one", "routing": 'x"', "_id": "a"},
        {"_index": "two", "routing": "y", "_id": "b"},
    ]
    assert request.pick([1]).own_fields() is None
    assert bulk_body.joined([request, request.pick([1])]).own_fields() is None


def test_hostile_ids_stay_one_operation() -> None:
    request = request_of([(HOSTILE, {"text": HOSTILE})])
    assert request.body.count(b"\n") == 2
    name, text = bulk_body.parse(request.operation(0))
    assert (name, json.loads(text or "")) == (HOSTILE, {"text": HOSTILE})


def test_picked_operations_make_a_request_of_their_own() -> None:
    picked = request_of([(str(n), {"n": n}) for n in range(5)]).pick([1, 4])
    assert [bulk_body.parse(picked.operation(position))[0] for position in range(len(picked))] == ["1", "4"]
    assert picked.body == picked.operation(0) + picked.operation(1)


def test_halves_keep_all_operations() -> None:
    whole = request_of([(str(n), {"n": n}) for n in range(5)])
    first, second = whole.halves()
    assert (len(first), len(second)) == (2, 3)
    assert first.body + second.body == whole.body


def test_sliced_columns_render_only_their_slice() -> None:
    batch = rendered([(str(n), {"n": n}) for n in range(5)]).slice(2, 2)
    request = bulk_body.render(batch["id"], batch["source"], HEADS)
    assert [bulk_body.parse(request.operation(position))[0] for position in range(len(request))] == ["2", "3"]


def test_no_rows_make_no_request() -> None:
    batch = rendered([("a", {"n": 1})])
    nobody = pa.array([False])
    request = bulk_body.render(batch["id"].filter(nobody), batch["source"].filter(nobody), HEADS)
    assert list(bulk_body.cut(request, 100)) == []


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_both_arrow_texts_render(text: pa.DataType) -> None:
    ids, sources = pa.array(['"_id":"a"}'], text), pa.array(["{}"], text)
    assert bulk_body.parse(bulk_body.render(ids, sources, HEADS).operation(0)) == ("a", "{}")


def test_positions_make_ids() -> None:
    ids = bulk_body.position_ids("key-3-0-", 10, 2)
    assert ids.to_pylist() == ['"_id":"key-3-0-10"}', '"_id":"key-3-0-11"}']
