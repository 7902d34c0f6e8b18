"""Send bulk requests until every operation is applied or permanently refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from tenacity import sleep_using_event

from epochsink.elasticsearch import pipelines
from epochsink.elasticsearch.bulk_body import Request, joined, parse, place
from epochsink.elasticsearch.data_stream import Created
from epochsink.elasticsearch.errors import (
    CLIENT_ERRORS,
    GaveUp,
    Meaning,
    Refusal,
    RequestRefused,
    UnfitIndex,
    describe,
    describe_operation,
    error_type,
    is_passing,
    meaning,
)
from epochsink.elasticsearch.pace import Pace, Turn
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.retry import FIRST_PAUSE_SECONDS, retrying

_TOO_LARGE = 413
_SERVER_ERROR = 500
_OVERLOADED = 429


class PosterStopped(Exception):
    """The epoch's other requests were given up."""


class _NothingSucceeded(Exception):
    """No operation of a request was applied, but a retry may apply them. ``kinds`` are the errors of status 500."""

    def __init__(self, reason: str, kinds: set[str]) -> None:
        super().__init__(reason)
        self.kinds = kinds


class Poster:
    """Posts bulk requests to one index, or ("") to the indices that operations name, from several threads.

    ``timeout`` is the time in seconds without any success after which the poster gives up. ``before_sending`` is called
    in the sending thread before each request; an exception from it ends the post. With ``refresh``, documents can be
    searched once their request is answered. ``pipeline`` is an ingest pipeline for them, None for the index's own.
    ``stored_in`` is the index in which each document must be stored unless its operation names one, if a pipeline could
    send it elsewhere; None if there is no pipeline. ``pace`` limits requests while the server is overloaded, together
    with those of other posters that have it; None for one request at once of any size. ``created`` looks at the answers
    of a data stream. With ``counted`` the answers are counted, and not only whether one of them is an error.
    """

    def __init__(
        self,
        server: ElasticsearchServer,
        index: str,
        timeout: float,
        before_sending: Callable[[], None] | None = None,
        *,
        refresh: bool = False,
        pipeline: str | None = None,
        stored_in: str | None = None,
        pace: Pace | None = None,
        created: Created | None = None,
        counted: bool = False,
    ) -> None:
        self._server = server
        self.threads = server.threads
        self._index = index or None
        self.shown = f"index {index!r}" if index else "an index of index_by="
        self._timeout = timeout
        self._before_sending = before_sending
        self._refresh = refresh
        self.pipeline = pipeline
        self._stop = server.threads.event()
        # The status of each operation costs a tenth of the server's throughput, so it is requested after failures only.
        self._detailed = False
        self.stored_in = stored_in
        self._pace = pace
        self._created = created
        self._counted = counted
        # Errors of status 500 that depend on the document, as was found out by trying.
        self._of_documents: set[str] = set()

    def stop(self) -> None:
        """End all waiting. Running posts raise `PosterStopped` before their next try."""
        self._stop.set()
        if self._pace is not None:
            self._pace.wake()

    def post(self, request: Request) -> list[Refusal]:
        """Post until each operation is applied or permanently refused; return the refused ones.

        Sending an operation again is always safe: equal versions overwrite each other with the same document.
        Raises `GaveUp`, `PosterStopped`, and `UnfitIndex` if the index accepts no writes at all.
        """
        refusals: list[Refusal] = []
        while len(request):
            try:
                passing, rest = self._post_until_some_succeed(request, refusals)
            except CLIENT_ERRORS as error:
                if _is_too_large(error):
                    return refusals + self._in_halves(request)
                reason, hint = describe(error)
                if is_passing(error):
                    raise self._gave_up(reason) from error
                raise UnfitIndex(f"{self.shown} accepts no writes: {reason}", hint) from error
            except _NothingSucceeded as last:
                # No list of errors tells which of them depend on a document: the server takes another one, or not.
                if not (last.kinds and self._takes_another(request.operation(0))):
                    raise self._gave_up(str(last)) from last
                self._of_documents |= last.kinds
                continue
            # Some operations succeeded, so the timeout starts again. If the server is still busy, wait first.
            if len(passing):
                self._stop.wait(FIRST_PAUSE_SECONDS)
            request = joined([each for each in (passing, rest) if len(each)]) if len(passing) else rest
        return refusals

    def _post_until_some_succeed(self, request: Request, refusals: list[Refusal]) -> tuple[Request, Request]:
        """Return the operations to send again and those not sent yet; add permanently refused ones to ``refusals``."""
        policy = retrying(_may_pass, seconds=self._timeout, sleep=sleep_using_event(self._stop))
        return policy(self._post_once, request, refusals)

    def _post_once(self, request: Request, refusals: list[Refusal]) -> tuple[Request, Request]:
        if self._pace is None:
            return self._post_first(request, refusals, None)
        with self._pace.turn(self._stop) as turn:
            # Only now: another request may have met an overload during the wait.
            return self._post_first(request, refusals, turn)

    def _post_first(self, request: Request, refusals: list[Refusal], turn: Turn | None) -> tuple[Request, Request]:
        """Post as many of the operations as the pace allows."""
        if self._stop.is_set():
            raise PosterStopped
        sent, rest = request.split(request.size if self._pace is None else self._pace.size)
        try:
            items = self._send(sent)
        except RequestRefused as error:
            if turn is not None and error.status_code == _OVERLOADED:
                turn.overloaded()
            raise
        passing = self._sort(sent, items, refusals)
        if turn is not None:
            if any(_answer(items[position])["status"] == _OVERLOADED for position in passing):
                turn.overloaded()
            elif not passing:
                turn.taken()
        if passing and len(passing) == len(sent):
            failed = [_answer(items[position]) for position in passing]
            kinds = {each["error"]["type"] for each in failed if each["status"] == _SERVER_ERROR}
            raise _NothingSucceeded(f"{describe_operation(failed[0])} for {len(passing)} operation(s)", kinds)
        return sent.pick(passing), rest

    def _send(self, request: Request) -> list[dict[str, Any]]:
        """Post once; return the answer to each operation, or an empty list if all were applied."""
        while True:
            if self._before_sending is not None:
                self._before_sending()
            looked_at = self.stored_in is not None or self._created is not None
            detailed = self._detailed or self._counted or looked_at
            answer = self._server.bulk(
                self._index,
                request.body,
                self._wanted if detailed else "errors",
                refresh=self._refresh,
                pipeline=self.pipeline,
            )
            if detailed and len(items := answer.get("items", ())) != len(request):
                raise UnfitIndex(
                    f"{self.shown}: {len(request)} operations were sent, and the answer has {len(items)}",
                    "check the answers of a proxy in front of the server",
                )
            if self.stored_in is not None:
                pipelines.refuse_moved(request, answer["items"], self.stored_in)
            if self._created is not None:
                self._created.look(request, answer["items"])
            if not answer["errors"]:
                return []
            if detailed:
                return list(answer["items"])
            self._detailed = True

    @property
    def _wanted(self) -> str:
        """The fields of the answer to request for each operation."""
        place = ",items.*._index,items.*._id,items.*._version,items.*.result" if self.stored_in is not None else ""
        created = self._created.fields if self._created is not None else ""
        return f"errors,items.*.status,items.*.error{place}{created}"

    def _sort(self, request: Request, items: list[dict[str, Any]], refusals: list[Refusal]) -> list[int]:
        """Add permanently refused operations to ``refusals``; return the positions of those to send again."""
        passing = []
        taken: dict[str, bool] = {}
        for position, item in enumerate(items):
            answer = _answer(item)
            if "error" not in answer:
                continue
            kind, operation = answer["error"]["type"], request.operation(position)
            what = meaning(answer["status"], kind)
            if what is Meaning.REFUSED:
                index = place(operation).get("_index", "")
                if index not in taken:
                    taken[index] = self._takes_another(operation)
            if what is Meaning.PASSING and not (answer["status"] == _SERVER_ERROR and kind in self._of_documents):
                passing.append(position)
            elif what is Meaning.REFUSED and not taken[index]:
                raise UnfitIndex(
                    f"{self.shown} accepts no writes: {describe_operation(answer)}",
                    "open it, remove its block or grant the privilege, then start the query again: what is recorded is "
                    "applied",
                )
            else:
                refusals.append(_refusal(request, position, answer))
        return passing

    def _takes_another(self, operation: bytes) -> bool:
        """Return whether the server judges an empty document in place of an operation's: then the row is at fault.

        The document is never stored: it is conditional on a sequence number that none has.
        """
        fields = {**place(operation), "_id": "epochsink-check", "if_seq_no": 2**62, "if_primary_term": 1}
        body = json.dumps({"index": fields}).encode() + b"\n{}\n"
        try:
            wanted = "items.*.status,items.*.error.type"
            answer = self._server.bulk(self._index, body, wanted, pipeline=self.pipeline)
        except CLIENT_ERRORS:
            return False
        answers = [_answer(item) for item in answer.get("items", ())]
        return bool(answers) and all(
            meaning(each["status"], each.get("error", {}).get("type", "")) in {Meaning.CONFLICT, Meaning.DOCUMENT}
            for each in answers
        )

    def _in_halves(self, request: Request) -> list[Refusal]:
        # The limit applies to a request, so each half may pass.
        if len(request) > 1:
            first, second = request.halves()
            return self.post(first) + self.post(second)
        reason = f"{request.size} bytes are more than the server, or a proxy in front of it, accepts"
        answer = {"status": _TOO_LARGE, "error": {"type": "content_too_long", "reason": reason}}
        return [_refusal(request, 0, answer)]

    def _gave_up(self, reason: str) -> GaveUp:
        return GaveUp(f"{self.shown}: nothing succeeded within {self._timeout:g} s; last: {reason}")


def _answer(item: dict[str, Any]) -> dict[str, Any]:
    (answer,) = item.values()
    return dict(answer)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, _NothingSucceeded) or is_passing(error)


def _is_too_large(error: Exception) -> bool:
    return isinstance(error, RequestRefused) and meaning(error.status_code, error_type(error)) is Meaning.TOO_LARGE


def _refusal(request: Request, position: int, answer: dict[str, Any]) -> Refusal:
    operation, error = request.operation(position), answer["error"]
    cause = error.get("caused_by", {}).get("reason")
    reason = f"{error.get('reason', '')} ({cause})" if cause else str(error.get("reason", ""))
    document_id, source = parse(operation)
    row = request.row(position)
    return Refusal(document_id, source, answer["status"], error["type"], reason, place(operation), row=row)


def post_all(
    poster: Poster, requests: Iterable[Request], at_once: int, answered: Callable[[Sequence[Refusal]], None]
) -> None:
    """Post requests, ``at_once`` of them together.

    The caller's thread handles each answer; if that raises, all posts end.
    """

    def settle(under_way: set[Future[list[Refusal]]]) -> set[Future[list[Refusal]]]:
        ended, going_on = wait(under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            answered(future.result())
        return going_on

    with poster.threads.pool(at_once, "epochsink-bulk") as pool:
        under_way: set[Future[list[Refusal]]] = set()
        try:
            for request in requests:
                under_way.add(pool.submit(poster.post, request))
                # One more than are sent at once, so that the next request is ready when a thread becomes free.
                if len(under_way) > at_once:
                    under_way = settle(under_way)
            while under_way:
                under_way = settle(under_way)
        except BaseException:
            # Other requests may be waiting for their next try.
            poster.stop()
            pool.shutdown(cancel_futures=True)
            raise
