"""Refuse ingest pipelines that drop or move documents.

The server runs a pipeline on each document before it stores it. A pipeline may change fields. One that drops documents,
or sends them to another index or ``_id``, loses rows without an error. `check` finds most of these in the pipeline's
definition; the effects of scripts and conditions appear only in the answer to each operation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from epochsink.elasticsearch.bulk_body import Request
from epochsink.elasticsearch.errors import CONFLICT, UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer

SETTINGS: Final = ("index.default_pipeline", "index.final_pipeline")
NONE: Final = "_none"
"""The name that means: no pipeline."""
_MISSING: Final = re.compile(r"pipeline with id \[.*\] does not exist")
_MOVING: Final = frozenset({"date_index_name", "drop", "reroute"})
"""Processors that drop documents or send them elsewhere."""
_PLACE: Final = frozenset({"_id", "_index", "_routing", "_version", "_version_type"})
"""Fields that decide where a document is stored, and with which version."""


def named(settings: Mapping[str, str], given: str | None = None) -> list[str]:
    """Return the pipelines of documents: those in the index's settings, and ``given`` instead of the default one."""
    default, final = (settings.get(name, NONE) for name in SETTINGS)
    return [name for name in (given or default, final) if name != NONE]


def has_final(settings: Mapping[str, str]) -> bool:
    """Return whether the index has a pipeline that no request can leave out."""
    return settings.get(SETTINGS[1], NONE) != NONE


def is_missing(reason: str) -> bool:
    """Return whether a refusal gives as its reason that a pipeline does not exist: no error type says that."""
    return _MISSING.search(reason) is not None


def missing(server: ElasticsearchServer, names: Sequence[str]) -> list[str]:
    """Return the pipelines that do not exist; none if the user lacks the privilege to ask."""
    return [name for name in names if server.pipeline(name) is None]


def moving(server: ElasticsearchServer, index: str, names: Sequence[str], given: str | None = None) -> list[UnfitIndex]:
    """Return the processors, found in the pipelines' definitions, that would drop or move documents.

    ``given`` is the one of them that ``pipeline=`` names.
    """
    problems: list[UnfitIndex] = []
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        # if the user may not read it, nothing is found here, and `refuse_moved` tells from the answers to documents
        for described in (server.pipeline(name) or {}).values():
            for kind, options in _processors(described):
                if kind == "pipeline":
                    waiting.append(str(options.get("name")))
                elif kind in _MOVING or _PLACE.intersection(_targets(options)):
                    problems.append(_moves(index, name, kind, given))
    return problems


def _processors(described: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each processor's type and options, including nested processors and those that run on a failure."""
    nested = [described["processor"]] if "processor" in described else []
    for processor in [*described.get("processors", []), *described.get("on_failure", []), *nested]:
        for kind, options in processor.items():
            yield kind, options
            yield from _processors(options)


def _targets(options: Mapping[str, Any]) -> list[str]:
    given = (options.get(name, []) for name in ("field", "target_field"))
    return [field for one in given for field in (one if isinstance(one, list) else [one])]


def _moves(index: str, pipeline: str, kind: str, given: str | None) -> UnfitIndex:
    left_out = "leave pipeline= out, or " if given else ""
    return UnfitIndex(
        f"index {index!r} has the ingest pipeline {pipeline!r}, whose processor {kind!r} drops documents or sends them "
        "to another index, _id or version: their rows would be missing",
        f"remove that processor (use where=, key= and routing= instead), or {left_out}remove the pipeline: "
        f"{_removed(index)}",
    )


def _removed(index: str) -> str:
    return f"PUT /{index}/_settings {json.dumps(dict.fromkeys(SETTINGS))}"


def refuse_moved(request: Request, items: Sequence[Mapping[str, Any]], index: str) -> None:
    """Raise `UnfitIndex` if a document is not stored in its index under its ``_id`` and version.

    ``index`` is that of operations that name none.
    """
    if _all_stored(request, items, index):
        return
    moved = []
    for position, item in enumerate(items):
        ((action, answer),) = item.items()
        # Pipelines do not run on deletes.
        if action == "delete":
            continue
        sent = json.loads(request.operation(position).partition(b"\n")[0])[action]
        written = sent.get("_index", index)
        if _is_moved(answer, written, sent["_id"], sent["version"]):
            moved.append(written)
    if moved:
        names = ",".join(sorted(set(moved)))
        raise UnfitIndex(
            f"an ingest pipeline of index {names!r} has dropped {len(moved)} of {len(items)} documents of one request, "
            "or sent them to another index, _id or version",
            f"correct the pipeline or remove it ({_removed(names)}), delete what it has written elsewhere, and start "
            "the query (or the retry of dead letters) again: it writes all of these documents",
        )


def _is_moved(answer: Mapping[str, Any], index: str, document_id: str, version: int) -> bool:
    if "error" in answer:
        # A newer document is stored: is it the one that was meant?
        return answer["status"] == CONFLICT and (answer.get("_index"), answer.get("_id")) != (index, document_id)
    stored = answer.get("_index"), answer.get("_id"), answer.get("_version")
    return answer.get("result") == "noop" or stored != (index, document_id, version)


def _all_stored(request: Request, items: Sequence[Mapping[str, Any]], index: str) -> bool:
    """Return whether each document is where it was sent, as usual. Lists are compared much faster than documents."""
    if (sent := request.own_fields()) is None:
        return False
    (first,) = json.loads(request.operation(0).partition(b"\n")[0]).values()
    answers = [answer for item in items for answer in item.values()]
    return (
        [fields["_id"] for fields in sent] == [answer.get("_id") for answer in answers]
        and {answer.get("_version") for answer in answers} == {first["version"]}
        and [fields.get("_index", index) for fields in sent] == [answer.get("_index") for answer in answers]
        and "noop" not in {answer.get("result") for answer in answers}
    )
