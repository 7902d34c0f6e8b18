"""Posting bulk requests until every operation has an answer that is not a passing one."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import elasticsearch
from elastic_transport import TransportError

from epochsink.elasticsearch.backoff import GaveUp, delays
from epochsink.elasticsearch.bulk_body import Request, parse
from epochsink.elasticsearch.connection import CONFLICT, PASSING, TOO_LARGE, describe, is_passing
from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BAD_REQUEST: Final = 400
_SERVER_ERROR: Final = 500

_CLOSED: Final = "index_closed_exception"


class Stopped(Exception):
    """The epoch's other requests were given up."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One operation that the server refuses for good: 409 a newer version is there, 400 or 413 the document."""

    id: str
    source: str | None
    status: int
    kind: str
    reason: str

    @property
    def conflict(self) -> bool:
        """Whether a newer version is stored."""
        return self.status == CONFLICT


class Poster:
    """Posts bulk requests to one index, from several threads.

    ``patience`` is the time in seconds after which it gives up if no operation has succeeded meanwhile.
    ``before_sending`` is called before each request is sent, by the thread that sends it; what it raises ends the post.
    """

    def __init__(
        self,
        client: elasticsearch.Elasticsearch,
        index: str,
        patience: float,
        before_sending: Callable[[], None] | None = None,
    ) -> None:
        # The client's own retries would repeat whole requests, and hide why.
        self._client = client.options(max_retries=0)
        self._index = index
        self._patience = patience
        self._before_sending = before_sending
        self._stop = threading.Event()
        # Telling each operation's status costs the server a tenth of its throughput: only once something failed.
        self._detailed = False

    def stop(self) -> None:
        """End all waiting: posts under way raise `Stopped` before their next try."""
        self._stop.set()

    def post(self, request: Request) -> list[Refusal]:
        """Post until each operation is applied or refused for good; return the refused ones.

        Sending an operation again is always right: equal versions overwrite each other with the same document.
        Raises `GaveUp`, `Stopped`, and `RowsRejected` if the index takes no writes at all.
        """
        refusals: list[Refusal] = []
        waits = delays(self._patience)
        while len(request):
            try:
                items = self._send(request)
            except (elasticsearch.ApiError, TransportError) as error:
                if _too_large(error):
                    return refusals + self._in_halves(request)
                if not is_passing(error):
                    raise _takes_no_writes(self._index, *describe(error)) from error
                self._wait(waits, describe(error)[0])
                continue
            passing = self._sort(request, items, refusals)
            if len(passing) < len(request):
                waits = delays(self._patience)
            request = request.pick(passing)
            if passing:
                (failed,) = items[passing[0]].values()
                self._wait(waits, f"HTTP {failed['status']} {_said(failed)} for {len(passing)} operation(s)")
        return refusals

    def _send(self, request: Request) -> list[dict[str, Any]]:
        """Post once; return each operation's answer, or nothing if all are applied."""
        while True:
            if self._before_sending is not None:
                self._before_sending()
            detailed = self._detailed
            answer = self._client.bulk(
                index=self._index,
                operations=[request.body],  # type: ignore[list-item]
                filter_path="errors,items.*.status,items.*.error" if detailed else "errors",
            ).body
            if not answer["errors"]:
                return []
            if detailed:
                return list(answer["items"])
            self._detailed = True

    def _sort(self, request: Request, items: list[dict[str, Any]], refusals: list[Refusal]) -> list[int]:
        """Add what is refused for good to ``refusals``; return the positions of what may pass later."""
        passing = []
        for position, item in enumerate(items):
            (answer,) = item.values()
            if "error" not in answer:
                continue
            if answer["status"] in PASSING or answer["status"] >= _SERVER_ERROR:
                passing.append(position)
            elif _is_about_the_document(answer):
                refusals.append(_refusal(request.operation(position), answer))
            else:
                raise _takes_no_writes(self._index, f"HTTP {answer['status']} {_said(answer)}")
        return passing

    def _in_halves(self, request: Request) -> list[Refusal]:
        if len(request) > 1:
            first, second = request.halves()
            return self.post(first) + self.post(second)
        document_id, source = parse(request.operation(0))
        reason = f"{len(request.operation(0))} bytes are more than the server takes (http.max_content_length)"
        return [Refusal(document_id, source, TOO_LARGE, "content_too_long", reason)]

    def _wait(self, waits: Iterator[float], reason: str) -> None:
        delay = next(waits, None)
        if delay is None:
            raise GaveUp(f"index {self._index!r}: nothing succeeded within {self._patience:g} s; last: {reason}")
        if self._stop.wait(delay):
            raise Stopped


def _too_large(error: Exception) -> bool:
    return isinstance(error, elasticsearch.ApiError) and error.status_code == TOO_LARGE


def _is_about_the_document(answer: dict[str, Any]) -> bool:
    if answer["status"] == _BAD_REQUEST:
        return bool(answer["error"]["type"] != _CLOSED)
    return answer["status"] in {CONFLICT, TOO_LARGE}


def _said(answer: dict[str, Any]) -> str:
    return f"{answer['error']['type']}: {answer['error'].get('reason', '')}"


def _refusal(operation: bytes, answer: dict[str, Any]) -> Refusal:
    error = answer["error"]
    cause = error.get("caused_by", {}).get("reason")
    reason = f"{error.get('reason', '')} ({cause})" if cause else str(error.get("reason", ""))
    document_id, source = parse(operation)
    return Refusal(document_id, source, answer["status"], error["type"], reason)


def _takes_no_writes(index: str, said: str, hint: str = "") -> RowsRejected:
    return RowsRejected(
        f"the index {index!r} takes no writes: {said}",
        hint=hint
        or "open it, lift its block or grant the privilege, then start the query again: what is recorded is applied",
        index=index,
    )
