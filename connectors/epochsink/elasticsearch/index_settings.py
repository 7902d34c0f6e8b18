"""Check that the settings of indices keep documents as the sink promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from epochsink.elasticsearch import pipelines
from epochsink.elasticsearch.config import ElasticsearchConfig, duration_seconds
from epochsink.elasticsearch.errors import UnfitIndex

SERVER_GC_DELETES: Final = "60s"
"""The server's default of ``index.gc_deletes``."""


def unfit(
    index: str, settings: Mapping[str, str], beside: Mapping[str, Mapping[str, str]], config: ElasticsearchConfig
) -> list[UnfitIndex]:
    """Return the wrong settings of an index and of those ``beside`` it, each with the request that corrects it.

    Settings can change while a query runs, so every vote checks them, and every apply before and after.
    """
    written = {index: settings, **beside}
    unfit = [_forgets_documents(name) for name, each in written.items() if _is_asynchronous(each)]
    unfit += [_takes_from_us(name, each) for name, each in beside.items() if pipelines.named(each)]
    deletes = settings.get("index.gc_deletes", SERVER_GC_DELETES)
    # only a deleted document's version is forgotten: without deletes the setting does not matter
    if config.delete_when is not None and (duration_seconds(deletes) or 0) < (duration_seconds(config.gc_deletes) or 0):
        unfit.append(
            UnfitIndex(
                f"index {index!r} forgets the version of a deleted document after index.gc_deletes={deletes}, "
                "and a delayed write would then restore the document: gc_deletes= requires at least "
                f"{config.gc_deletes}",
                f"{_set_back(index, 'index.gc_deletes', config.gc_deletes)}; or lower gc_deletes= to the longest "
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
