"""The permissions that docs/reference/opensearch.md gives cover what a sink makes the server do."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final

from search_actions import actions

from epochsink import OpenSearch

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

CLUSTER: Final = {
    "cluster_composite_ops": {"indices:data/write/bulk", "indices:data/read/mget", "indices:data/read/scroll"},
    "cluster_monitor": {"cluster:monitor/*"},
    "cluster:admin/ingest/pipeline/get": {"cluster:admin/ingest/pipeline/get"},
}
INDEX: Final = {
    "crud": {"indices:data/read*", "indices:data/write*", "indices:admin/mapping/put"},
    "manage": {"indices:admin/*", "indices:monitor/*"},
}
"""What a group of the security plugin allows, as far as a sink needs it: its static_action_groups.yml. Or an action."""
OF_THE_CLUSTER: Final = ("cluster:*", "indices:data/write/bulk", "indices:data/read/mget", "indices:data/read/scroll*")
"""Actions that the plugin allows for the whole cluster, not for an index: its isClusterPerm."""


def permissions() -> set[str]:
    """Return what the page says that a driver needs."""
    page = (Path(__file__).parents[2] / "docs/reference/opensearch.md").read_text()
    found = re.search(r"^the index permissions (.*?)\.$", page, re.DOTALL | re.MULTILINE)
    assert found
    return set(re.findall(r"`(.+?)`", found[1]))


def test_the_permissions_allow_what_a_sink_does_and_nothing_that_it_does_not(
    opensearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    seen = actions(OpenSearch, opensearch, fresh_index)
    cluster = {action for action in seen if any(fnmatch(action, each) for each in OF_THE_CLUSTER)}
    for level, groups in ((cluster, CLUSTER), (seen - cluster, INDEX)):
        used = {name: {one for one in level if any(fnmatch(one, each) for each in groups[name])} for name in groups}
        assert level - set().union(*used.values()) == set()
        assert [name for name, needed in used.items() if not needed] == []
    assert permissions() == {*CLUSTER, *INDEX}
