"""Where documents are stored, if more than the ``_id`` decides it: each exactly once, whatever comes between."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_requests import OneByOne, SmallRequests
from elasticsearch_rig import SCHEMA, Rig, keyless, rendered

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.errors import ConfigurationError, OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.sink import Epoch, LastDone, Outcome
from epochsink.spark.query_plan import arrow_schema, one_pass, refuse_bad_plan, row_schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from fix_services import FreshName
    from pyspark.sql import DataFrame, SparkSession

    from epochsink_devkit.services import ElasticsearchService

SHARDS = 5


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    settings = {"number_of_shards": SHARDS, "number_of_replicas": 0}
    index = fresh_index()
    return {"hosts": elasticsearch.url, "index": index, "key": "id", "create": settings, "timeout": 20.0}


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(Elasticsearch(**options))) as connected:
        yield connected


def customers(first: int, last: int, value: int | None = 0) -> pa.RecordBatch:
    """Return rows of three customers; without a value they delete."""
    ids = range(first, last)
    documents = [(f"d{number}", None if value is None else {"n": value}) for number in ids]
    return rendered(documents, routings=[f"customer {number % 3}" for number in ids])


def shards(client: vendor.Elasticsearch, index: str) -> dict[str, set[int]]:
    """Return the shards in which the documents of each routing are."""
    client.indices.refresh(index=index)
    found: dict[str, set[int]] = {}
    for shard in range(SHARDS):
        for hit in client.search(index=index, size=1000, preference=f"_shards:{shard}")["hits"]["hits"]:
            found.setdefault(hit.get("_routing", ""), set()).add(shard)
    return found


def test_documents_of_a_routing_share_a_shard_and_are_replaced_and_deleted_there(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    routed = SmallRequests(**options, routing="customer")
    with closing(Rig.joining(routed)) as rig:
        rig.apply(0, [customers(0, 20)], [customers(20, 40)])
        for turn in range(2):  # so that its version lies above the next epoch's; the same update twice would be none
            client.update(index=options["index"], id="d7", routing="customer 1", doc={"touched": turn})
        client.delete(index=options["index"], id="d8", routing="customer 2")
        again = rig.prepare(1, [customers(0, 20, 1)], [customers(20, 30, 1), customers(35, 40, None)])
        assert rig.commit(again).outcome is Outcome.COMMITTED
        assert rig.stored() == {f"d{n}": {"n": int(n < 30)} for n in range(35)}
        assert sorted(shards(client, options["index"])) == ["customer 0", "customer 1", "customer 2"]
        assert all(len(each) == 1 for each in shards(client, options["index"]).values())


def test_an_epoch_is_rendered_again_with_the_routing_that_was_spooled(options: dict[str, Any]) -> None:
    """Whatever the next start's arguments are; its own first epoch is refused, since it would double documents."""
    with closing(Rig.joining(SmallRequests(**options, routing="customer"))) as rig:
        rig.apply(0, [customers(0, 20)])
        prepared = rig.prepare(1, [customers(0, 20, 1)])
        with closing(Rig(SmallRequests(**options), rig.identity)) as unrouted:
            assert unrouted.commit(prepared).outcome is Outcome.COMMITTED
            assert unrouted.stored() == {f"d{n}": {"n": 1} for n in range(20)}
            with pytest.raises(WentBack, match="placed by routing='customer', and now by key=") as caught:
                unrouted.prepare(2, [rendered([("d0", {"n": 2})])])
            assert "epochsink accept CHECKPOINT 1 --sink NAME" in caught.value.hint
            accepted = LastDone(1, "", ())
            fresh = unrouted.prepare(2, [rendered([("new", {"n": 2})])], after=accepted)
            assert unrouted.commit(fresh, accepted).outcome is Outcome.COMMITTED
            unrouted.apply(3, [rendered([("newer", {"n": 3})])])


def test_dead_letters_and_validation_know_the_routing(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    client.indices.create(
        index=options["index"],
        mappings={"_routing": {"required": True}, "properties": {"n": {"type": "long"}}},
        settings={"number_of_replicas": 0},
    )
    dead = f"{options['index']}_dead"
    bad = rendered([("bad", {"n": "x"}), ("good", {"n": 1})], routings=["a", "b"])
    lettered = Elasticsearch(**options, routing="customer", on_rejected="dead_letter", dead_letter_index=dead)
    with closing(Rig.joining(lettered)) as rig:
        rig.apply(0, [bad])
        (letter,) = rig.stored(dead).values()
        assert (letter["id"], letter["routing"]) == ("bad", "a")
        assert rig.stored() == {"good": {"n": 1}}
    with closing(Rig.joining(Elasticsearch(**options, routing="customer", validate=True))) as rig:
        with pytest.raises(RowsRejected, match="validate=True found it"):
            rig.prepare(0, [bad])
        rig.apply(0, [bad.slice(1)])


def frame_of(spark: SparkSession) -> DataFrame:
    frame = spark.range(20).selectExpr("id", "id % 3 AS customer", "concat('c\"', id % 3) AS name")
    return frame.selectExpr("*", "IF(id = 5, NULL, 'x') AS gap", "named_struct('city', name) AS place")


@pytest.mark.parametrize("routing", ["customer", "name", "concat(name, customer)"])
def test_spark_renders_the_routing(
    spark: SparkSession, options: dict[str, Any], client: vendor.Elasticsearch, routing: str
) -> None:
    key = ["id", "name", "customer"]
    sink = Elasticsearch(**{**options, "key": key}, routing=routing, select=["id", "customer", "name"])
    frame = frame_of(spark)
    schemas = row_schemas(frame, {"search": sink})
    refuse_bad_plan(frame, {"search": sink}, schemas)
    made = one_pass({"search": sink}, schemas).apply(frame).toArrow().to_batches()
    with closing(Rig.joining(sink, arrow_schema(frame.selectExpr(*sink.select).schema))) as rig:
        rig.apply(0, made)
    expected = {row[0] for row in frame.selectExpr(f"CAST({routing} AS STRING)").distinct().collect()}
    assert set(shards(client, options["index"])) == expected


def test_a_routing_that_is_null_or_does_not_follow_from_the_key_is_refused(
    spark: SparkSession, options: dict[str, Any]
) -> None:
    frame = frame_of(spark)

    def planned(**changed: Any) -> list[pa.RecordBatch]:
        sink = Elasticsearch(**{**options, **changed})
        schemas = row_schemas(frame, {"search": sink})
        refuse_bad_plan(frame, {"search": sink}, schemas)
        made: list[pa.RecordBatch] = one_pass({"search": sink}, schemas).apply(frame).toArrow().to_batches()
        return made

    for clock in ("concat(name, DATE 'today')", "concat(name, curdate())", "concat(name, unix_timestamp())"):
        with pytest.raises(ConfigurationError, match="not known whether that has the same value each time"):
            planned(key=["id", "name"], routing=clock)

    with pytest.raises(ConfigurationError, match=r"routing='`name`' depends on name, and the key does not") as caught:
        planned(routing="name")
    assert "key=['`id`', 'name']" in caught.value.hint
    with pytest.raises(ConfigurationError, match="does not"):  # the key is another column of this name
        planned(routing="upper(name)", key=["id", "name"], select=["id", "'a' AS name"])
    with pytest.raises(ConfigurationError, match="select= makes without naming it"):
        planned(routing="city", select=["id", "place.city"])
    planned(routing="name", key=None)
    with closing(Rig.joining(Elasticsearch(**{**options, "key": None}, routing="gap"))) as rig:
        with pytest.raises(RowsRejected, match="is empty, NULL or not valid UTF-8"):
            rig.prepare(0, planned(routing="gap", key=None))
        rig.apply(0, [keyless([{"n": 1}])])


class Months:
    """Rows of the indices of some months, whose names have a prefix of their own."""

    def __init__(self, client: vendor.Elasticsearch, prefix: str) -> None:
        self._client = client
        self.prefix = prefix

    def name(self, month: int) -> str:
        return f"{self.prefix}-2026.{month:02}"

    def rows(self, first: int, last: int, value: int | None = 0, months: int = 3) -> pa.RecordBatch:
        """Return rows whose number decides the month; without a value they delete."""
        ids = range(first, last)
        documents = [(f"d{number}", None if value is None else {"n": value}) for number in ids]
        return rendered(documents, indices=[self.name(number % months) for number in ids])

    def stored(self) -> dict[str, tuple[str, Any]]:
        """Return index and document of each id, each of which is in one index."""
        self._client.indices.refresh(index=f"{self.prefix}-*")
        hits = self._client.search(index=f"{self.prefix}-*", size=1000)["hits"]["hits"]
        assert len({hit["_id"] for hit in hits}) == len(hits)
        return {hit["_id"]: (hit["_index"], hit["_source"]) for hit in hits}

    def set_back(self, month: int, *, again: bool) -> None:
        """Delete an index, and create it again or not."""
        self._client.indices.delete(index=self.name(month))
        if again:
            self.create(month)

    def create(self, month: int) -> None:
        self._client.indices.create(index=self.name(month), settings={"number_of_replicas": 0})

    def expected(self, **values: int) -> dict[str, tuple[str, Any]]:
        return {name: (self.name(int(name[1:]) % 3), {"n": value}) for name, value in values.items()}


@pytest.fixture
def months(options: dict[str, Any], client: vendor.Elasticsearch) -> Months:
    options["create"] = {"number_of_shards": 1, "number_of_replicas": 0}
    return Months(client, options.pop("index"))


def test_each_row_goes_to_the_index_that_it_names_and_is_replaced_and_deleted_there(
    options: dict[str, Any], client: vendor.Elasticsearch, months: Months
) -> None:
    sink = SmallRequests(**options, index_by="month", refresh=True)
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [months.rows(0, 20)], [months.rows(20, 40)])
        assert client.count(index=f"{months.prefix}-*")["count"] == 40, "refresh=True"
        for turn in range(2):  # so that its version lies above the next epoch's; the same update twice would be none
            client.update(index=months.name(1), id="d7", doc={"touched": turn})
        client.delete(index=months.name(2), id="d8")
        again = rig.prepare(1, [months.rows(0, 20, 1)], [months.rows(20, 30, 1), months.rows(35, 40, None)])
        for _ in range(2):  # the second time, the marker says that it is applied
            assert rig.commit(again).outcome is Outcome.COMMITTED
        assert months.stored() == months.expected(**{f"d{n}": int(n < 30) for n in range(35)})


def test_an_epoch_that_broke_off_between_its_indices_is_applied_again_as_a_whole(
    options: dict[str, Any], months: Months, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a start with other arguments, without keys, so that a document that came twice would show."""
    sink = SmallRequests(**{**options, "key": None}, index_by="month")
    batch = months.rows(0, 60).drop_columns(["id"])
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [batch])
        for point in ("elasticsearch.bulk.between", "elasticsearch.marker.before"):

            def stop(reached: str, at: str = point) -> None:
                if reached == at:
                    raise KeyboardInterrupt

            monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", stop)
            with pytest.raises(KeyboardInterrupt):
                rig.commit(prepared)
            monkeypatch.undo()
        with closing(Rig(SmallRequests(**options, index="elsewhere"), rig.identity)) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
        assert sorted(index for index, _ in months.stored().values()) == sorted(
            months.name(number % 3) for number in range(60)
        )


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
@pytest.mark.parametrize("when", ["vote", "commit", "apply"])
def test_an_index_of_the_newest_epoch_that_was_set_back_stops_until_it_is_accepted(
    options: dict[str, Any], months: Months, monkeypatch: pytest.MonkeyPatch, when: str, *, again: bool
) -> None:
    def set_back(point: str) -> None:
        if point == "elasticsearch.bulk.between":
            monkeypatch.undo()
            months.set_back(1, again=again)

    with closing(Rig.joining(OneByOne(**options, index_by="month"))) as rig:
        rig.apply(0, [months.rows(0, 3)])
        prepared = None if when == "vote" else rig.prepare(1, [months.rows(0, 20, 1)])
        if when == "apply":
            monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", set_back)
        else:
            months.set_back(1, again=again)
        goes_on = partial(rig.commit, prepared) if prepared else partial(rig.prepare, 1, [months.rows(0, 20, 1)])
        with pytest.raises(WentBack, match=f"the index '{months.name(1)}' was deleted, created again") as caught:
            goes_on()
        assert "epochsink accept CHECKPOINT 0 --sink NAME" in caught.value.hint
        assert rig.committer.newest() == 0
        accepted = LastDone(0, "", ())
        if prepared is None:
            prepared = rig.prepare(1, [months.rows(0, 20, 1)], after=accepted)
        elif when == "commit" and not again:  # a vote makes missing indices, a commit does not
            with pytest.raises(OutcomeUnknown, match=f"PUT /{months.name(1)}"):
                rig.commit(prepared, accepted)
            months.create(1)
        assert rig.commit(prepared, accepted).outcome is Outcome.COMMITTED
        assert months.stored() == months.expected(**{f"d{n}": 1 for n in range(20)})


BAD_NAMES = [None, "", "Upper", "_leading", "-a", "a b", "a/b", "<a-{now/d}>", "..", "x" * 256, "epochsink-markers"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_no_index_can_have_is_refused_with_its_value(
    options: dict[str, Any], months: Months, name: str | None
) -> None:
    with closing(Rig.joining(SmallRequests(**options, index_by="month"))) as rig:
        with pytest.raises(RowsRejected) as caught:
            rig.prepare(0, [months.rows(0, 3), rendered([("a", {"n": 1})], indices=[name])])
        assert f"index {name!r}" in str(caught.value)
        assert "index_by= gives NULL, or a text that is not the name of an index" in str(caught.value)
        rig.apply(0, [months.rows(0, 3)])
        assert len(months.stored()) == 3


def test_rows_with_such_names_and_refused_documents_become_dead_letters_once(
    options: dict[str, Any], months: Months
) -> None:
    dead = f"{months.prefix}_dead"
    lettered: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": dead}
    bad = rendered([(f"b{number}", {"n": 1}) for number in range(len(BAD_NAMES))], indices=BAD_NAMES)
    letters_itself = rendered([("dead", {"n": 1}), ("text", {"n": "x"})], indices=[dead, months.name(0)])
    with closing(Rig.joining(SmallRequests(**options, index_by="month", **lettered))) as rig:
        rig.committer.participant.begin(Epoch(0, "a"), {"search": SCHEMA})
        prepared = rig.prepare(0, [months.rows(0, 30), bad], [letters_itself])
        with closing(rig.another_driver()) as other:
            for driver in (rig, other):
                assert driver.commit(prepared).outcome is Outcome.COMMITTED
        assert months.stored() == months.expected(**{f"d{n}": 0 for n in range(30)})
        # OpenSearch calls it mapper_parsing_exception
        name = {"mapper_parsing_exception": "document_parsing_exception"}
        letters = {
            each["id"]: (each["index"], name.get(each["error"], each["error"])) for each in rig.stored(dead).values()
        }
        invalid = {f"b{n}": (index, "invalid_index_name_exception") for n, index in enumerate(BAD_NAMES)}
        refused = {"text": (months.name(0), "document_parsing_exception")}
        assert letters == {**invalid, "dead": (dead, "invalid_index_name_exception"), **refused}


def test_an_epoch_touches_a_bounded_number_of_indices(options: dict[str, Any], months: Months) -> None:
    with closing(Rig.joining(SmallRequests(**options, index_by="month"))) as rig:
        for tasks in (
            [[months.rows(0, 101, months=101)]],
            [[months.rows(0, 51, months=101)], [months.rows(51, 101, months=101)]],
        ):
            with pytest.raises(RowsRejected, match="one epoch touches more than 100 indices"):
                rig.prepare(0, *tasks)


def test_indices_are_made_from_the_schema_or_from_templates(
    options: dict[str, Any], client: vendor.Elasticsearch, months: Months
) -> None:
    mapping = {"properties": {"n": {"type": "double"}}}
    client.indices.put_index_template(
        name=months.prefix,
        index_patterns=[f"{months.prefix}-*"],
        template={"mappings": mapping, "settings": {"number_of_shards": 3, "number_of_replicas": 0}},
    )
    try:
        for month, create in enumerate([{"number_of_shards": 2}, False]):
            sink = SmallRequests(**{**options, "create": create}, index_by="month")
            with closing(Rig.joining(sink)) as rig:
                rig.committer.participant.begin(Epoch(0, "a"), {"search": SCHEMA})
                rig.apply(0, [rendered([("a", {"n": 1})], indices=[months.name(month)])])
    finally:
        client.indices.delete_index_template(name=months.prefix)
    made = client.indices.get(index=f"{months.prefix}-*")
    by_schema, by_template = made[months.name(0)], made[months.name(1)]
    assert by_schema["mappings"]["properties"]["n"] == {"type": "long"}
    assert by_template["mappings"] == mapping
    assert [each["settings"]["index"]["number_of_shards"] for each in (by_schema, by_template)] == ["2", "3"]


def test_columns_that_a_restart_adds_are_mapped_in_the_indices_that_rows_name(
    options: dict[str, Any], client: vendor.Elasticsearch, months: Months
) -> None:
    """In those of earlier starts, and in new ones."""
    schema = pa.schema([*SCHEMA, ("d", pa.float64())])
    sink = Elasticsearch(**options, index_by="month")
    with closing(Rig.joining(sink)) as rig:
        rig.committer.participant.begin(Epoch(0, "a"), {"search": SCHEMA})
        rig.apply(0, [months.rows(0, 2, months=2)])
    documents = [(f"x{n}", {"n": n, "d": value}) for n, value in enumerate([1, "NaN", 1, "NaN"])]
    rows = rendered(documents, indices=[months.name(month) for month in (1, 1, 2, 2)])
    with closing(Rig(sink, rig.identity)) as later:
        later.committer.participant.begin(Epoch(1, "a"), {"search": schema})
        later.apply(1, [rows])
    for month, columns in enumerate([{"id", "n", "at"}, {"id", "n", "at", "d"}, {"id", "n", "at", "d"}]):
        made = client.indices.get_mapping(index=months.name(month))[months.name(month)]["mappings"]["properties"]
        assert made.keys() == columns


@pytest.mark.parametrize(
    ("mappings", "reason"),
    [
        ({"_routing": {"required": True}}, r"refuses an empty document: .*routing is required"),
        ({"properties": {"n": {"type": "ip"}}}, "column 'n' is int64, the index maps it as ip"),
        ({"dynamic": "strict", "properties": {"n": {"type": "long"}}}, "column 'id' is not in the mapping"),
    ],
    ids=["routing", "type", "strict"],
)
def test_an_index_that_rows_name_and_that_takes_none_of_them_is_refused_before_the_decision(
    options: dict[str, Any], client: vendor.Elasticsearch, months: Months, mappings: dict[str, Any], reason: str
) -> None:
    """Each start would be refused else, once the epoch is decided."""
    client.indices.create(index=months.name(1), settings={"number_of_replicas": 0}, mappings=mappings)
    with closing(Rig.joining(Elasticsearch(**options, index_by="month"))) as rig:
        rig.committer.participant.begin(Epoch(0, "a"), {"search": SCHEMA})
        with pytest.raises(PrepareFailed, match=f"{months.name(1)}' does not take the rows: .*{reason}") as caught:
            rig.prepare(0, [months.rows(0, 3)])
        assert not caught.value.may_pass
        assert "epoch 0 is not recorded" in str(caught.value)
        months.set_back(1, again=False)
        rig.apply(0, [months.rows(0, 3)])
        assert len(months.stored()) == 3


def test_an_index_that_cannot_be_created_is_named(options: dict[str, Any], months: Months) -> None:
    sink = Elasticsearch(**{**options, "create": {"number_of_shards": 0}}, index_by="month")
    with (
        closing(Rig.joining(sink)) as rig,
        pytest.raises(PrepareFailed, match=f"creating index '{months.name(0)}' failed: .*number_of_shards"),
    ):
        rig.prepare(0, [months.rows(0, 1)])


def test_the_name_of_an_alias_and_an_index_that_forgets_are_refused(
    options: dict[str, Any], client: vendor.Elasticsearch, months: Months
) -> None:
    durability = "index.translog.durability"
    client.indices.create(index=months.name(1), aliases={months.name(2): {}}, settings={"number_of_replicas": 0})
    with closing(Rig.joining(SmallRequests(**options, index_by="month"))) as rig:
        with pytest.raises(PrepareFailed, match=f"index_by= gives '{months.name(2)}', an alias or a data stream"):
            rig.prepare(0, [months.rows(0, 3)])
        client.indices.put_settings(index=months.name(1), settings={durability: "async"})
        with pytest.raises(PrepareFailed, match=f"index '{months.name(1)}' has {durability}=async"):
            rig.prepare(0, [months.rows(1, 2)])


def test_more_names_than_a_url_may_have_are_looked_at_in_parts(options: dict[str, Any], months: Months) -> None:
    months.prefix += "ü" * 90
    with closing(Rig.joining(SmallRequests(**options, index_by="month"))) as rig:
        rig.apply(0, [months.rows(0, 24, months=8)])
        rig.apply(1, [months.rows(0, 24, 1, months=8)])
        assert len(months.stored()) == 24


def test_spark_renders_the_name_and_it_follows_from_the_key(
    spark: SparkSession, options: dict[str, Any], months: Months
) -> None:
    frame = spark.range(20).selectExpr("id", "timestamp_seconds(1792800000 + id * 200000) AS placed_at")
    month = "date_format(placed_at, 'yyyy.MM')"
    index_by = f"concat('{months.prefix}-', {month})"

    def planned(**changed: Any) -> tuple[Elasticsearch, list[pa.RecordBatch]]:
        sink = Elasticsearch(**{**options, "index_by": index_by, **changed})
        schemas = row_schemas(frame, {"search": sink})
        refuse_bad_plan(frame, {"search": sink}, schemas)
        return sink, one_pass({"search": sink}, schemas).apply(frame).toArrow().to_batches()

    with pytest.raises(ConfigurationError, match="depends on placed_at, and the key does not"):
        planned()
    with pytest.raises(ConfigurationError, match=r"has 'to' \|\| 'day', and it is not known"):
        planned(index_by="date_format(CAST('to' || 'day' AS DATE), 'yyyy.MM')")
    sink, batches = planned(key=["id", month])
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, batches)
    found = {json.loads(name)[0]: index for name, (index, _) in months.stored().items()}
    rows = frame.selectExpr("CAST(id AS STRING) AS id", f"{index_by} AS name").collect()
    assert found == {row["id"]: row["name"] for row in rows}
    assert len(set(found.values())) == 3
