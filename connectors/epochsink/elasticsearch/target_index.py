"""Find the index that a name resolves to, and check that it keeps documents as the sink promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from epochsink.elasticsearch import applied_epochs, data_stream
from epochsink.elasticsearch.applied_epochs import MarkerDocument
from epochsink.elasticsearch.committable import SpooledEpoch
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.target import ElasticsearchTarget
from epochsink.errors import WentBack

_LONGEST_PATH: Final = 3000
ROLLOVERS: Final = (
    "index.lifecycle.rollover_alias",
    "index.plugins.index_state_management.rollover_alias",
    "index.opendistro.index_state_management.rollover_alias",
)
"""Settings of an index that name the alias which rolls over, of Elasticsearch and of OpenSearch's plugin."""
_PER_INDEX: Final = "an _id is unique within one index only"


@dataclass(frozen=True, slots=True)
class IndexTarget(ElasticsearchTarget):
    """The one existing index that ``name``, the configured name or alias, resolves to now.

    Requests name the index itself: an alias may be moved to another one between two of them.
    """

    name: str

    @property
    def incarnation(self) -> tuple[str, str]:
        return self.incarnations[self.index]

    @property
    def indices(self) -> Mapping[str, tuple[str, str]]:
        return {}

    @property
    def unchecked(self) -> Mapping[str, Mapping[str, str]]:
        return {}

    def require_unchanged(self, kept: MarkerDocument | None) -> None:
        if kept is None or self.incarnation == (kept.index_uuid, kept.history):
            return
        uuid, history = self.incarnation
        if uuid == kept.index_uuid:
            difference = f"history {history or 'of its own'}, formerly {kept.history or 'of its own'}"
            raise self.not_the_one(kept, difference, "a snapshot was restored over it")
        reason = f"{self.name!r} was the index {kept.index!r} then"
        if self.index == kept.index:
            reason = "it was deleted and created again, or restored from a snapshot"
        raise self.not_the_one(kept, f"uuid {uuid}, formerly {kept.index_uuid}", reason)


class NamedIndicesTarget(ElasticsearchTarget):
    """The existing indices that the rows of an epoch name (``index_by``)."""

    __slots__ = ()

    @property
    def posted_to(self) -> str:
        return ""


def find_each(server: ElasticsearchServer, config: ElasticsearchConfig, names: Iterable[str]) -> NamedIndicesTarget:
    """Return those of the named indices that exist. Raises `UnfitIndex` for the name of an alias or data stream.

    The dead-letter index may be an alias of one index.
    """
    wanted = dict.fromkeys(names)
    beside_names = [applied_epochs.INDEX, *filter(None, [config.dead_letter_index])]
    described: dict[str, Any] = {}
    for part in _in_a_url([*wanted, *beside_names]):
        described |= server.describe(part)
    _refuse_unfit_letters(described, config.dead_letter_index)
    for name in wanted.keys() - described.keys():
        if index := next((index for index, each in described.items() if _stands_for(name, index, each)), None):
            raise UnfitIndex(
                f"index_by= gives {name!r}, an alias or a data stream with the index {index!r}; {_PER_INDEX}",
                "let index_by= give names of indices",
            )
    for index in wanted.keys() & described.keys():
        if reason := _unfit(index, {index: described[index]}):
            raise UnfitIndex(*reason)
    beside = {index: each["settings"] for index, each in described.items() if index not in wanted}
    settings = {name: described[name]["settings"] for name in wanted if name in described}
    return NamedIndicesTarget(config.shown_index, settings, beside)


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
    server: ElasticsearchServer, config: ElasticsearchConfig, name: str | None = None, *, recorded: bool = False
) -> ElasticsearchTarget | None:
    """Return the index or data stream that ``name`` (default: as configured) resolves to; None if it does not exist.

    ``recorded``: for an epoch whose arguments were others.

    Raises `UnfitIndex` for a data stream of rows with a key, an alias of several indices, and an alias that rolls over;
    likewise for the dead-letter index.
    """
    name = name or config.index
    others = [applied_epochs.INDEX, *filter(None, [config.dead_letter_index])]
    # One request for all indices, because it is sent in every vote and commit.
    described = server.describe([name, *others])
    _refuse_unfit_letters(described, config.dead_letter_index)
    mine = {index: each for index, each in described.items() if _stands_for(name, index, each)}
    if not mine:
        # Ask for this one alone: the request above leaves out what the user may not see, as if it were missing.
        mine = server.describe_existing(name)
    if not mine:
        return None
    beside = {other: described[other]["settings"] for other in described if other not in mine}
    if any("data_stream" in each for each in mine.values()):
        if unfit := data_stream.unfit(name, mine, None if recorded else config):
            raise unfit
        return data_stream.resolve(server, name, mine, beside)
    if reason := _unfit(name, mine):
        raise UnfitIndex(*reason)
    ((index, only),) = mine.items()
    return IndexTarget(index, {index: only["settings"]}, beside, name)


def _stands_for(name: str, index: str, described: Mapping[str, Any]) -> bool:
    return name in (index, described.get("data_stream")) or name in described.get("aliases", {})


def _refuse_unfit_letters(described: Mapping[str, Any], name: str | None) -> None:
    """Raise `UnfitIndex` if there is more than one index behind the name of the dead-letter index, or will be."""
    mine = {index: each for index, each in described.items() if name and _stands_for(name, index, each)}
    unfit = _unfit(name, mine) if name and mine else None
    if any("data_stream" in each for each in mine.values()):
        unfit = f"{name!r} is a data stream, which accepts neither versions nor deletes", "name an index"
    if unfit:
        reason, hint = unfit
        raise UnfitIndex(f"dead_letter_index=: {reason}", hint)


def missing(name: str) -> UnfitIndex:
    """Return the error for an index that does not exist."""
    return UnfitIndex(
        f"the index {name!r} does not exist",
        "create it, or give create=True: check() then creates it from the stream's schema",
    )


def _unfit(name: str, described: Mapping[str, Any]) -> tuple[str, str] | None:
    if len(described) > 1:
        reason = "after a rollover a replay would duplicate documents, and an update would leave the old one"
        several = f"{name!r} is an alias of {len(described)} indices ({', '.join(sorted(described))})"
        return f"{several}; {_PER_INDEX}: {reason}", "name one of the indices, or an alias of just one"
    ((index, only),) = described.items()
    rollover = next((each for each in ROLLOVERS if only["settings"].get(each) == name), None)
    if name != index and rollover:
        moves = f"the alias {name!r} rolls over from {index!r} to new indices"
        hint = f"name the index {index!r}, or remove its setting {rollover}"
        return f"{moves}; {_PER_INDEX}: a replay after that would duplicate documents", hint
    alias = only.get("aliases", {}).get(name, {})
    if name != index and alias.get("is_write_index") is False:
        return f"the alias {name!r} accepts no writes (is_write_index is false)", f"name the index {index!r}"
    if name != index and ("index_routing" in alias or "routing" in alias):
        reason = "documents of one _id may then be in several shards of the index, so an update would duplicate them"
        return f"the alias {name!r} has routing; {reason}", f"name the index {index!r}, or an alias without routing"
    if only["settings"].get("index.mode") == "time_series":
        return (f"{index!r} is a time series index, which makes every _id itself", "name a standard index")
    return None


def require_same(
    server: ElasticsearchServer,
    config: ElasticsearchConfig,
    kept: MarkerDocument | None,
    name: str | None = None,
    placed_by: str | None = None,
    *,
    recorded: bool = False,
) -> ElasticsearchTarget:
    """Return the index or data stream that ``name`` (default: the configured name) resolves to.

    Raises `WentBack` if it is not the one that the marker names: it was recreated or restored, or an alias has moved.
    Likewise if ``placed_by`` (default: as configured) differs: stored documents would not be found where it says.
    Raises `UnfitIndex` if it does not exist, or does not keep documents as promised. ``recorded`` as in `find`.
    """
    name = name or config.index
    target = find(server, config, name=name, recorded=recorded)
    if target is None:
        raise missing(name)
    target.require_unchanged(kept)
    _refuse_other_place(kept, config.placed_by if placed_by is None else placed_by, target.index)
    # Report the first one only: the next start reports the others.
    for unfit in target.unfit_settings(config):
        raise unfit
    return target


def require_each(
    server: ElasticsearchServer,
    config: ElasticsearchConfig,
    kept: MarkerDocument | None,
    names: Iterable[str],
    *,
    voted: Mapping[str, tuple[str, str]] | None = None,
    placed_by: str | None = None,
    create: Callable[[str], None] | None = None,
) -> NamedIndicesTarget:
    """Return the named indices, after ``create`` was called with each that is missing.

    Raises `WentBack` if an index that the marker names, or that an epoch named when it was ``voted`` on, is missing or
    another one. With ``placed_by``, and for `UnfitIndex`, as `require_same`.
    """
    wanted = list(names)
    if kept is not None:
        kept = replace(kept, indices={**(voted or {}), **kept.indices})
    target = find_each(server, config, [*wanted, *(kept.indices if kept is not None else ())])
    # before any is created: a known index that is missing was deleted, and must not come back empty
    target.require_unchanged(kept)
    _refuse_other_place(kept, config.placed_by if placed_by is None else placed_by, config.shown_index)
    if create is not None and (absent := [name for name in wanted if name not in target.settings]):
        for name in absent:
            create(name)
        target = replace(target, settings={**target.settings, **find_each(server, config, absent).settings})
    for name in wanted:
        if name not in target.settings:
            raise UnfitIndex(
                f"the index {name!r}, which rows of the epoch name, does not exist or may not be looked at",
                f"create it (PUT /{name}) or grant the privilege view_index_metadata, then start the query again",
            )
    target = replace(target, settings={name: target.settings[name] for name in wanted})
    for unfit in target.unfit_settings(config):
        raise unfit
    return target


def require_recorded(
    server: ElasticsearchServer,
    config: ElasticsearchConfig,
    kept: MarkerDocument | None,
    recorded: SpooledEpoch,
) -> ElasticsearchTarget:
    """Return the index, indices or data stream of a recorded epoch, as the two above, whatever this start has."""
    placed_by = recorded.placed_by
    if recorded.indices is not None:
        return require_each(server, config, kept, recorded.indices, voted=recorded.indices, placed_by=placed_by)
    target = require_same(server, config, kept, recorded.index, placed_by, recorded=True)
    if target.appends != (recorded.stream is not None):
        raise UnfitIndex(
            f"{recorded.index!r} was a data stream when the epoch was recorded and is an index now, or the reverse",
            "delete it and create what it was again, then start the query again",
        )
    return target.since(recorded.stream)


def _refuse_other_place(kept: MarkerDocument | None, placed_by: str, shown: str) -> None:
    if kept is not None and kept.placed_by != placed_by:
        raise WentBack(
            f"up to epoch {kept.epoch}, documents of index {shown!r} were placed by {kept.placed_by or 'key='}, "
            f"and now by {placed_by or 'key='}: a row would not replace the document of its key, which would exist "
            "twice",
            hint="give the former argument again, or write to a new index with a new checkpoint; if the index holds no "
            f"document that may be replaced, type: epochsink accept CHECKPOINT {kept.epoch} --sink NAME",
            index=shown,
        )
