"""What an index name stands for, and whether documents can be kept there by ``_id`` and version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import elasticsearch

from epochsink.elasticsearch.errors import TakesNoWrites
from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.elasticsearch.applied_epochs import Marker

_PER_INDEX: Final = "an _id is unique within one index only"


@dataclass(frozen=True, slots=True)
class Target:
    """An existing index, as the configured name or alias resolves now. ``settings`` are flat."""

    name: str
    index: str
    uuid: str
    settings: Mapping[str, str]
    mapping: Mapping[str, Any]

    @property
    def is_alias(self) -> bool:
        """Whether the configured name is an alias of the index."""
        return self.name != self.index


def find(client: elasticsearch.Elasticsearch, name: str, *features: str) -> Target | None:
    """Return the one index that ``name`` stands for, None if there is none.

    ``features`` beside its settings are "mappings".

    Raises `TakesNoWrites` for a data stream, an alias of several indices, and an alias that rolls over.
    """
    try:
        found = client.indices.get(index=name, flat_settings=True, features=["settings", "aliases", *features]).body
    except elasticsearch.NotFoundError:
        return None
    if reason := _unfit(name, found):
        raise TakesNoWrites(*reason)
    ((index, described),) = found.items()
    settings = described["settings"]
    return Target(name, index, settings["index.uuid"], settings, described.get("mappings", {}))


def require(client: elasticsearch.Elasticsearch, name: str) -> Target:
    """Return the index that ``name`` stands for. Raises `TakesNoWrites` if it is missing or unfit."""
    target = find(client, name)
    if target is None:
        raise missing(name)
    return target


def missing(name: str) -> TakesNoWrites:
    """Return the error for an index that does not exist."""
    return TakesNoWrites(
        f"the index {name!r} does not exist",
        "create it, or give create=True: check() then creates it from the stream's schema",
    )


def _unfit(name: str, found: Mapping[str, Any]) -> tuple[str, str] | None:
    if any("data_stream" in described for described in found.values()):
        reason = "which takes neither versions nor a second write of an _id, so a replay would fail or duplicate"
        return f"{name!r} is a data stream, {reason}", "name an index"
    if len(found) > 1:
        reason = "after a rollover a replay would duplicate documents, and an update would leave the old one"
        several = f"{name!r} is an alias of {len(found)} indices ({', '.join(sorted(found))})"
        return f"{several}; {_PER_INDEX}: {reason}", "name one of the indices, or an alias of just one"
    ((index, described),) = found.items()
    if name != index and described["settings"].get("index.lifecycle.rollover_alias") == name:
        moves = f"the alias {name!r} rolls over from {index!r} to new indices"
        hint = f"name the index {index!r}, or remove its setting index.lifecycle.rollover_alias"
        return f"{moves}; {_PER_INDEX}: a replay after that would duplicate documents", hint
    alias = described.get("aliases", {}).get(name, {})
    if name != index and ("index_routing" in alias or "routing" in alias):
        reason = "documents of one _id may then lie in several shards of the index, so an update would double them"
        return f"the alias {name!r} has a routing; {reason}", f"name the index {index!r}, or an alias without routing"
    if described["settings"].get("index.mode") == "time_series":
        return (f"{index!r} is a time series index, which makes every _id itself", "name a standard index")
    return None


def require_same(
    client: elasticsearch.Elasticsearch, name: str, kept: Marker | None, accept_index: str | None
) -> Target:
    """Return the index that ``name`` stands for.

    Raises `WentBack` if it is not the one that the marker names: it was made anew, or an alias has moved.
    """
    found = require(client, name)
    if kept is not None and found.uuid not in (kept.index_uuid, accept_index):
        same_name = kept.index == found.index
        raise WentBack(
            f"the index {found.index!r} is not the one that epoch {kept.epoch} was applied to (uuid {found.uuid}, "
            f"formerly {kept.index_uuid}): "
            + (
                "it was deleted and created again, or restored from a snapshot"
                if same_name
                else f"{name!r} stood for the index {kept.index!r} then"
            ),
            hint="if it holds everything up to that epoch, or need not, say so with "
            f"accept_index={found.uuid!r}; else fill it from the source with a new checkpoint",
            index=found.index,
        )
    return found
