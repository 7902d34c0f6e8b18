"""The role that docs/how-to/for-search-operators.md gives covers what a sink makes the server do."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from search_actions import actions

from epochsink import Elasticsearch

if TYPE_CHECKING:
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


def role() -> tuple[set[str], list[set[str]]]:
    """Return the cluster's privileges and those for each list of indices."""
    page = (Path(__file__).parents[2] / "docs/how-to/for-search-operators.md").read_text()
    found = re.search(r"^PUT /_security/role/\w+\n(\{.*?^\})", page, re.DOTALL | re.MULTILINE)
    assert found
    said = json.loads(found[1])
    return set(said["cluster"]), [set(entry["privileges"]) for entry in said["indices"]]


def test_the_role_for_search_operators_allows_what_a_sink_does_and_nothing_that_it_does_not(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    seen = actions(Elasticsearch, elasticsearch, fresh_index)
    cluster, indices = role()
    assert len({frozenset(entry) for entry in indices}) == 1
    given = {name: ALLOWED[name] for name in cluster | indices[0]}
    used = {
        name: {one for one in seen if any(fnmatch(one, each) for each in allowed)} for name, allowed in given.items()
    }
    assert seen - set().union(*used.values()) == set()
    assert [name for name, needed in used.items() if not needed] == []
