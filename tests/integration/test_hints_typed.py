"""Each command of an error's hint is typed as it stands, in the state that raised the error, on the real services.

Those that need no service are in tests/unit/test_hints_typed.py, with the test that every one has its state. Names
that the library cannot know, such as DSN, are filled in.
"""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from elasticsearch_rig import SCHEMA as DOCUMENTS
from elasticsearch_rig import rendered
from fix_postgres import Driver
from hints import States, commands_in, type_look, type_words
from kafka.structs import TopicPartition
from kafka_kit import (
    abort_at_partitions,
    admin,
    create_topic,
    delete_markers,
    prepare,
    recreate_topic,
    rows,
    take_over,
    task,
)
from typer.testing import CliRunner
from waiting import wait_until

from epochsink import Elasticsearch, Kafka, Postgres
from epochsink.cli.app import app
from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch.connection import connect
from epochsink.errors import Addresses, CheckFailed, EpochsinkError
from epochsink.identity import marker_document
from epochsink.kafka.commit import TransactionCommits
from epochsink.kafka.transactions import EndTxnResult, Transactions
from epochsink.sink import Epoch, identity_key
from epochsink.spark.argument_checks import refuse_unfit
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fix_postgres import Truth

    from epochsink.sink import Identity, Sink

STATES = States()
KINDS: Final = {"Postgres": Postgres, "Kafka": Kafka, "Elasticsearch": Elasticsearch}


class Query:
    """A query over sinks of given options, in a folder of its own, with the module that names them."""

    def __init__(
        self, folder: Path, sinks: Mapping[str, tuple[str, dict[str, Any]]], schema: pa.Schema, retain_seconds: float
    ) -> None:
        self.module = f"hinted_{uuid.uuid4().hex}"
        root = folder / self.module
        made = ", ".join(f"{name!r}: {kind}(**{options!r})" for name, (kind, options) in sinks.items())
        (folder / f"{self.module}.py").write_text(
            f"from epochsink import Elasticsearch, ExactlyOnce, Kafka, Postgres\nSINKS = {{{made}}}\n"
            f"sink = ExactlyOnce(checkpoint={str(root)!r}, sinks=SINKS)\n"
        )
        self.sinks: dict[str, Sink] = {name: KINDS[kind](**options) for name, (kind, options) in sinks.items()}
        for name, sink in self.sinks.items():
            with closing(OneSink.of(sink, name)) as committer:
                assert committer.check(schema) == []
        self.kit = CheckpointKit(root, self.sinks, retain_seconds=retain_seconds)

    @property
    def reference(self) -> str:
        return f"{self.module}:sink"

    @property
    def addresses(self) -> Addresses:
        return Addresses(str(self.kit.root), self.reference)

    def pending(self, number: int, rows: pa.RecordBatch | list[pa.RecordBatch]) -> None:
        """Take an epoch to its decision, which no driver has seen."""
        self.kit.record(number, dict.fromkeys(self.sinks, rows))
        self.kit.decide(number)

    def run(self, number: int, rows: pa.RecordBatch | list[pa.RecordBatch]) -> None:
        self.kit.run(number, dict.fromkeys(self.sinks, rows))

    def started(self, sinks: Mapping[str, Sink] | None = None) -> EpochsinkError:
        """Start the query as Spark does, and return the error that stops it."""
        return self.kit.stopped_start(self.reference, sinks)

    def refused(self, *words: str) -> EpochsinkError:
        """Type a command that is refused, and return its error; the checkpoint and the sinks are added."""
        verb = 2 if words[0] == "letters" else 1
        typed = [*words[:verb], str(self.kit.root), *words[verb:], "--sinks", self.reference, "--yes", "--json"]
        answer = CliRunner().invoke(app, typed)
        assert answer.exit_code == 1, answer.output
        error = json.loads(answer.stdout)["error"]
        return EpochsinkError(error["message"], hint=error["hint"])

    def voted(self, number: int, rows: pa.RecordBatch) -> EpochsinkError:
        """Write an epoch, and return the error with which it is refused, completed as by a run."""
        with pytest.raises(EpochsinkError) as refused:
            self.kit.record(number, dict.fromkeys(self.sinks, rows))
        refused.value.address(self.addresses)
        return refused.value

    def rewrite(self, number: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the parts of a recorded epoch in the ledger."""
        for file in (self.kit.root / "epochsink" / "ledger").iterdir():
            entry = json.loads(file.read_text())
            if entry["entry"] == "prepared" and entry["epoch"] == number:
                for share in entry["shares"].values():
                    for part in share["parts"]:
                        change(part)
                file.write_text(json.dumps(entry))

    def parts(self) -> list[Any]:
        """Return the parts of the pending epochs."""
        return [part for each in self.kit.history().pending for name in self.sinks for part in each.parts_of(name)]

    def examined(self, what: str) -> EpochsinkError:
        """Return what `epochsink doctor` says of one thing."""
        answer = CliRunner().invoke(app, ["doctor", self.reference, "--json"])
        (line,) = [line for line in json.loads(answer.stdout)["lines"] if line["what"] == what and line["hint"]]
        return EpochsinkError(line["found"], hint=line["hint"])

    def close(self) -> None:
        with suppress(OSError):
            self.kit.close()
        sys.modules.pop(self.module, None)


class Rig:
    """The services, and the query whose error is shown."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._request = request
        self._folder = folder
        self.monkeypatch = monkeypatch
        self.made: list[Query] = []
        self.fills: dict[str, str] = {}
        """What stands for the names that the library cannot know."""
        self.starts = True
        """Whether the query starts after the command."""

    def use(self, fixture: str) -> Any:
        return self._request.getfixturevalue(fixture)

    @property
    def query(self) -> Query:
        return self.made[0]

    def make(
        self, sinks: Mapping[str, tuple[str, dict[str, Any]]], schema: pa.Schema, retain_seconds: float = 0.0
    ) -> Query:
        self.made.append(Query(self._folder, sinks, schema, retain_seconds))
        return self.made[-1]

    # ---- of each family

    @property
    def truth(self) -> Truth:
        truth: Truth = self.use("pg_truth")
        return truth

    @property
    def schema(self) -> str:
        return str(self.use("pg_schema"))

    def create(self, rule: str = "") -> str:
        """Create a table of numbers."""
        name = f"{self.schema}.t{uuid.uuid4().hex[:8]}"
        self.truth.execute(f"CREATE TABLE {name} (id bigint {rule})")
        return name

    def table(
        self, *, rule: str = "", retain_seconds: float = 0.0, names: tuple[str, ...] = ("table",), **options: Any
    ) -> Query:
        """Return a query that writes numbers into a table for each of its sinks."""
        dsn = self.use("postgres").dsn
        self.fills["DSN"] = dsn
        rule = "PRIMARY KEY" if "key" in options else rule
        sinks = {}
        for name in names:
            given = {"table": options.get("table") or self.create(rule), "marker_schema": self.schema, **options}
            sinks[name] = ("Postgres", {"dsn": dsn, **given})
        return self.make(sinks, ids(1).schema, retain_seconds)

    def topic(self, *, retain_seconds: float = 0.0, **options: Any) -> Query:
        """Return a query that writes to a new topic."""
        servers = self.use("kafka").bootstrap_servers
        self.fills["SERVERS"] = servers
        topic = create_topic(servers, f"t{uuid.uuid4().hex[:8]}")
        given = {"bootstrap_servers": servers, "topic": topic, "timeout": 20, "transaction_timeout": 600, **options}
        return self.make({"topic": ("Kafka", given)}, rows("a").schema, retain_seconds)

    def index(self, *, retain_seconds: float = 0.0, **options: Any) -> Query:
        """Return a query that writes to a new index."""
        name = f"t{uuid.uuid4().hex[:8]}"
        given = {"hosts": self.use("elasticsearch").url, "key": "id", "create": {"number_of_replicas": 0}, **options}
        if "index_by" not in options:
            given["index"] = name
        return self.make({"search": ("Elasticsearch", given)}, DOCUMENTS, retain_seconds)


def ids(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(numbers, pa.int64())})


def config_of(query: Query) -> Any:
    (sink,) = query.sinks.values()
    return sink


def table_of(query: Query) -> str:
    return ".".join(config_of(query).table)


def newer(query: Query) -> Identity:
    """Return the query's sink in a generation that no driver of this test comes to."""
    (name,) = query.sinks
    now = query.kit.coordinator.identity(name)
    return replace(now, generation=now.generation + 10**6)


def documents(*names: str, **more: Any) -> pa.RecordBatch:
    return rendered([(name, {"n": 1}) for name in names], **more)


# ---- PostgreSQL


@STATES.shows("protocol/consistency.py mention_repair: repair", "sink/marks.py _target_is_older: accept")
def the_database_was_set_back_and_its_rows_are_retained(rig: Rig) -> EpochsinkError:
    query = rig.table(retain_seconds=3600.0)
    for number in range(3):
        query.run(number, ids(number))
    rig.truth.execute(f"DELETE FROM {rig.schema}.marker WHERE key NOT LIKE '%%.table' AND epoch = 2")  # noqa: S608
    rig.truth.execute(f"DELETE FROM {table_of(query)} WHERE id = 2")  # noqa: S608
    return query.started()


@STATES.shows("cli/doctor.py _checkpoint: status")
def the_query_has_stopped(rig: Rig) -> EpochsinkError:
    the_database_was_set_back_and_its_rows_are_retained(rig)
    rig.starts = False
    return rig.query.examined("query")


def without_markers(rig: Rig, which: str, **options: Any) -> Query:
    """Return a query of which the markers of epoch 1 that ``which`` says are gone."""
    query = rig.table(atomic=False, **options)
    query.run(0, [ids(1), ids(2)])
    query.run(1, [ids(3), ids(4)])
    rig.truth.execute(
        f"DELETE FROM {rig.schema}.marker WHERE query_id = %s AND epoch = 1 AND part IN "  # noqa: S608
        f"(SELECT part FROM {rig.schema}.marker WHERE query_id = %s AND epoch = 1 AND {which} LIMIT 1)",
        query.kit.query_id,
        query.kit.query_id,
    )
    return query


@STATES.shows("sink/marks.py _part_is_gone: accept")
def a_part_of_an_epoch_is_gone(rig: Rig) -> EpochsinkError:
    return without_markers(rig, "part <> 'all'").started()


@STATES.shows("protocol/repair.py _not_retained: accept")
def a_part_that_is_gone_is_not_retained(rig: Rig) -> EpochsinkError:
    return without_markers(rig, "part <> 'all'").refused("repair")


@STATES.shows("postgres/repair.py _lacking: accept")
def rows_are_there_without_their_seal(rig: Rig) -> EpochsinkError:
    return without_markers(rig, "part = 'all'", key="id", retain_seconds=3600.0).refused("repair")


@STATES.shows("sink/marks.py _written_by_another: status")
def another_copy_has_written_an_epoch(rig: Rig) -> EpochsinkError:
    query = rig.table()
    query.run(0, ids(1))
    rig.truth.execute(
        f"UPDATE {rig.schema}.marker SET attempt = %s WHERE query_id = %s AND epoch = 0",  # noqa: S608
        uuid.uuid4().hex,
        query.kit.query_id,
    )
    return query.started()


@STATES.shows("postgres/place.py require: accept")
def the_database_is_another_one(rig: Rig) -> EpochsinkError:
    query = rig.table()
    query.run(0, ids(1))
    # as the copy of a dump differs from what is recorded, while its rows and markers are the same
    query.rewrite(0, lambda part: part["place"].update(oid=1))
    return query.started()


@STATES.shows("postgres/place.py require: accept 2")
def the_server_is_the_old_primary(rig: Rig) -> EpochsinkError:
    query = rig.table()
    query.run(0, ids(1))
    query.pending(1, ids(2))
    query.rewrite(1, lambda part: part["place"].update(timeline=part["place"]["timeline"] + 1))
    return query.started()


@STATES.shows("postgres/table_identity.py _is_another_table: accept")
def the_table_was_created_again(rig: Rig) -> EpochsinkError:
    query = rig.table()
    query.run(0, ids(1))
    name = table_of(query)
    rig.truth.execute(f"DROP TABLE {name}; CREATE TABLE {name} (id bigint)")
    return query.started()


@STATES.shows("postgres/table_identity.py _may_be_emptied: accept")
def the_table_may_have_been_emptied(rig: Rig) -> EpochsinkError:
    query = rig.table()
    query.run(0, ids(1))
    rig.truth.execute(f"VACUUM FULL {table_of(query)}")
    # what a crash does: the server's statistics begin anew
    rig.truth.execute(
        f'UPDATE {rig.schema}.marker SET attempt = (attempt::jsonb || \'{{"crash": "before"}}\')::text '  # noqa: S608
        "WHERE query_id = %s AND key LIKE '%%.table'",
        query.kit.query_id,
    )
    return query.started()


@STATES.shows("cli/resolve.py __init__: recover")
def an_epoch_is_one_transaction_for_two_sinks(rig: Rig) -> EpochsinkError:
    query = rig.table(names=("early", "late"))
    query.pending(0, ids(1))
    return query.refused("resolve", "0", "--sink", "early", "--as", "replay")


def with_letters(rig: Rig) -> Query:
    query = rig.table(rule="CHECK (id > 0)", on_rejected="dead_letter")
    query.run(0, ids(1, -1))
    return query


@STATES.shows("protocol/commits.py _SEE_WHY: list")
def rows_became_letters(rig: Rig) -> EpochsinkError:
    with_letters(rig).pending(1, ids(2, -2))
    answer = CliRunner().invoke(app, ["recover", str(rig.query.kit.root), "--sinks", rig.query.reference, "--yes"])
    return EpochsinkError(answer.output)


@STATES.shows("postgres/letters.py _chosen: list")
def the_id_of_a_letter_is_no_number(rig: Rig) -> EpochsinkError:
    return with_letters(rig).refused("letters", "retry", "--id", "first")


@STATES.shows("postgres/letters.py _merge: drop")
def the_letters_do_not_fit_the_table(rig: Rig) -> EpochsinkError:
    query = with_letters(rig)
    rig.truth.execute(f"ALTER TABLE {table_of(query)} RENAME id TO number")
    rig.starts = False
    return query.refused("letters", "retry", "--all")


@STATES.shows("postgres/ddl.py add_columns: recover")
def what_is_prepared_holds_the_table(rig: Rig) -> EpochsinkError:
    query = rig.table(add_columns=True, timeout=0.5)
    query.pending(0, ids(1))
    wide = ids(1).append_column("price", pa.array([5], pa.int64()))
    with pytest.raises(CheckFailed) as refused:
        refuse_unfit(query.sinks, {"table": wide.schema})
    refused.value.address(query.addresses)
    return refused.value


@STATES.shows("postgres/examine.py _room: orphans")
def the_server_has_no_room(rig: Rig) -> EpochsinkError:
    query = rig.table()
    ((limit, used),) = rig.truth.execute(
        "SELECT current_setting('max_prepared_transactions')::int, count(*) FROM pg_prepared_xacts"
    )
    for number in range(limit - used - 1):
        rig.truth.execute(f"BEGIN; PREPARE TRANSACTION 'room {number}'")
    try:
        return query.examined("settings")
    finally:
        for number in range(limit - used - 1):
            rig.truth.execute(f"ROLLBACK PREPARED 'room {number}'")


@STATES.shows("postgres/examine.py _trial: orphans")
def a_trial_epoch_could_not_be_rolled_back(rig: Rig) -> EpochsinkError:
    def cut(*_: object) -> None:
        raise psycopg.OperationalError("the connection was cut")

    rig.monkeypatch.setattr("epochsink.postgres.examine.rollback_prepared", cut)
    return rig.table().examined("trial epoch")


@STATES.shows("postgres/holder.py _of_a_newer_driver: orphans")
def a_newer_driver_holds_the_rows(rig: Rig) -> EpochsinkError:
    query = rig.table(key="id", timeout=0.5)
    with closing(Driver(config_of(query), newer(query))) as driver:
        driver.prepare(0, ids(1))
    error = query.voted(0, ids(1))
    key = identity_key(query.kit.coordinator.identity("table"))
    query.kit.close()  # "if both are gone"
    wait_until(lambda: rig.truth.sessions(key) == 0, "the driver's sessions have ended")
    return error


@STATES.shows("postgres/holder.py _of_another_query: abandon", "postgres/holder.py _of_another_query: orphans")
def another_query_holds_the_rows(rig: Rig) -> EpochsinkError:
    table = rig.create("PRIMARY KEY")
    query = rig.table(key="id", timeout=0.5, table=table)
    other = rig.table(key="id", timeout=0.5, table=table)
    other.kit.record(0, {"table": ids(1)})
    other.kit.close()  # its driver is down
    rig.fills |= {"ITS_CHECKPOINT": str(other.kit.root), "ITS_MODULE:ATTRIBUTE": other.reference}
    return query.voted(0, ids(1))


# ---- Kafka


@STATES.shows("kafka/commit.py _expect_marked: accept")
def a_marker_was_deleted_just_after_the_commit(rig: Rig) -> EpochsinkError:
    query = rig.topic(timeout=3)
    query.pending(0, rows("a"))
    await_visible = TransactionCommits.await_visible

    def late(commits: TransactionCommits, *asked: Any) -> None:
        delete_markers(rig.fills["SERVERS"], query.kit.coordinator.identity("topic"))
        await_visible(commits, *asked)

    with rig.monkeypatch.context() as patch:
        patch.setattr(TransactionCommits, "await_visible", late)
        return query.started()


@STATES.shows("kafka/commit.py _lost: resolve")
def rows_were_lost_between_the_look_and_the_commit(rig: Rig) -> EpochsinkError:
    query = rig.topic()
    query.pending(0, rows("a", "b"))
    (part,) = query.parts()
    end = Transactions.end

    def end_late(transactions: Transactions, *asked: Any, **how: Any) -> Any:
        abort_at_partitions(rig.use("kafka"), config_of(query).topic, part)
        return end(transactions, *asked, **how)

    with rig.monkeypatch.context() as patch:
        patch.setattr(Transactions, "end", end_late)
        return query.started()


@STATES.shows("kafka/commit.py refuse_other_topics: accept")
def the_topic_was_created_again(rig: Rig) -> EpochsinkError:
    query = rig.topic()
    query.run(0, rows("a"))
    recreate_topic(rig.fills["SERVERS"], config_of(query).topic)
    return query.started()


@STATES.shows("kafka/redo.py _incomplete: resolve")
def the_topic_holds_the_rows_no_more(rig: Rig) -> EpochsinkError:
    query = rig.topic(options={"batch.num.messages": 10, "linger.ms": 0})
    query.pending(0, rows(*map(str, range(200))))
    assert all(part["kept_in_topic"] for part in query.parts())
    take_over(rig.fills["SERVERS"], *query.parts())
    with admin(rig.fills["SERVERS"]) as client:
        client.delete_records({TopicPartition(config_of(query).topic, 1): 25})
    return query.started()


@STATES.shows("kafka/redo.py _without_rows: resolve")
def the_spool_holds_fewer_rows(rig: Rig) -> EpochsinkError:
    query = rig.topic(spool=True)
    query.pending(0, rows("a", "b"))
    take_over(rig.fills["SERVERS"], *query.parts())
    query.rewrite(0, lambda part: part.update(rows=3))
    return query.started()


@STATES.shows("kafka/committable.py from_json: status")
def a_newer_version_has_prepared_an_epoch(rig: Rig) -> EpochsinkError:
    query = rig.topic()
    query.pending(0, rows("a"))
    query.rewrite(0, lambda part: part.pop("places"))
    return query.started()


@STATES.shows("kafka/commit.py not_aborted: status")
def a_lost_transaction_cannot_be_aborted(rig: Rig) -> EpochsinkError:
    query = rig.topic()
    query.pending(0, rows("a", "b"))
    (part,) = query.parts()
    abort_at_partitions(rig.use("kafka"), config_of(query).topic, part)
    with rig.monkeypatch.context() as patch:
        patch.setattr(
            Transactions, "end", lambda *_, **__: (EndTxnResult.REFUSED, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
        )
        return query.started()


@STATES.shows("kafka/fence.py _refuse_newer: orphans")
def a_driver_of_a_later_generation_writes(rig: Rig) -> EpochsinkError:
    query = rig.topic()
    prepare(config_of(query), task(newer(query), Epoch(0, uuid.uuid4().hex)), rows("a"))
    return query.started()


@STATES.shows("kafka/repair.py _disagreement: audit")
def the_topic_has_rows_without_their_markers(rig: Rig) -> EpochsinkError:
    query = rig.topic(retain_seconds=3600.0)
    query.run(0, rows("a"))
    delete_markers(rig.fills["SERVERS"], query.kit.coordinator.identity("topic"))
    return query.refused("repair")


# ---- Elasticsearch


def client_of(query: Query) -> Any:
    return closing(connect(config_of(query)))


@STATES.shows("elasticsearch/target.py not_the_one: accept")
def the_index_was_created_again(rig: Rig) -> EpochsinkError:
    query = rig.index()
    query.run(0, documents("a"))
    query.pending(1, documents("b"))
    with client_of(query) as client:
        client.indices.delete(index=config_of(query).index)
        client.indices.create(index=config_of(query).index)
    return query.started()


def by_month(rig: Rig, **options: Any) -> tuple[Query, list[str]]:
    """Return a query whose rows name their index, and the names of two."""
    query = rig.index(index_by="month", **options)
    return query, [f"{query.module}-{month}" for month in (1, 2)]


@STATES.shows("elasticsearch/target.py require_unchanged: accept")
def an_index_that_rows_named_is_gone(rig: Rig) -> EpochsinkError:
    query, months = by_month(rig)
    query.run(0, documents("a", "b", indices=months))
    query.pending(1, documents("c", "d", indices=months))
    with client_of(query) as client:
        client.indices.delete(index=months[0])
        client.indices.create(index=months[0])
    return query.started()


@STATES.shows("elasticsearch/target_index.py _refuse_other_place: accept")
def documents_are_placed_otherwise(rig: Rig) -> EpochsinkError:
    query = rig.index(routing="customer")
    query.run(0, documents("a", routings=["c"]))
    before = config_of(query)
    return query.started({"search": Elasticsearch(before.hosts, index=before.index, key="id")})


@STATES.shows("elasticsearch/repair.py _refuse_several_indices: accept")
def the_target_of_a_repair_is_several_indices(rig: Rig) -> EpochsinkError:
    query, months = by_month(rig, retain_seconds=3600.0)
    for number in range(2):
        query.run(number, documents(f"a{number}", f"b{number}", indices=months))
    with client_of(query) as client:
        marker = marker_document(identity_key(query.kit.coordinator.identity("search")))
        client.update(index=applied_epochs.INDEX, id=marker, doc={"epoch": 0})
    return query.refused("repair")


@STATES.shows("elasticsearch/errors.py too_many_letters: list")
def more_documents_are_refused_than_the_limit(rig: Rig) -> EpochsinkError:
    letters = f"t{uuid.uuid4().hex[:8]}"
    query = rig.index(on_rejected="dead_letter", dead_letter_index=letters, letters_limit=0.25)
    with client_of(query) as client:
        client.indices.put_mapping(index=config_of(query).index, dynamic="strict", properties={"n": {"type": "long"}})
    query.pending(0, rendered([("a", {"n": 1}), ("b", {"new": 1})]))
    return query.started()


@STATES.shows("elasticsearch/apply.py _require_all: status")
def the_spool_has_other_rows_than_the_ledger(rig: Rig) -> EpochsinkError:
    query = rig.index()
    query.pending(0, documents("a"))
    query.rewrite(0, lambda part: part.update(rows=2))
    return query.started()


@STATES.shows("elasticsearch/committer.py _claim_for: status")
def another_copy_applies_the_epoch(rig: Rig) -> EpochsinkError:
    query = rig.index()
    query.pending(0, documents("a"))
    (participant,) = query.kit.participants
    theirs, identity = Epoch(0, uuid.uuid4().hex), query.kit.coordinator.identity("search")
    applied_epochs.claim(participant._server, identity, theirs, None, done=-1)  # type: ignore[attr-defined]
    return query.started()


# ---- the test


@pytest.fixture
def make_rig(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Rig]]:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    made: list[Rig] = []

    def make() -> Rig:
        made.append(Rig(request, tmp_path, monkeypatch))
        return made[-1]

    yield make
    for query in (query for rig in made for query in rig.made):
        query.close()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_each_command_of_a_hint_does_what_the_hint_says(
    make_rig: Callable[[], Rig], state: Callable[[Rig], EpochsinkError]
) -> None:
    for index in range(len(STATES[state])):
        # anew for each: one command of a hint is an alternative to another
        rig = make_rig()
        error = state(rig)
        words = commands_in(error, STATES[state])[index]
        type_look(error, rig.query.addresses)
        type_words([rig.fills.get(word, word) for word in words])
        if rig.starts and words[1] in {"accept", "recover", "repair", "resolve"}:
            rig.query.kit.start()
