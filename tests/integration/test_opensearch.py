"""OpenSearch takes what the sink of its family sends: epochs once, whatever is killed, lost or late; letters; checks.

`make test ON=opensearch` runs the tests of Elasticsearch on it, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import elasticsearch_rig
import pyarrow as pa
import pytest
from elasticsearch_rig import DONE, SCHEMA, Rig, keyless, rendered
from http_proxy import Answer, Lost, Proxy, Seen, refuse_some
from opensearch_requests import SmallRequests
from typer.testing import CliRunner

from epochsink import OpenSearch, WentBack
from epochsink.cli.app import app
from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch import letters as letters_module
from epochsink.errors import RowsRejected
from epochsink.protocol.spool import Spool
from epochsink.sink import Chosen, Epoch, LastDone, Outcome, Task, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink import Elasticsearch
    from epochsink.elasticsearch.letters import ElasticsearchLetters
    from epochsink_devkit.services import ElasticsearchService

ALL: Final = Chosen()


@pytest.fixture
def options(opensearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Return the arguments of a sink with an id, on an index of its own."""
    created = {"number_of_shards": 2, "number_of_replicas": 0}
    keyed = {"key": "id", "delete_when": "gone", "create": created, "timeout": 20.0}
    return {"hosts": opensearch.url, "index": fresh_index(), **keyed}


@pytest.fixture
def rig(options: dict[str, Any]) -> Iterator[Rig]:
    with closing(Rig.joining(SmallRequests(**options))) as made:
        yield made


def numbered(first: int, last: int, **more: Any) -> list[Document]:
    return [(f"d{number}", {"n": number, **more}) for number in range(first, last)]


def behind(rig: Rig, proxy: Proxy, **changed: Any) -> Rig:
    """Return the same sink, reaching the server through a proxy."""
    given = {"key": "id", "delete_when": "gone", "timeout": 20, **changed}
    return Rig(SmallRequests(proxy.url, index=rig.sink.index, **given), rig.identity)


def ask(sink: Elasticsearch, method: str, target: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request of the test's own; return the answer."""
    with closing(sink.connected()) as server:
        return server.client.request(method, target, body, once=True).body


def versions(rig: Rig) -> dict[str, int]:
    with closing(rig.sink.connected()) as server:
        server.refresh(rig.sink.index)
        return dict(server.versions([rig.sink.index]))


# ---- epochs


def test_epochs_replace_and_delete_and_applying_one_again_changes_nothing(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 50))], [rendered(numbered(50, 90))])
    assert rig.stored() == {}
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    again = rig.apply(1, [rendered([("d0", None), ("d1", {"n": -1})])])
    before = versions(rig)
    with closing(rig.another_driver()) as other:
        assert other.commit(again).outcome is Outcome.COMMITTED
    base = rig.identity.origin["base"]
    assert versions(rig) == before == {**{name: base for name, _ in numbered(2, 90)}, "d1": base + 1}
    assert rig.stored() == {**dict(numbered(2, 90)), "d1": {"n": -1}}


def test_a_stale_epoch_changes_nothing(rig: Rig) -> None:
    stale = rig.prepare(0, [rendered(numbered(0, 5, state="old"))])
    rig.apply(1, [rendered([*numbered(0, 4, state="new"), ("d4", None)])])
    assert rig.commit(stale).outcome is Outcome.UNKNOWN
    assert rig.stored() == dict(numbered(0, 4, state="new"))


def test_rows_without_a_key_come_once(options: dict[str, Any]) -> None:
    del options["key"], options["delete_when"]
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        prepared = rig.apply(0, *([keyless([{"n": 10 * task + row} for row in range(10)])] for task in range(3)))
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(30))


def test_documents_changed_by_another_program_get_the_rows_of_the_next_epoch(rig: Rig) -> None:
    rig.apply(0, [rendered(numbered(0, 3))])
    for number in range(3):
        ask(rig.sink, "POST", f"/{rig.sink.index}/_update/d0", {"doc": {"elsewhere": number}})
    rig.apply(1, [rendered([("d0", {"n": 9})])])
    assert rig.stored() == {"d0": {"n": 9}, "d1": {"n": 1}, "d2": {"n": 2}}


@pytest.mark.essential
@pytest.mark.parametrize("point", ["elasticsearch.bulk.between:1", "elasticsearch.marker.before"])
def test_another_process_finishes_what_a_killed_one_began(
    rig: Rig, options: dict[str, Any], tmp_path: Path, point: str
) -> None:
    rig.apply(0, [rendered(numbered(0, 10, state="old"))])
    changes: list[Document] = [*numbered(0, 91, state="new"), ("d3", None)]
    order = spooled(rig, options, tmp_path, 1, changes)
    assert applied_in_a_process(order, point).returncode == -signal.SIGKILL
    changed = sum(document.get("state") == "new" for document in rig.stored().values())
    assert 0 < changed < 90 if "between" in point else changed == 90
    assert rig.committer.newest() == 0
    finished = applied_in_a_process(order, None)
    assert finished.stdout.strip() == "committed", finished.stderr
    assert rig.stored() == {name: document for name, document in dict(changes).items() if document is not None}


def spooled(rig: Rig, options: dict[str, Any], folder: Path, number: int, documents: list[Document]) -> dict[str, Any]:
    """Write an epoch into a real spool; return the order for a process that applies it."""
    epoch, spool, task = Epoch(number, uuid.uuid4().hex), Spool(str(folder)), uuid.uuid4().hex
    spool.make(rig.identity.query_id, epoch)
    batch = rendered(documents)
    identified = Task(rig.identity, epoch, 0, task)
    writer, file = rig.sink.writer(identified), spool.writer(identified, batch.schema)
    file.write(batch)
    writer.write(batch)
    file.close()
    (part,) = rig.committer.vote(epoch, [writer.prepare()], spool.rows(rig.identity, epoch, [task]))
    identity = {"query_id": rig.identity.query_id, "sink": rig.identity.sink, "origin": dict(rig.identity.origin)}
    done = DONE.get(identity_key(rig.identity))
    order = {"kind": "OpenSearch", "sink": options, "identity": identity, "epoch": asdict(epoch), "part": part}
    return {**order, "after": asdict(done) if done else None, "spool": str(folder)}


def applied_in_a_process(order: dict[str, Any], crash: str | None) -> subprocess.CompletedProcess[str]:
    program = Path(elasticsearch_rig.__file__).with_name("elasticsearch_apply.py")
    environment = {**os.environ, **({"EPOCHSINK_FAILPOINT": crash} if crash else {})}
    command = [sys.executable, "-W", "error", str(program)]
    text = json.dumps(order)
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=60)


# ---- a bad network, and a busy server


def test_through_a_storm_of_429_only_the_refused_operations_are_sent_again(rig: Rig) -> None:
    overloaded = {"status": 429, "error": {"type": "rejected_execution_exception", "reason": "full"}}
    refused: set[str] = set()

    def behave(seen: Seen) -> Answer | None:
        if not seen.is_bulk:
            return None
        answer = refuse_some(proxy, seen, lambda name: name not in refused and int(name[1:]) % 3 == 0, overloaded)
        if "items" in seen.path:
            refused.update(name for name in seen.ids if int(name[1:]) % 3 == 0)
        return answer

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, proxy)) as slow:
        slow.apply(0, [rendered(numbered(0, 30))])
        sent = Counter(name for seen in proxy.bulks if "items" in seen.path for name in seen.ids)
    assert rig.stored() == dict(numbered(0, 30))
    assert {name: count for name, count in sent.items() if count > 1} == dict.fromkeys(refused, 2)


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_server_that_is_away_for_a_moment_does_not_end_the_commit(rig: Rig, status: int) -> None:
    """Not only bulk requests: each of the first requests finds nobody."""
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], lambda _: Answer(status) if len(proxy.seen) < 10 else None) as proxy,
        closing(behind(rig, proxy)) as slow,
    ):
        assert slow.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 20))


def test_a_lost_reply_is_no_lost_and_no_doubled_document(options: dict[str, Any]) -> None:
    """The server applies every second request and its answer never arrives."""
    del options["key"], options["delete_when"]
    with closing(Rig.joining(SmallRequests(**options))) as rig:

        def behave(seen: Seen) -> Lost | None:
            return Lost() if seen.is_bulk and len(proxy.bulks) % 2 else None

        with Proxy(options["hosts"], behave) as proxy:
            sink = SmallRequests(**{**options, "hosts": proxy.url})
            with closing(Rig(sink, rig.identity)) as unlucky:
                unlucky.apply(0, [keyless([{"n": number} for number in range(20)])])
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(20))


def test_a_reply_that_comes_too_late_is_no_lost_document(rig: Rig) -> None:
    def behave(seen: Seen) -> Answer | None:
        if seen.is_bulk and len(proxy.bulks) == 1:
            answer = proxy.forward(seen)
            proxy.wake.wait(5)
            return answer
        return None

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, proxy, options={"timeout": 0.5})) as slow:
        slow.apply(0, [rendered(numbered(0, 20))])
        proxy.wake.set()
    assert rig.stored() == dict(numbered(0, 20))


def test_without_any_success_the_epoch_stays_pending(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], lambda seen: Answer(503) if seen.is_bulk else None) as proxy,
        closing(behind(rig, proxy, timeout=0.5)) as slow,
    ):
        verdict = slow.commit(prepared)
    assert (verdict.outcome, "HTTP 503" in verdict.evidence) == (Outcome.UNKNOWN, True)
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 20))


def test_compressed_requests_are_applied(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options, options={"http_compress": True}))) as rig:
        rig.apply(0, [rendered(numbered(0, 30))])
        assert rig.stored() == dict(numbered(0, 30))


# ---- checks


def test_another_index_of_the_name_stops_until_it_is_accepted(rig: Rig) -> None:
    done = rig.apply(0, [rendered(numbered(0, 3))])
    after = LastDone(0, done.epoch.attempt, (done.part,))
    ask(rig.sink, "DELETE", f"/{rig.sink.index}")
    ask(rig.sink, "PUT", f"/{rig.sink.index}", {"settings": {"index.gc_deletes": "1h"}})
    with pytest.raises(WentBack, match="is not the one that epoch 0 was applied to"):
        rig.prepare(1, [rendered(numbered(3, 6))], after=after)
    accepted = LastDone(0, done.epoch.attempt, ())
    prepared = rig.prepare(1, [rendered(numbered(3, 6))], after=accepted)
    assert rig.commit(prepared, accepted).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(3, 6))


def test_settings_that_lose_documents_are_findings(options: dict[str, Any]) -> None:
    sink = OpenSearch(**options)
    ask(sink, "PUT", f"/{sink.index}", {"settings": {"index.translog.durability": "async"}})
    with closing(OneSink.of(sink)) as committer:
        findings = committer.check(SCHEMA)
    assert [any(text in each for each in findings) for text in ("a crash loses them", "index.gc_deletes=60s")] == [
        True,
        True,
    ]


def test_an_alias_of_one_index_is_written_to_and_one_of_two_is_refused(options: dict[str, Any]) -> None:
    index, alias = options["index"], f"{options['index']}_alias"
    sink = SmallRequests(**{**options, "index": alias})
    ask(sink, "PUT", f"/{index}", {"settings": {"index.gc_deletes": "1h"}, "aliases": {alias: {}}})
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered(numbered(0, 3))])
        assert rig.stored(index) == dict(numbered(0, 3))
        ask(sink, "PUT", f"/{index}_2", {"aliases": {alias: {}}})
        with closing(OneSink.of(sink)) as committer:
            (finding,) = committer.check(SCHEMA)
    assert "is an alias of 2 indices" in finding


def test_an_index_made_from_a_schema_takes_every_value_of_its_columns(options: dict[str, Any]) -> None:
    """The values of maps are not indexed: their type in OpenSearch refuses long ones. A new column is added later."""
    tags = pa.map_(pa.string(), pa.string())
    schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("tags", tags)])
    with closing(Rig.joining(SmallRequests(**options), schema)) as rig:
        document = {"n": 1, "tags": {"a.b": "x" * 40_000, "": "c"}}
        rig.apply(0, [rendered([("a", document)])])
        assert rig.stored() == {"a": document}
        later = schema.append(pa.field("more", tags)).append(pa.field("seen", pa.timestamp("us")))
        assert rig.committer.check(later) == []
        mapped = ask(rig.sink, "GET", f"/{rig.sink.index}/_mapping")[rig.sink.index]["mappings"]["properties"]
    assert mapped["tags"] == mapped["more"] == {"type": "object", "enabled": False}
    assert mapped["seen"] == {"type": "date_nanos", "ignore_malformed": True}


def test_a_document_that_is_refused_is_found_before_the_checkpoint(options: dict[str, Any]) -> None:
    del options["delete_when"]
    sink = OpenSearch(**options, validate=True)
    with closing(Rig.joining(sink)) as rig, pytest.raises(RowsRejected, match="found it before the checkpoint"):
        rig.prepare(0, [rendered([("a", {"n": "no number"})])])


def test_the_operators_commands_know_it(rig: Rig, opensearch: ElasticsearchService) -> None:
    rig.apply(7, [rendered(numbered(0, 2))])
    found = [f"{each.what}: {each.found}" for each in rig.committer.participant.operator().examine("search")]
    assert found[0].startswith(f"cluster: OpenSearch {opensearch.version} at {opensearch.url}, health ")
    assert "would have accepted it; no document was written" in found[-1]
    ask(rig.sink, "POST", f"/{applied_epochs.INDEX}/_refresh")
    shown = CliRunner().invoke(app, ["orphans", "--opensearch", opensearch.url], env={"COLUMNS": "300"}).output
    assert f"query {rig.identity.query_id}, index {rig.sink.index}" in shown


# ---- dead letters


def test_dead_letters_are_kept_once_retried_and_dropped_page_by_page(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters_module, "_PAGE", 2)
    dead: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"}
    del options["delete_when"]
    strict = {"dynamic": "strict", "properties": {"n": {"type": "long"}}}
    ask(OpenSearch(**options), "PUT", f"/{options['index']}", {"mappings": strict})
    with closing(Rig.joining(SmallRequests(**options, **dead), pa.schema([("n", pa.int64())]))) as rig:
        wrong: list[Document] = [(f"w{number}", {"new": number}) for number in range(7)]
        prepared = rig.apply(0, [rendered([*numbered(0, 5), *wrong])])
        rig.apply(1, [rendered([("w0", {"n": 1}), ("other", {"other": 1})])])
        assert rig.commit(prepared).outcome is Outcome.UNKNOWN  # a later epoch is applied
        letters: ElasticsearchLetters = rig.committer.participant.operator().letters("search")
        assert (letters.count(ALL), letters.retry(ALL).kept) == (8, 8)
        ask(rig.sink, "PUT", f"/{rig.sink.index}/_mapping", {"properties": {"new": {"type": "long"}}})
        done = letters.retry(ALL)
        assert (done.written, done.superseded, done.kept) == (6, 1, 1)
        assert rig.stored() == {**dict(numbered(0, 5)), **dict(wrong[1:]), "w0": {"n": 1}}
        assert [each.row["_id"] for each in letters.read(ALL, 9)] == ["other"]
        assert (letters.drop(ALL), letters.count(ALL)) == (1, 0)
