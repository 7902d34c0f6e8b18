"""What check() finds on a live server, what it creates, and what an index must be."""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from elasticsearch_requests import OneByOne, SmallRequests
from elasticsearch_rig import SCHEMA, Rig, rendered
from http_proxy import Answer, Proxy
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.config import is_index_name
from epochsink.elasticsearch.connection import connect
from epochsink.errors import OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.sink import LastDone, Outcome, comparing
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import elasticsearch as vendor
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService


@pytest.fixture
def name(fresh_index: FreshName) -> str:
    return fresh_index()


@pytest.fixture
def sink(elasticsearch: ElasticsearchService, name: str) -> Elasticsearch:
    return Elasticsearch(elasticsearch.url, index=name, key="id", create={"number_of_replicas": 0})


@pytest.fixture
def client(sink: Elasticsearch) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(sink)) as connected:
        yield connected


def changed(sink: Elasticsearch, kind: type[Elasticsearch] = Elasticsearch, **options: Any) -> Elasticsearch:
    return kind(**{"hosts": sink.hosts[0], "index": sink.index, "key": "id", **options})


def check(sink: Elasticsearch, schema: pa.Schema = SCHEMA) -> list[str]:
    with closing(OneSink.of(sink)) as committer:
        return committer.check(schema)


def test_a_missing_index_is_made_from_the_schema(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    assert check(sink) == []
    made = client.indices.get(index=sink.index)[sink.index]
    assert made["mappings"]["properties"] == {
        "id": {"type": "keyword", "ignore_above": 8191},
        "n": {"type": "long"},
        "at": {"type": "date_nanos", "ignore_malformed": True},
    }
    assert made["settings"]["index"]["number_of_replicas"] == "0"
    assert check(sink) == []


LATER = [
    ("d", pa.float64()),
    ("text", pa.string()),
    ("m", pa.map_(pa.string(), pa.int64())),
    ("exact", pa.decimal128(30, 2)),
    ("seen", pa.timestamp("us", tz="UTC")),
]
"""Columns whose values the server would map by the first document, and whose later ones it would refuse then."""
FIRST = {"d": 1.5, "text": "2026-01-01", "m": {"a": 1}, "exact": 1.25, "seen": "2026-01-01T00:00:00.123456Z"}
THEN = {"d": "NaN", "text": "no date", "m": {"a": 1, "a.b": 2}, "exact": 12345678901234567890.25, "seen": None}


def test_columns_that_a_restart_adds_are_mapped_as_in_a_new_index(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    """Else the server maps them by the first document, and refuses rows after the decision."""
    schema = pa.schema([*SCHEMA, *LATER, ("s", pa.struct([("x", pa.int64()), ("y", pa.float64())]))])
    before = pa.schema([*SCHEMA, ("s", pa.struct([("x", pa.int64())]))])
    with closing(Rig.joining(sink, before)) as rig:
        rig.apply(0, [rendered([("a", {"n": 1, "s": {"x": 1}})])])
    assert check(sink, schema) == []
    another = changed(sink, index=f"{sink.index}_new")
    assert check(another, schema) == []
    made = client.indices.get_mapping(index=f"{sink.index}*").body
    assert made[sink.index] == made[another.index]
    with closing(Rig(sink, rig.identity)) as later:
        later.apply(1, [rendered([("b", {**FIRST, "s": {"x": 1, "y": 1}}), ("c", {**THEN, "s": {"y": "NaN"}})])])
        assert sorted(later.stored()) == ["a", "b", "c"]


def test_a_comparison_creates_no_index_and_adds_no_column_and_says_what_a_start_would_do(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    letters = f"{sink.index}_letters"
    lettered = changed(sink, on_rejected="dead_letter", dead_letter_index=letters)
    with comparing() as would:
        assert check(lettered) == []
    made = [f"create the index '{letters}'", f"create the index '{sink.index}' with a mapping of the columns id, n, at"]
    assert [each for each in would if sink.index in each] == made
    assert not client.indices.exists(index=f"{sink.index}*", allow_no_indices=False)
    assert check(lettered) == []
    client.indices.put_mapping(index=sink.index, dynamic="strict")
    mapping = client.indices.get_mapping(index=sink.index).body
    later = pa.schema([*SCHEMA, ("d", pa.float64())])
    with comparing() as would:
        assert check(lettered, later) == []
    assert would == [f"add to the mapping of index '{sink.index}' the column(s) d"]
    assert client.indices.get_mapping(index=sink.index).body == mapping
    assert check(lettered, later) == []


def test_a_mapping_that_is_not_ours_gets_no_columns(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    client.indices.create(index=sink.index, mappings={"properties": {"n": {"type": "long"}}})
    assert check(sink) == []
    assert client.indices.get_mapping(index=sink.index)[sink.index]["mappings"]["properties"].keys() == {"n"}


def test_a_column_that_the_user_may_not_add_to_the_mapping_is_a_finding_with_the_request(
    sink: Elasticsearch,
) -> None:
    assert check(sink) == []
    denied = Answer(403, b'{"error":{"type":"security_exception","reason":"action is unauthorized"},"status":403}')
    with Proxy(
        sink.hosts[0], lambda seen: denied if "_mapping" in seen.path and seen.method == "PUT" else None
    ) as proxy:
        (finding,) = check(changed(sink, hosts=proxy.url), pa.schema([*SCHEMA, ("d", pa.float64())]))
    assert "lacks the column(s) 'd', and their mapping cannot be added" in finding
    assert f'PUT /{sink.index}/_mapping {{"properties": {{"d": {{"type": "double"' in finding


@pytest.mark.parametrize(
    "end", ["..b", ".", "...", "-_+", "%2e", "&=;", "{}()[]", "é" * 20, "~!@$^'", "A", "*", "#", ":", '"']
)
def test_each_name_of_an_index_that_is_accepted_is_one_for_the_server(
    name: str, client: vendor.Elasticsearch, end: str
) -> None:
    """And one that is refused is none: else the server's words were all that a user gets."""
    takes = client.options(ignore_status=400).indices.create(index=name + end).meta.status != 400
    assert is_index_name(name + end) == takes


def test_an_unknown_index_is_a_finding_with_creation_off(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    (finding,) = check(changed(sink, create=False))
    assert f"the index '{sink.index}' does not exist" in finding
    assert "create=True" in finding
    assert not client.indices.exists(index=sink.index)


def test_an_index_that_vanished_stops_the_commit_and_is_not_made_by_it(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered([("a", {"n": 1})])])
        client.indices.delete(index=sink.index)
        with pytest.raises(OutcomeUnknown, match="does not exist"):
            rig.commit(prepared)
        assert not client.indices.exists(index=sink.index)
        assert rig.committer.newest() is None


def test_settings_that_cannot_be_are_a_finding(sink: Elasticsearch) -> None:
    (finding,) = check(changed(sink, create={"number_of_shards": 0}))
    assert "number_of_shards" in finding


def test_a_mapping_conflict_is_found_before_any_row(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    client.indices.create(index=sink.index, mappings={"properties": {"n": {"type": "date"}, "at": {"type": "long"}}})
    (finding,) = check(sink)
    assert "'at'" in finding
    assert "long" in finding


REFUSED: list[tuple[pa.DataType, object, str]] = [
    (pa.string(), "text", "long"),
    (pa.string(), "text", "boolean"),
    (pa.int64(), 5, "boolean"),
    (pa.int64(), 2**40, "integer"),
    (pa.int64(), 5, "object"),
    (pa.bool_(), True, "long"),
    (pa.bool_(), True, "date"),
    (pa.timestamp("us", tz="UTC"), "2026-11-21T10:00:00.123456Z", "long"),
    (pa.struct([("x", pa.int64())]), {"x": 1}, "keyword"),
]
TAKEN: list[tuple[pa.DataType, object, str]] = [
    (pa.string(), "2026-11-21", "date"),
    (pa.string(), "127.0.0.1", "ip"),
    (pa.int64(), 5, "keyword"),
    (pa.int64(), 5, "date"),
    (pa.int64(), 5, "double"),
    (pa.bool_(), True, "keyword"),
    (pa.timestamp("us", tz="UTC"), "2026-11-21T10:00:00.123456Z", "date_nanos"),
    (pa.timestamp("us"), "2026-11-21T10:00:00.123456", "date"),
    (pa.binary(), "aGk=", "binary"),
    (pa.struct([("lat", pa.float64())]), {"lat": 1.5, "lon": 2}, "geo_point"),
]


def test_what_is_called_a_conflict_is_refused_by_the_server(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    fields = {f"f{number}": {"type": mapped} for number, (_, _, mapped) in enumerate(REFUSED)}
    client.indices.create(index=sink.index, mappings={"properties": fields})
    schema = pa.schema([(f"f{number}", kind) for number, (kind, _, _) in enumerate(REFUSED)])
    assert [re.findall(r"'(f\d)'", finding) for finding in check(sink, schema)] == [[name] for name in fields]
    with closing(Rig.joining(sink, pa.schema([]))) as rig:
        documents = [(f"d{number}", {f"f{number}": value}) for number, (_, value, _) in enumerate(REFUSED)]
        with pytest.raises(RowsRejected, match=r"(document|mapper)_parsing_exception") as caught:
            rig.apply(0, [rendered(documents)])
    assert caught.value.facts["ids"] == [name for name, _ in documents]


def test_what_is_called_no_conflict_is_taken_by_the_server(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    fields = {f"f{number}": {"type": mapped} for number, (_, _, mapped) in enumerate(TAKEN)}
    client.indices.create(index=sink.index, mappings={"properties": fields})
    schema = pa.schema([(f"f{number}", kind) for number, (kind, _, _) in enumerate(TAKEN)])
    with closing(Rig.joining(sink, schema)) as rig:
        documents = [(f"d{number}", {f"f{number}": value}) for number, (_, value, _) in enumerate(TAKEN)]
        rig.apply(0, [rendered(documents)])
        assert rig.stored() == dict(documents)


def test_a_closed_index_is_found_and_stops_a_commit_which_can_go_on_once_opened(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered([("a", {"n": 1})])])
        client.indices.close(index=sink.index)
        (finding,) = check(sink)
        assert "index_closed_exception" in finding
        with pytest.raises(OutcomeUnknown, match=r"accepts no writes.*index_closed_exception"):
            rig.commit(prepared)
        client.indices.open(index=sink.index)
        rig.commit(prepared)
        assert rig.stored() == {"a": {"n": 1}}


@pytest.mark.parametrize("block", ["write", "read_only"])
def test_a_read_only_index_is_found_and_stops_a_commit_which_can_go_on_once_lifted(
    sink: Elasticsearch, client: vendor.Elasticsearch, block: str
) -> None:
    dead = changed(sink, on_rejected="dead_letter", dead_letter_index=f"{sink.index}_dead")
    with closing(Rig.joining(dead)) as rig:
        prepared = rig.prepare(0, [rendered([("a", {"n": 1})])])
        client.indices.put_settings(index=sink.index, settings={f"index.blocks.{block}": True})
        (finding,) = check(sink)
        assert "cluster_block_exception" in finding
        with pytest.raises(OutcomeUnknown, match=r"accepts no writes.*cluster_block_exception"):
            rig.commit(prepared)
        assert rig.stored(dead.dead_letter_index) == {}
        client.indices.put_settings(index=sink.index, settings={f"index.blocks.{block}": None})
        rig.commit(prepared)
        assert rig.stored() == {"a": {"n": 1}}


def test_an_alias_of_one_index_is_written_through(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    alias = f"{sink.index}_alias"
    client.indices.create(index=sink.index, aliases={alias: {}})
    with closing(Rig.joining(changed(sink, index=alias))) as rig:
        rig.apply(0, [rendered([("a", {"n": 1})])])
        assert rig.stored(sink.index) == {"a": {"n": 1}}


def test_an_alias_of_several_indices_is_refused_with_the_reason(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    alias = f"{sink.index}_alias"
    client.indices.create(index=f"{sink.index}_1", aliases={alias: {}})
    client.indices.create(index=f"{sink.index}_2", aliases={alias: {"is_write_index": True}})
    (finding,) = check(changed(sink, index=alias))
    assert "an _id is unique within one index only" in finding
    assert f"{sink.index}_1, {sink.index}_2" in finding


@pytest.mark.parametrize("place", ["index", "index_by"])
def test_an_alias_of_several_indices_is_refused_for_dead_letters(
    sink: Elasticsearch, client: vendor.Elasticsearch, place: str
) -> None:
    """Letters are written to its write index, and found in all of them."""
    alias = f"{sink.index}_dead"
    client.indices.create(index=f"{alias}-1", aliases={alias: {"is_write_index": False}})
    client.indices.create(index=f"{alias}-2", aliases={alias: {"is_write_index": True}})
    where = {"index": sink.index} if place == "index" else {"index_by": "id", "index": None}
    (finding,) = check(changed(sink, on_rejected="dead_letter", dead_letter_index=alias, **where))
    assert f"dead_letter_index=: '{alias}' is an alias of 2 indices ({alias}-1, {alias}-2)" in finding
    assert "name one of the indices, or an alias of just one" in finding


def test_an_alias_for_dead_letters_that_rolls_over_stops_vote_and_commit_until_one_index_is_named(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    alias = f"{sink.index}_dead"
    client.indices.create(index=f"{alias}-000001", aliases={alias: {"is_write_index": True}})
    letters: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": alias}
    with closing(Rig.joining(changed(sink, **letters))) as rig:
        prepared = rig.prepare(0, [rendered([("a", {"n": 1})])])
        client.indices.rollover(alias=alias)
        with pytest.raises(PrepareFailed, match=r"dead_letter_index=.*is an alias of 2 indices"):
            rig.prepare(0, [rendered([("a", {"n": 1})])])
        with pytest.raises(OutcomeUnknown, match=r"dead_letter_index=.*is an alias of 2 indices.*stays pending"):
            rig.commit(prepared)
        one = changed(sink, **{**letters, "dead_letter_index": f"{alias}-000001"})
        with closing(Rig(one, rig.identity)) as corrected:
            assert corrected.commit(prepared).outcome is Outcome.COMMITTED


def test_an_alias_that_accepts_no_writes_is_refused(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    alias = f"{sink.index}_alias"
    client.indices.create(index=sink.index, aliases={alias: {"is_write_index": False}})
    (finding,) = check(changed(sink, index=alias))
    assert f"the alias '{alias}' accepts no writes" in finding


def test_an_alias_with_a_routing_is_refused(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    alias = f"{sink.index}_alias"
    client.indices.create(index=sink.index, aliases={alias: {"routing": "a"}})
    (finding,) = check(changed(sink, index=alias))
    assert "has routing" in finding


def test_an_alias_moved_between_epochs_stops_until_its_index_is_accepted(
    sink: Elasticsearch, client: vendor.Elasticsearch
) -> None:
    alias, first, second = f"{sink.index}_alias", f"{sink.index}_1", f"{sink.index}_2"
    client.indices.create(index=first, aliases={alias: {}})
    client.indices.create(index=second)
    with closing(Rig.joining(changed(sink, index=alias))) as rig:
        rig.apply(0, [rendered([("a", {"n": 1})])])
        client.indices.update_aliases(
            actions=[{"remove": {"index": first, "alias": alias}}, {"add": {"index": second, "alias": alias}}]
        )
        with pytest.raises(WentBack, match=f"{alias}' was the index '{first}'") as caught:
            rig.prepare(1, [rendered([("b", {"n": 2})])])
        assert "epochsink accept CHECKPOINT 0 --sink NAME" in caught.value.hint
        accepted = LastDone(0, "", ())
        prepared = rig.prepare(1, [rendered([("b", {"n": 2})])], after=accepted)
        assert rig.commit(prepared, accepted).outcome is Outcome.COMMITTED
        assert rig.stored(second) == {"b": {"n": 2}}


def test_an_alias_that_moves_during_a_commit_gets_the_whole_epoch(
    sink: Elasticsearch, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias, first, second = f"{sink.index}_alias", f"{sink.index}_1", f"{sink.index}_2"
    client.indices.create(index=first, aliases={alias: {}})
    client.indices.create(index=second)
    moves = [{"remove": {"index": first, "alias": alias}}, {"add": {"index": second, "alias": alias}}]

    def move(point: str) -> None:
        if point == "elasticsearch.bulk.between" and moves:
            client.indices.update_aliases(actions=list(moves))
            moves.clear()

    monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", move)
    with closing(Rig.joining(changed(sink, OneByOne, index=alias))) as rig:
        documents = [(str(number), {"n": number}) for number in range(20)]
        rig.apply(0, [rendered(documents)])
        assert not moves
        assert rig.stored(second) == dict(documents)


def test_an_alias_that_moves_away_and_back_during_a_commit_takes_no_document_with_it(
    sink: Elasticsearch, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same before and after. A document that another program has changed is looked for where it is, too."""
    alias, first, second = f"{sink.index}_alias", f"{sink.index}_1", f"{sink.index}_2"
    client.indices.create(index=first, aliases={alias: {}})
    client.indices.create(index=second)
    # after the first request, and after some more
    places = {1: (first, second), 4: (second, first)}
    reached: list[str] = []

    def move(point: str) -> None:
        if point != "elasticsearch.bulk.between":
            return
        reached.append(point)
        if len(reached) in places:
            old, new = places.pop(len(reached))
            client.indices.update_aliases(
                actions=[{"remove": {"index": old, "alias": alias}}, {"add": {"index": new, "alias": alias}}]
            )

    with closing(Rig.joining(changed(sink, OneByOne, index=alias))) as rig:
        rig.apply(0, [rendered([("8", {"n": 0})])])
        for touch in range(2):
            client.update(index=first, id="8", doc={"touched": touch})
        monkeypatch.setattr("epochsink.failpoints.reach", move)
        documents = [(str(number), {"n": number}) for number in range(40)]
        rig.apply(1, [rendered(documents[:20])], [rendered(documents[20:])])
        assert not places
        assert rig.stored(second) == {}
        assert rig.stored(first) == dict(documents)


def test_an_index_made_anew_stops_until_an_operator_accepts_it(
    sink: Elasticsearch, client: vendor.Elasticsearch, tmp_path: Path
) -> None:
    """At a start, in the vote and in the commit; accepted by the command line, over a real ledger."""
    kit = CheckpointKit(tmp_path / "checkpoint", {"search": sink})
    (participant,) = kit.participants
    assert participant.check("search", SCHEMA) == []
    kit.run(0, {"search": rendered([("a", {"n": 1})])})
    kit.record(1, {"search": rendered([("b", {"n": 2})])})
    client.indices.delete(index=sink.index)
    assert check(sink) == []
    kit.decide(1)
    for stopped in (kit.coordinator.commit_decided, kit.start):
        with pytest.raises(WentBack, match="deleted and created again") as caught:
            stopped()
        assert "epochsink accept CHECKPOINT 0 --sink search" in caught.value.hint
    told = CliRunner().invoke(app, ["accept", str(kit.root), "0", "--sink", "search", "--yes"])
    assert told.exit_code == 0, told.output
    kit.coordinator = kit.start()
    kit.run(2, {"search": rendered([("c", {"n": 3})])})
    kit.coordinator = kit.start()
    client.indices.refresh(index=sink.index)
    found = client.search(index=sink.index)["hits"]["hits"]
    assert {hit["_id"] for hit in found} == {"b", "c"}
    kit.close()


def test_deletes_need_gc_deletes_and_created_indices_have_it(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    deleting = changed(sink, delete_when="gone")
    client.indices.create(index=sink.index)
    (finding,) = check(deleting)
    assert "index.gc_deletes=60s" in finding
    assert "1h" in finding
    client.indices.put_settings(index=sink.index, settings={"index.gc_deletes": "90m"})
    assert check(deleting) == []
    client.indices.delete(index=sink.index)
    assert check(deleting) == []
    made = client.indices.get_settings(index=sink.index, flat_settings=True)[sink.index]["settings"]
    assert made["index.gc_deletes"] == "1h"


def test_asynchronous_translogs_are_found(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    client.indices.create(index=sink.index, settings={"index.translog.durability": "async"})
    (finding,) = check(sink)
    assert "index.translog.durability=async" in finding


def test_without_other_refreshes_searches_see_an_epoch_only_when_all_of_it_is_applied(
    sink: Elasticsearch, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def look(point: str) -> None:
        seen.append((point, client.count(index=sink.index)["count"]))

    held_back = {"index.refresh_interval": "-1"}
    with closing(Rig.joining(changed(sink, OneByOne, refresh=True, create=held_back))) as rig:
        rig.apply(0, [rendered([("old", {"n": 0})])])
        monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", look)
        rig.apply(1, [rendered([(str(number), {"n": number}) for number in range(20)])])
    between = [count for point, count in seen if point == "elasticsearch.bulk.between"]
    assert len(between) > 3
    assert set(between) == {1}
    assert seen[-1] == ("elasticsearch.marker.before", 21)


@pytest.mark.parametrize("interval", ["-1", "1h"])
def test_only_an_index_without_refreshes_of_its_own_gets_one_request_for_all_shards(
    sink: Elasticsearch, interval: str
) -> None:
    """A refresh within the bulk request saves a request, and shows the epoch in one shard before the next."""
    seen: list[tuple[bool, str]] = []
    with Proxy(sink.hosts[0], lambda request: seen.append((request.is_bulk, request.path))) as proxy:
        create = {"index.refresh_interval": interval}
        with closing(Rig.joining(changed(sink, hosts=proxy.url, refresh=True, create=create))) as rig:
            prepared = rig.prepare(0, [rendered([("a", {"n": 1})])])
            seen.clear()
            rig.commit(prepared)
    (bulk,) = (path for is_bulk, path in seen if is_bulk)
    own = [path for _, path in seen if path.startswith(f"/{sink.index}/_refresh")]
    assert ("refresh=true" in bulk, len(own)) == ((False, 1) if interval == "-1" else (True, 0))


@pytest.mark.parametrize("kind", [SmallRequests, Elasticsearch], ids=["several requests", "one request"])
def test_refresh_makes_an_epoch_searchable_at_the_end_of_its_commit(
    sink: Elasticsearch, client: vendor.Elasticsearch, kind: type[Elasticsearch]
) -> None:
    seldom = {"index.refresh_interval": "1h"}
    with closing(Rig.joining(changed(sink, kind, refresh=True, create=seldom))) as rig:
        rig.apply(0, [rendered([(str(number), {"n": 0}) for number in range(9)])])
        assert client.count(index=sink.index)["count"] == 9
        rig.apply(1, [rendered([("0", None), ("1", {"n": 1})])])
        assert client.count(index=sink.index)["count"] == 8
        for number in range(3):
            client.update(index=sink.index, id="2", doc={"touched": number})
        rig.apply(2, [rendered([("1", None), ("2", {"n": 2})])])
        assert client.count(index=sink.index)["count"] == 7
        assert client.count(index=sink.index, query={"term": {"n": 2}})["count"] == 1


def test_an_index_that_routes_by_something_else_is_found(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    client.indices.create(index=sink.index, mappings={"_routing": {"required": True}})
    (finding,) = check(sink)
    assert "routing is required" in finding


def test_checking_writes_no_document(sink: Elasticsearch, client: vendor.Elasticsearch) -> None:
    check(sink)
    client.indices.refresh(index=sink.index)
    assert client.count(index=sink.index)["count"] == 0
