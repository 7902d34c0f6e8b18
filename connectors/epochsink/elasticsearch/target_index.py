"""Find the index that a name resolves to, and check that it keeps documents as the sink promises."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import elasticsearch

from epochsink.elasticsearch import applied_epochs, pipelines
from epochsink.elasticsearch.config import duration_seconds
from epochsink.elasticsearch.errors import UnfitIndex
from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.elasticsearch.applied_epochs import Marker
    from epochsink.elasticsearch.config import ElasticsearchConfig

SERVER_GC_DELETES: Final = "60s"
"""The server's default of ``index.gc_deletes``."""
_PER_INDEX: Final = "an _id is unique within one index only"


@dataclass(frozen=True, slots=True)
class Target:
    """The existing index that the configured name or alias resolves to now. ``settings`` are flat.

    A restore over a closed index keeps its uuid and changes its ``history``, which is "" before the first restore.
    ``beside`` has the settings of the other indices that the sink writes to: markers and dead letters.
    """

    name: str
    index: str
    uuid: str
    settings: Mapping[str, str]
    mapping: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, str]]

    @property
    def history(self) -> str:
        """The uuid of the documents' history, or "" if the index was never restored."""
        return self.settings.get("index.history.uuid", "")

    @property
    def incarnation(self) -> tuple[str, str]:
        """The index and its history. If either is different, documents applied before may be missing."""
        return self.uuid, self.history

    @property
    def primaries(self) -> int:
        """The number of primary shards, if the server reports it."""
        return int(self.settings.get("index.number_of_shards", 1))

    @property
    def stored_in(self) -> str | None:
        """The index if it has a pipeline, which could send documents elsewhere (see `Poster`), else None."""
        return self.index if pipelines.named(self.settings) else None

    @property
    def refreshes_itself(self) -> bool:
        """Whether searches see new documents without an explicit refresh."""
        return self.settings.get("index.refresh_interval", "1s") != "-1"


def find(
    client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, *features: str, name: str | None = None
) -> Target | None:
    """Return the one index that ``name`` (default: the configured name) resolves to, or None if it does not exist.

    ``features`` to read besides the settings can be "mappings".

    Raises `UnfitIndex` for a data stream, an alias of several indices, and an alias that rolls over.
    """
    name = name or config.index
    wanted = ["settings", "aliases", *features]
    others = [applied_epochs.INDEX, *filter(None, [config.dead_letter_index])]
    # One request for all indices, because it is sent in every vote and commit.
    found = client.indices.get(index=[name, *others], flat_settings=True, features=wanted, ignore_unavailable=True).body
    mine = {index: described for index, described in found.items() if _stands_for(name, index, described)}
    if not mine:
        # Ask for this one alone: the request above leaves out what the user may not see, as if it were missing.
        try:
            mine = client.indices.get(index=name, flat_settings=True, features=wanted).body
        except elasticsearch.NotFoundError:
            return None
    if reason := _unfit(name, mine):
        raise UnfitIndex(*reason)
    ((index, described),) = mine.items()
    settings = described["settings"]
    beside = {other: found[other]["settings"] for other in found if other not in mine}
    return Target(name, index, settings["index.uuid"], settings, described.get("mappings", {}), beside)


def _stands_for(name: str, index: str, described: Mapping[str, Any]) -> bool:
    return name in (index, described.get("data_stream")) or name in described.get("aliases", {})


def missing(name: str) -> UnfitIndex:
    """Return the error for an index that does not exist."""
    return UnfitIndex(
        f"the index {name!r} does not exist",
        "create it, or give create=True: check() then creates it from the stream's schema",
    )


def _unfit(name: str, found: Mapping[str, Any]) -> tuple[str, str] | None:
    if any("data_stream" in described for described in found.values()):
        reason = "which accepts neither versions nor a second write of an _id, so a replay would fail or duplicate"
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
        reason = "documents of one _id may then be in several shards of the index, so an update would duplicate them"
        return f"the alias {name!r} has routing; {reason}", f"name the index {index!r}, or an alias without routing"
    if described["settings"].get("index.mode") == "time_series":
        return (f"{index!r} is a time series index, which makes every _id itself", "name a standard index")
    return None


def unfit_settings(found: Target, config: ElasticsearchConfig) -> list[UnfitIndex]:
    """Return the wrong settings of the indices, each with its rule and the request that corrects it.

    Settings can change while a query runs, so every vote checks them, and every apply before and after.
    """
    written = {found.index: found.settings, **found.beside}
    unfit = [_forgets_documents(index) for index, settings in written.items() if _is_asynchronous(settings)]
    unfit += [_takes_from_us(index, settings) for index, settings in found.beside.items() if pipelines.named(settings)]
    deletes = found.settings.get("index.gc_deletes", SERVER_GC_DELETES)
    if config.delete_when is not None and (duration_seconds(deletes) or 0) < (duration_seconds(config.gc_deletes) or 0):
        unfit.append(
            UnfitIndex(
                f"index {found.index!r} forgets the version of a deleted document after index.gc_deletes={deletes}, "
                "and a delayed write would then restore the document: gc_deletes= requires at least "
                f"{config.gc_deletes}",
                f"{_set_back(found.index, 'index.gc_deletes', config.gc_deletes)}; or lower gc_deletes= to the longest "
                "pause of a driver to tolerate",
            )
        )
    return unfit


def _is_asynchronous(settings: Mapping[str, str]) -> bool:
    return settings.get("index.translog.durability", "request").lower() == "async"


def _forgets_documents(index: str) -> UnfitIndex:
    return UnfitIndex(
        f"index {index!r} has index.translog.durability=async: the server acknowledges documents before they are on "
        "disk, and a crash loses them; it must be request",
        _set_back(index, "index.translog.durability", "request"),
    )


def _takes_from_us(index: str, settings: Mapping[str, str]) -> UnfitIndex:
    return UnfitIndex(
        f"index {index!r} has the ingest pipeline(s) {', '.join(pipelines.named(settings))}, which may drop or move "
        "its documents: the indices of markers and dead letters must have none",
        f"PUT /{index}/_settings {json.dumps(dict.fromkeys(pipelines.SETTINGS))}, then start the query again",
    )


def _set_back(index: str, setting: str, value: str) -> str:
    return f'PUT /{index}/_settings {{"{setting}": "{value}"}}, then start the query again'


def require_same(
    client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, kept: Marker | None, name: str | None = None
) -> Target:
    """Return the index that ``name`` (default: the configured name) resolves to.

    Raises `WentBack` if it is not the one that the marker names: it was recreated or restored, or an alias has moved.
    Raises `UnfitIndex` if it does not exist, or does not keep documents as promised.
    """
    name = name or config.index
    found = find(client, config, name=name)
    if found is None:
        raise missing(name)
    if kept is not None and found.incarnation != (kept.index_uuid, kept.history):
        raise WentBack(
            f"the index {found.index!r} is not the one that epoch {kept.epoch} was applied to "
            f"({_difference(found, kept)}), and may lack what was applied before: {_reason(found, kept)}",
            hint="if it holds everything up to that epoch, or does not need to, type: epochsink accept CHECKPOINT "
            f"{kept.epoch} --sink NAME; else fill it from the source with a new checkpoint",
            index=found.index,
        )
    # Report the first one only: the next start reports the others.
    for unfit in unfit_settings(found, config):
        raise unfit
    return found


def _difference(found: Target, kept: Marker) -> str:
    if found.uuid != kept.index_uuid:
        return f"uuid {found.uuid}, formerly {kept.index_uuid}"
    return f"history {found.history or 'of its own'}, formerly {kept.history or 'of its own'}"


def _reason(found: Target, kept: Marker) -> str:
    if found.uuid == kept.index_uuid:
        return "a snapshot was restored over it"
    if found.index == kept.index:
        return "it was deleted and created again, or restored from a snapshot"
    return f"{found.name!r} was the index {kept.index!r} then"
