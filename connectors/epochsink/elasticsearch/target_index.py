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
    """An existing index, as the configured name or alias resolves now. ``settings`` are flat.

    A restore over a closed index leaves its uuid and gives it another ``history``, which is "" before the first one.
    """

    name: str
    index: str
    uuid: str
    settings: Mapping[str, str]
    mapping: Mapping[str, Any]

    @property
    def history(self) -> str:
        """The uuid of the history that the documents have, "" for that which began with the index."""
        return self.settings.get("index.history.uuid", "")

    @property
    def incarnation(self) -> str:
        """What ``accept_index=`` names: this index with this history."""
        return f"{self.uuid}/{self.history}" if self.history else self.uuid

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

    Raises `WentBack` if it is not the one that the marker names: it was made anew or restored, or an alias has moved.
    """
    found = require(client, name)
    if kept is not None and not _is_same(found, kept) and not _is_accepted(found, kept, accept_index):
        raise WentBack(
            f"the index {found.index!r} is not the one that epoch {kept.epoch} was applied to "
            f"({_difference(found, kept)}), and may lack what was applied before: {_reason(found, kept)}",
            hint="if it holds everything up to that epoch, or need not, say so: epochsink accept CHECKPOINT "
            f"{kept.epoch} --sink NAME, or accept_index={found.incarnation!r} in the code; else fill it from the "
            "source with a new checkpoint",
            index=found.index,
        )
    return found


def _is_same(found: Target, kept: Marker) -> bool:
    # markers of earlier builds do not say which history the index had
    return found.uuid == kept.index_uuid and kept.history in (None, found.history)


def _is_accepted(found: Target, kept: Marker, accept_index: str | None) -> bool:
    # the bare uuid of the index that is in use says nothing about a restore over it that came later
    return accept_index == found.incarnation or (accept_index == found.uuid and found.uuid != kept.index_uuid)


def _difference(found: Target, kept: Marker) -> str:
    if found.uuid != kept.index_uuid:
        return f"uuid {found.uuid}, formerly {kept.index_uuid}"
    return f"history {found.history or 'of its own'}, formerly {kept.history or 'of its own'}"


def _reason(found: Target, kept: Marker) -> str:
    if found.uuid == kept.index_uuid:
        return "a snapshot was restored over it"
    if found.index == kept.index:
        return "it was deleted and created again, or restored from a snapshot"
    return f"{found.name!r} stood for the index {kept.index!r} then"
