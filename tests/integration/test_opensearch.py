"""What is asked of OpenSearch in another way than of Elasticsearch, and a few epochs.

`make test ON=opensearch` runs the tests of Elasticsearch on it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest
from elasticsearch_rig import SCHEMA, Rig, keyless, rendered
from http_proxy import Answer, Lost, Proxy, Seen
from search_actions import ask
from typer.testing import CliRunner

from epochsink import OpenSearch
from epochsink.cli.app import app
from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch import letters as letters_module
from epochsink.sink import Chosen, Outcome
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink.elasticsearch.letters import ElasticsearchLetters
    from epochsink_devkit.services import ElasticsearchService

ALL: Final = Chosen()


class SmallRequests(OpenSearch):
    """A sink with four or five documents in a request."""

    bulk_bytes = 500


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


def numbered(first: int, last: int) -> list[Document]:
    return [(f"d{number}", {"n": number}) for number in range(first, last)]


def behind(options: dict[str, Any], rig: Rig, proxy: Proxy) -> Rig:
    """Return the same sink, reaching the server through a proxy."""
    return Rig(SmallRequests(**{**options, "hosts": proxy.url}), rig.identity)


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


# ---- a bad network, and a busy server


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_server_that_is_away_for_a_moment_does_not_end_the_commit(
    rig: Rig, options: dict[str, Any], status: int
) -> None:
    """Not only bulk requests: each of the first requests finds nobody."""
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], lambda _: Answer(status) if len(proxy.seen) < 10 else None) as proxy,
        closing(behind(options, rig, proxy)) as slow,
    ):
        assert slow.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 20))


def test_a_lost_reply_is_no_lost_and_no_doubled_document(options: dict[str, Any]) -> None:
    """The server applies every second request and its answer never arrives."""
    del options["key"], options["delete_when"]
    with closing(Rig.joining(SmallRequests(**options))) as rig:

        def behave(seen: Seen) -> Lost | None:
            return Lost() if seen.is_bulk and len(proxy.bulks) % 2 else None

        with Proxy(options["hosts"], behave) as proxy, closing(behind(options, rig, proxy)) as unlucky:
            unlucky.apply(0, [keyless([{"n": number} for number in range(20)])])
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(20))


def test_a_user_who_may_not_end_a_search_reads_every_version(rig: Rig, options: dict[str, Any]) -> None:
    """As `epochsink audit` does. The permission cluster_composite_ops allows a scroll, and not to clear it."""
    rig.apply(0, [rendered(numbered(0, 20))])
    ends: list[Seen] = []

    def behave(seen: Seen) -> Answer | None:
        if seen.method != "DELETE":
            return None
        ends.append(seen)
        return Answer(403)

    with Proxy(options["hosts"], behave) as proxy, closing(behind(options, rig, proxy)) as limited:
        assert versions(limited) == versions(rig)
    assert len(ends) == 1


def test_compressed_requests_are_applied(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options, options={"http_compress": True}))) as rig:
        rig.apply(0, [rendered(numbered(0, 30))])
        assert rig.stored() == dict(numbered(0, 30))


# ---- checks


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
