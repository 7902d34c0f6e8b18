"""The role that docs/how-to/for-search-operators.md gives covers what a sink makes the server do.

The development server has no security. It logs the name of each action that it runs, and a role allows actions by name.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import pyarrow as pa
from elasticsearch_rig import Rig, keyless, rendered

from epochsink import Elasticsearch
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

ALLOWED = {
    "monitor": {"cluster:monitor/*"},
    "read_pipeline": {"cluster:admin/ingest/pipeline/get", "cluster:admin/ingest/pipeline/simulate"},
    "read": {"indices:data/read/*"},
    "write": {"indices:data/write/*", "indices:admin/mapping/auto_put"},
    "view_index_metadata": {
        "indices:admin/get",
        "indices:admin/mappings/get",
        "indices:admin/resolve/index",
        "indices:monitor/settings/get",
    },
    "create_index": {"indices:admin/create", "indices:admin/auto_create"},
    "maintenance": {"indices:admin/refresh*"},
}
"""What a privilege allows, as far as a sink needs it: IndexPrivilege and ClusterPrivilegeResolver in Elastic's code."""
OWN = {"indices:admin/index_template/put", "indices:admin/rollover", "indices:monitor/stats"}
"""What the test itself asks for; a rollover looks at statistics."""
TRACE = "logger.org.elasticsearch.tasks.TaskManager"


def role() -> tuple[set[str], list[set[str]]]:
    """Return the cluster's privileges and those for each list of indices."""
    page = (Path(__file__).parents[2] / "docs/how-to/for-search-operators.md").read_text()
    found = re.search(r"^PUT /_security/role/\w+\n(\{.*?^\})", page, re.DOTALL | re.MULTILINE)
    assert found
    said = json.loads(found[1])
    return set(said["cluster"]), [set(entry["privileges"]) for entry in said["indices"]]


def actions(log: str) -> set[str]:
    """Return what clients made the server do, without what it does on its own account."""
    named = set(re.findall(r"TaskManager.*? register \d+ \[(?:transport|direct)\] \[([\w:/]+)", log))
    return {name for name in named if re.match(r"(cluster|indices):", name) and "/seq_no/" not in name}


def live(sink: Elasticsearch, *odd: Document) -> None:
    """Let a sink check, write, delete, apply an epoch of an earlier driver, and look for what is left."""
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered([("a", {"n": 1}), ("b", {"n": 2}), *odd])])
        rig.apply(1, [rendered([("a", None), ("b", {"n": 3})])])
        prepared = rig.prepare(2, [rendered([("b", {"n": 4})])])
        with closing(rig.another_driver()) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
            assert other.commit(prepared).outcome is Outcome.COMMITTED
            assert other.committer.newest() == 2


def append(admin: vendor.Elasticsearch, sink: Elasticsearch) -> None:
    """Let a sink append to a data stream, also after a rollover."""
    admin.indices.put_index_template(name=sink.index, index_patterns=[sink.index], data_stream={})
    admin.bulk(index=sink.index, operations=[{"create": {}}, {"@timestamp": "2026-11-22T06:30:00Z"}])
    batch = keyless([{"@timestamp": "2026-11-22T06:30:00Z"}])
    with closing(Rig.joining(sink, pa.schema([("@timestamp", pa.timestamp("us", tz="UTC"))]))) as rig:
        prepared = rig.prepare(0, [batch])
        admin.indices.rollover(alias=sink.index)
        assert rig.commit(prepared).outcome is Outcome.COMMITTED


def test_the_role_for_search_operators_allows_what_a_sink_does_and_nothing_that_it_does_not(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    log = Path(elasticsearch.log_path)
    index, other, letters, pipeline = fresh_index(), fresh_index(), fresh_index(), "epochsink-test-rights"
    common: dict[str, Any] = {"hosts": elasticsearch.url, "key": "id", "create": {"number_of_replicas": 0}}
    dead: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": letters}
    with closing(vendor.Elasticsearch(elasticsearch.url)) as admin:
        admin.ingest.put_pipeline(id=pipeline, processors=[])
        admin.cluster.put_settings(persistent={TRACE: "TRACE"})
        begin = log.stat().st_size
        try:
            live(Elasticsearch(**common, index=index, delete_when="n IS NULL", validate=True))
            append(admin, Elasticsearch(elasticsearch.url, index=fresh_index()))
            live(Elasticsearch(**common, **dead, index=other, pipeline=pipeline), ("c", {"n": "no number"}))
        finally:
            done = log.read_bytes()[begin:].decode()
            admin.cluster.put_settings(persistent={TRACE: None})
    cluster, indices = role()
    assert len({frozenset(entry) for entry in indices}) == 1
    given = {name: ALLOWED[name] for name in cluster | indices[0]}
    seen = actions(done) - OWN
    used = {
        name: {one for one in seen if any(fnmatch(one, each) for each in allowed)} for name, allowed in given.items()
    }
    assert seen - set().union(*used.values()) == set()
    assert [name for name, needed in used.items() if not needed] == []
