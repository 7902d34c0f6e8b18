"""The SQL of the one pass: each of the user's expressions stands in it once, so that it has one answer a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from epochsink import ConfigurationError, Elasticsearch, Kafka, Postgres
from epochsink.spark.query_plan import ROW, one_pass
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from epochsink.sink import Sink

SCHEMA = pa.schema([("order_id", pa.int64()), ("event", pa.string())])
CHANCES = {"select": "rand(1)", "where": "rand(2) < 1", "delete_when": "rand(3) < 1", "order_by": "rand(4)"}
SELECT = ["order_id", f"{CHANCES['select']} AS event"]

SINKS: dict[str, Sink] = {
    "kafka": Kafka(
        bootstrap_servers="localhost:9092",
        topic="orders",
        key="order_id",
        select=SELECT,
        where=CHANCES["where"],
        delete_when=CHANCES["delete_when"],
    ),
    "postgres": Postgres(
        "postgresql://localhost/orders",
        table="orders",
        key="order_id",
        select=SELECT,
        where=CHANCES["where"],
        delete_when=CHANCES["delete_when"],
    ),
    "elasticsearch": Elasticsearch(
        "http://localhost:9200",
        index="orders",
        key="order_id",
        select=SELECT,
        where=CHANCES["where"],
        delete_when=CHANCES["delete_when"],
        order_by=CHANCES["order_by"],
    ),
}


@pytest.mark.parametrize("name", SINKS)
def test_each_expression_is_evaluated_once(name: str) -> None:
    sink = SINKS[name]
    made = one_pass({name: sink}, {name: SCHEMA})
    sql = "\n".join([*made.rows, str(made.wanted), *made.distribute_by, *made.inputs])
    counted = {option: sql.count(text) for option, text in CHANCES.items() if getattr(sink, option, None)}
    assert {"select", "where", "delete_when"} <= counted.keys()
    assert set(counted.values()) == {1}


def test_no_shuffle_takes_the_order_from_a_sink_that_keeps_it() -> None:
    """The one pass serves all sinks, so that the order is kept for all of them or for none."""
    spread, ordered = LocalSink("/a", distribute_by=["order_id"]), LocalSink("/b", keeps_order=True)
    schemas = {"spread": SCHEMA, "ordered": SCHEMA}
    assert one_pass({"spread": spread}, schemas).distribute_by == ("order_id",)
    assert one_pass({"ordered": ordered}, schemas).distribute_by == ()
    for sinks in ({"spread": spread, "ordered": ordered}, {"ordered": ordered, "spread": spread}):
        with pytest.raises(
            ConfigurationError, match=r"sink 'ordered' keeps the order .* sink 'spread' needs a shuffle"
        ):
            one_pass(sinks, schemas)


def test_the_columns_of_the_only_sink_are_those_of_the_pass() -> None:
    everything = Kafka(bootstrap_servers="localhost:9092", topic="orders", select=SELECT)
    made = one_pass({"kafka": everything}, {"kafka": SCHEMA})
    assert made.inputs == everything.columns(f"{ROW}0", SCHEMA)
    for sinks in ({"kafka": SINKS["kafka"]}, {"one": everything, "two": everything}):
        made = one_pass(sinks, dict.fromkeys(sinks, SCHEMA))
        assert [text.rpartition(" AS ")[2] for text in made.inputs] == [f"sink_{index}" for index in range(len(sinks))]
