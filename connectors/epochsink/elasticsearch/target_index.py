"""Find the index that a name resolves to, and check that it keeps documents as the sink promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import elasticsearch

from epochsink.elasticsearch import applied_epochs, data_stream, index_settings, pipelines
from epochsink.elasticsearch.connection import refresh
from epochsink.elasticsearch.data_stream import SeveralIndices, Stream
from epochsink.elasticsearch.errors import UnfitIndex
from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from epochsink.elasticsearch.applied_epochs import Marker
    from epochsink.elasticsearch.committable import PreparedEpoch
    from epochsink.elasticsearch.config import ElasticsearchConfig

_LONGEST_PATH: Final = 3000
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
    def written(self) -> str:
        """The index that documents are written to."""
        return self.index

    @property
    def posted_to(self) -> str:
        """The index that requests name: not an alias, which may be moved to another index between two of them."""
        return self.index

    @property
    def history(self) -> str:
        """The uuid of the documents' history, or "" if the index was never restored."""
        return self.settings.get("index.history.uuid", "")

    @property
    def incarnation(self) -> tuple[str, str]:
        """The index and its history. If either is different, documents applied before may be missing."""
        return self.uuid, self.history

    @property
    def indices(self) -> Mapping[str, tuple[str, str]]:
        """Nothing: the marker names the one index itself."""
        return {}

    def refresh(self, client: elasticsearch.Elasticsearch) -> None:
        """Make all documents searchable. Raises `NotServed`."""
        # A server may not report the number of primary shards.
        refresh(client, self.index, int(self.settings.get("index.number_of_shards", 1)))

    def stored_in(self, pipeline: str | None) -> str | None:
        """Return the index if documents pass a pipeline, which could send them elsewhere (see `Poster`), else None."""
        return self.index if pipelines.named(self.settings, pipeline) else None

    @property
    def refreshes_itself(self) -> bool:
        """Whether searches see new documents without an explicit refresh."""
        return self.settings.get("index.refresh_interval", "1s") != "-1"


@dataclass(frozen=True, slots=True)
class Targets(SeveralIndices):
    """The existing indices that the rows of an epoch name (``index_by``).

    ``index`` is shown in messages. ``each`` has the indices by their names.
    """

    index: str
    each: Mapping[str, Target]

    @property
    def posted_to(self) -> str:
        """No index: each operation names its own."""
        return ""

    @property
    def indices(self) -> Mapping[str, tuple[str, str]]:
        """The uuid and history of each index."""
        return {name: found.incarnation for name, found in self.each.items()}

    def stored_in(self, pipeline: str | None) -> str | None:
        """Return the indices in which documents pass a pipeline (see `Poster`), None if there are none."""
        return ", ".join(name for name, found in self.each.items() if found.stored_in(pipeline)) or None

    @property
    def refreshes_itself(self) -> bool:
        """Whether searches see new documents of each index without an explicit refresh."""
        return all(found.refreshes_itself for found in self.each.values())

    def refresh(self, client: elasticsearch.Elasticsearch) -> None:
        """Make all documents searchable. Raises `NotServed`."""
        for found in self.each.values():
            found.refresh(client)


def find_each(
    client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, names: Iterable[str]
) -> dict[str, Target]:
    """Return those of the named indices that exist. Raises `UnfitIndex` for the name of an alias or data stream.

    The dead-letter index may be an alias of one index.
    """
    wanted = dict.fromkeys(names)
    beside_names = [applied_epochs.INDEX, *filter(None, [config.dead_letter_index])]
    found: dict[str, Any] = {}
    for part in _in_a_url([*wanted, *beside_names]):
        found |= client.indices.get(
            index=part, flat_settings=True, features=["settings", "aliases"], ignore_unavailable=True
        ).body
    _refuse_unfit_letters(found, config.dead_letter_index)
    for name in wanted.keys() - found.keys():
        if index := next((index for index, described in found.items() if _stands_for(name, index, described)), None):
            raise UnfitIndex(
                f"index_by= gives {name!r}, an alias or a data stream with the index {index!r}; {_PER_INDEX}",
                "let index_by= give names of indices",
            )
    for index in wanted.keys() & found.keys():
        if reason := _unfit(index, {index: found[index]}):
            raise UnfitIndex(*reason)
    beside = {index: described["settings"] for index, described in found.items() if index not in wanted}
    return {
        name: Target(name, name, found[name]["settings"]["index.uuid"], found[name]["settings"], {}, beside)
        for name in wanted
        if name in found
    }


def _in_a_url(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names in parts that fit into a URL: the server takes 4 KiB (http.max_initial_line_length)."""
    part: list[str] = []
    for name in names:
        if part and len(quote(",".join([*part, name]))) > _LONGEST_PATH:
            yield part
            part = []
        part.append(name)
    yield part


def find(
    client: elasticsearch.Elasticsearch,
    config: ElasticsearchConfig,
    *features: str,
    name: str | None = None,
    recorded: bool = False,
) -> Target | Stream | None:
    """Return the index or data stream that ``name`` (default: as configured) resolves to; None if it does not exist.

    ``features`` to read besides the settings can be "mappings". ``recorded``: for an epoch whose arguments were others.

    Raises `UnfitIndex` for a data stream of rows with a key, an alias of several indices, and an alias that rolls over;
    likewise for the dead-letter index.
    """
    name = name or config.index
    wanted = ["settings", "aliases", *features]
    others = [applied_epochs.INDEX, *filter(None, [config.dead_letter_index])]
    # One request for all indices, because it is sent in every vote and commit.
    found = client.indices.get(index=[name, *others], flat_settings=True, features=wanted, ignore_unavailable=True).body
    _refuse_unfit_letters(found, config.dead_letter_index)
    mine = {index: described for index, described in found.items() if _stands_for(name, index, described)}
    if not mine:
        # Ask for this one alone: the request above leaves out what the user may not see, as if it were missing.
        try:
            mine = client.indices.get(index=name, flat_settings=True, features=wanted).body
        except elasticsearch.NotFoundError:
            return None
    beside = {other: found[other]["settings"] for other in found if other not in mine}
    if any("data_stream" in described for described in mine.values()):
        if unfit := data_stream.unfit(name, mine, None if recorded else config):
            raise unfit
        return data_stream.found(client, name, mine, beside)
    if reason := _unfit(name, mine):
        raise UnfitIndex(*reason)
    ((index, described),) = mine.items()
    settings = described["settings"]
    return Target(name, index, settings["index.uuid"], settings, described.get("mappings", {}), beside)


def _stands_for(name: str, index: str, described: Mapping[str, Any]) -> bool:
    return name in (index, described.get("data_stream")) or name in described.get("aliases", {})


def _refuse_unfit_letters(found: Mapping[str, Any], name: str | None) -> None:
    """Raise `UnfitIndex` if the name of the dead-letter index stands for more than one index, or will."""
    mine = {index: described for index, described in found.items() if name and _stands_for(name, index, described)}
    unfit = _unfit_letters(name, mine) if name and mine else None
    if unfit:
        reason, hint = unfit
        raise UnfitIndex(f"dead_letter_index=: {reason}", hint)


def _unfit_letters(name: str, found: Mapping[str, Any]) -> tuple[str, str] | None:
    if any("data_stream" in described for described in found.values()):
        return f"{name!r} is a data stream, which accepts neither versions nor deletes", "name an index"
    return _unfit(name, found)


def missing(name: str) -> UnfitIndex:
    """Return the error for an index that does not exist."""
    return UnfitIndex(
        f"the index {name!r} does not exist",
        "create it, or give create=True: check() then creates it from the stream's schema",
    )


def _unfit(name: str, found: Mapping[str, Any]) -> tuple[str, str] | None:
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
    if name != index and alias.get("is_write_index") is False:
        return f"the alias {name!r} accepts no writes (is_write_index is false)", f"name the index {index!r}"
    if name != index and ("index_routing" in alias or "routing" in alias):
        reason = "documents of one _id may then be in several shards of the index, so an update would duplicate them"
        return f"the alias {name!r} has routing; {reason}", f"name the index {index!r}, or an alias without routing"
    if described["settings"].get("index.mode") == "time_series":
        return (f"{index!r} is a time series index, which makes every _id itself", "name a standard index")
    return None


def unfit_settings(found: Target | Stream, config: ElasticsearchConfig) -> list[UnfitIndex]:
    """Return the wrong settings of the index that is written to, and of those beside it."""
    return index_settings.unfit(found.written, found.settings, found.beside, config)


def require_same(
    client: elasticsearch.Elasticsearch,
    config: ElasticsearchConfig,
    kept: Marker | None,
    name: str | None = None,
    placed_by: str | None = None,
    *,
    recorded: bool = False,
) -> Target | Stream:
    """Return the index or data stream that ``name`` (default: the configured name) resolves to.

    Raises `WentBack` if it is not the one that the marker names: it was recreated or restored, or an alias has moved.
    Likewise if ``placed_by`` (default: as configured) differs: stored documents would not be found where it says.
    Raises `UnfitIndex` if it does not exist, or does not keep documents as promised. ``recorded`` as in `find`.
    """
    name = name or config.index
    found = find(client, config, name=name, recorded=recorded)
    if found is None:
        raise missing(name)
    if isinstance(found, Stream) and (kept is None or not kept.index_uuid):
        _require_known(found.indices, kept, {} if kept is None else kept.indices)
    elif kept is not None and (found.uuid, found.history) != (kept.index_uuid, kept.history):
        raise WentBack(
            f"the index {found.index!r} is not the one that epoch {kept.epoch} was applied to "
            f"({_difference(found, kept)}), and may lack what was applied before: {_reason(found, kept)}",
            hint="if it holds everything up to that epoch, or does not need to, type: epochsink accept CHECKPOINT "
            f"{kept.epoch} --sink NAME; else fill it from the source with a new checkpoint",
            index=found.index,
        )
    _refuse_other_place(kept, config.placed_by if placed_by is None else placed_by, found.index)
    # Report the first one only: the next start reports the others.
    for unfit in unfit_settings(found, config):
        raise unfit
    return found


def require_each(
    client: elasticsearch.Elasticsearch,
    config: ElasticsearchConfig,
    kept: Marker | None,
    names: Iterable[str],
    *,
    voted: Mapping[str, tuple[str, str]] | None = None,
    placed_by: str | None = None,
    create: Callable[[str], None] | None = None,
) -> Targets:
    """Return the named indices, after ``create`` was called with each that is missing.

    Raises `WentBack` if an index that the marker names, or that an epoch named when it was ``voted`` on, is missing or
    another one. With ``placed_by``, and for `UnfitIndex`, as `require_same`.
    """
    wanted = list(names)
    known = {} if kept is None else {**(voted or {}), **kept.indices}
    found = find_each(client, config, [*wanted, *known])
    # before any is created: a known index that is missing was deleted, and must not come back empty
    _require_known({name: each.incarnation for name, each in found.items()}, kept, known)
    _refuse_other_place(kept, config.placed_by if placed_by is None else placed_by, config.shown_index)
    if create is not None and (absent := [name for name in wanted if name not in found]):
        for name in absent:
            create(name)
        found |= find_each(client, config, absent)
    for name in wanted:
        if name not in found:
            raise UnfitIndex(
                f"the index {name!r}, which rows of the epoch name, does not exist or may not be looked at",
                f"create it (PUT /{name}) or grant the privilege view_index_metadata, then start the query again",
            )
        for unfit in unfit_settings(found[name], config):
            raise unfit
    return Targets(config.shown_index, {name: found[name] for name in wanted})


def require_recorded(
    client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, kept: Marker | None, recorded: PreparedEpoch
) -> Target | Targets | Stream:
    """Return the index, indices or data stream of a recorded epoch, as the two above, whatever this start has."""
    placed_by = recorded.placed_by
    if recorded.indices is not None:
        return require_each(client, config, kept, recorded.indices, voted=recorded.indices, placed_by=placed_by)
    found = require_same(client, config, kept, recorded.index, placed_by, recorded=True)
    if isinstance(found, Stream) != (recorded.stream is not None):
        raise UnfitIndex(
            f"{recorded.index!r} was a data stream when the epoch was recorded and is an index now, or the reverse",
            "delete it and create what it was again, then start the query again",
        )
    if recorded.stream is None or isinstance(found, Target):
        return found
    return found.since(recorded.stream)


def _require_known(
    found: Mapping[str, tuple[str, str]], kept: Marker | None, known: Mapping[str, tuple[str, str]]
) -> None:
    for name, incarnation in known.items():
        if kept is not None and found.get(name) != incarnation:
            raise WentBack(
                f"the index {name!r} was deleted, created again or restored since epoch {kept.epoch}, and may lack "
                "what was applied before",
                hint=f"if that was meant, type: epochsink accept CHECKPOINT {kept.epoch} --sink NAME; else fill it "
                "from the source with a new checkpoint",
                index=name,
            )


def _refuse_other_place(kept: Marker | None, placed_by: str, shown: str) -> None:
    if kept is not None and kept.placed_by != placed_by:
        raise WentBack(
            f"up to epoch {kept.epoch}, documents of index {shown!r} were placed by {kept.placed_by or 'key='}, "
            f"and now by {placed_by or 'key='}: a row would not replace the document of its key, which would exist "
            "twice",
            hint="give the former argument again, or write to a new index with a new checkpoint; if the index holds no "
            f"document that may be replaced, type: epochsink accept CHECKPOINT {kept.epoch} --sink NAME",
            index=shown,
        )


def _difference(found: Target | Stream, kept: Marker) -> str:
    if found.uuid != kept.index_uuid:
        return f"uuid {found.uuid}, formerly {kept.index_uuid}"
    return f"history {found.history or 'of its own'}, formerly {kept.history or 'of its own'}"


def _reason(found: Target | Stream, kept: Marker) -> str:
    if isinstance(found, Stream):
        return "it was an index then, and is a data stream now"
    if found.uuid == kept.index_uuid:
        return "a snapshot was restored over it"
    if found.index == kept.index:
        return "it was deleted and created again, or restored from a snapshot"
    return f"{found.name!r} was the index {kept.index!r} then"
