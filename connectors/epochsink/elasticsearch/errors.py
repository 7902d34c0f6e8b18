"""Classify the server's answers and the client's errors, for whole requests and for single operations, in one table.

Only this module decides whether the same request may succeed later, whether one document or every document is refused,
and what to tell the user.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from epochsink.errors import EpochsinkError, RowsRejected

BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409


class Meaning(enum.Enum):
    """The meaning of an answer for an epoch."""

    PASSING = "the same request may succeed later"
    DOCUMENT = "this document is permanently refused"
    CONFLICT = "a newer version of the document is stored"
    TOO_LARGE = "the request, or the one document in it, is too large"
    REFUSED = "every document would be refused: credentials, privileges, a missing, closed or blocked index"


STATUSES: Final = {
    400: Meaning.DOCUMENT,
    401: Meaning.REFUSED,
    403: Meaning.REFUSED,
    404: Meaning.REFUSED,
    408: Meaning.PASSING,
    409: Meaning.CONFLICT,
    413: Meaning.TOO_LARGE,
    429: Meaning.PASSING,
}
"""Meanings of HTTP statuses. Others are passing from 500 on, and refused below."""

TYPES: Final = {
    "index_closed_exception": Meaning.REFUSED,
    # Status 500: the processors "fail" and "dissect" of an ingest pipeline refuse this document, now and later.
    "fail_processor_exception": Meaning.DOCUMENT,
    "find_match": Meaning.DOCUMENT,
}
"""Meanings of the server's error types whose status alone would be misleading."""

HINTS: Final = {
    400: "correct what the reason names; the server's log says more",
    401: "check api_key or basic_auth in options=: the server does not accept these credentials",
    403: "remove the index's block, or grant this user the privileges read, write, create_index and "
    "view_index_metadata on the indices",
    404: "check the name of the index, and the answers of a proxy in front of the server",
    408: "the server or a proxy in front of it is overloaded; start the query again: what is recorded is applied",
    429: "the server is overloaded; start the query again: what is recorded is applied",
}
_OTHER_HINT: Final = "look at the reason; the server's log says more"
_SERVER_ERROR: Final = 500
_OVERLOADED: Final = 429


@dataclass(frozen=True, slots=True)
class Refusal:
    """One operation that the server permanently refuses: 409 for a newer version, another status for the document.

    ``place`` has the operation's ``_index`` and ``routing``, if it has them. ``position`` is that of a row in its epoch
    if it has no valid id; ``id`` is "" then. ``row`` is the row as the writer was given it; None if it is not known.
    """

    id: str
    source: str | None
    status: int
    kind: str
    reason: str
    place: Mapping[str, str] = field(default_factory=dict)
    position: str = ""
    row: pa.Table | None = field(default=None, compare=False, repr=False)

    @property
    def conflict(self) -> bool:
        """Whether a newer version is stored."""
        return self.status == CONFLICT


class RequestRefused(Exception):
    """The server, or a proxy in front of it, answers a request with an error status.

    ``body`` is the answer's JSON value or text, ``name`` the error of the vendor's client, ``hint`` one to give instead
    of those in `HINTS`.
    """

    def __init__(self, status_code: int, body: object, name: str, hint: str = "") -> None:
        super().__init__(status_code, body, name, hint)
        self.status_code = status_code
        self.body = body
        self.name = name
        self.hint = hint

    def __str__(self) -> str:
        return f"HTTP {self.status_code} {error_type(self)}: {_reason(self)}"


class OtherProduct(RequestRefused):
    """The server is not the product that the client is for. The message is the client's, as ``body``."""


class NoAnswer(Exception):
    """No answer, or not a readable one: the same request may succeed later. The argument is the client's error."""


class CertificateRefused(NoAnswer):
    """The client refuses the server's certificate, now and later."""


class NotServed(NoAnswer):
    """The server answers, but some shard is not available yet: the same request may succeed later."""


CLIENT_ERRORS: Final = (RequestRefused, NoAnswer)
"""All errors that a request may raise."""


class GaveUp(Exception):
    """Only temporary failures during the whole timeout. The argument is the last one."""


class UnfitIndex(Exception):
    """An index accepts no writes of any document, or does not keep them as the sink promises."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}: {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[UnfitIndex], tuple[str, str]]:
        return UnfitIndex, (self.message, self.hint)


def meaning(status: int, kind: str = "") -> Meaning:
    """Return the meaning of a status, for a request or one operation. ``kind`` is the server's error type."""
    if kind in TYPES:
        return TYPES[kind]
    return STATUSES.get(status, Meaning.PASSING if status >= _SERVER_ERROR else Meaning.REFUSED)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later: a lost connection, a time-out, an overloaded server."""
    if isinstance(error, RequestRefused):
        return meaning(error.status_code, error_type(error)) is Meaning.PASSING
    # a wrong certificate stays wrong, though the client counts it among lost connections
    return isinstance(error, NoAnswer) and not isinstance(error, CertificateRefused)


def error_type(error: RequestRefused) -> str:
    """Return the server's error type, or the name of the client's error."""
    cause = error.body.get("error") if isinstance(error.body, dict) else None
    return str(cause.get("type", "")) if isinstance(cause, dict) else error.name


def describe(error: Exception) -> tuple[str, str]:
    """Return the text of an error of a request, and the hint."""
    if isinstance(error, CertificateRefused):
        return f"the server's certificate was refused: {error}", (
            "give the authority that signed it (ca_certs) or its fingerprint (ssl_assert_fingerprint) in options="
        )
    if isinstance(error, OtherProduct):
        return str(error.body), error.hint
    if not isinstance(error, RequestRefused):
        return str(error), "check that the hosts are right and reachable, then start again"
    return str(error), error.hint or HINTS.get(error.status_code, _OTHER_HINT)


def describe_operation(answer: dict[str, Any]) -> str:
    """Return the text of the answer to one operation of a bulk request.

    Without the reason of a failure that may pass, unless it is the server's load: it may quote the whole document.
    """
    status, kind = answer["status"], answer["error"]["type"]
    shown = status == _OVERLOADED or meaning(status, kind) is not Meaning.PASSING
    return f"HTTP {status} {kind}{': ' + answer['error'].get('reason', '') if shown else ''}"


@contextlib.contextmanager
def explained(kind: type[EpochsinkError], doing: str, state: str = "") -> Iterator[None]:
    """Turn errors of a request into ``kind`` with ``doing`` in the text, and `UnfitIndex` with ``state``."""
    try:
        yield
    except UnfitIndex as error:
        raise kind(f"{error.message}; {state}" if state else error.message, hint=error.hint, may_pass=False) from error
    except CLIENT_ERRORS as error:
        said, hint = describe(error)
        raise kind(f"{doing} failed: {said}", hint=hint, may_pass=is_passing(error)) from error


def documents_rejected(refused: Sequence[Refusal], state: str) -> RowsRejected:
    """Return the error that shows the first refused documents and the number of the others."""
    return RowsRejected(
        f"the server permanently refuses {len(refused)} document(s): {_kinds(refused)}; {state}",
        hint="correct the mapping (or the rows, by select= or where=) and start the query again, or give "
        'on_rejected="dead_letter" with dead_letter_index= to set such documents aside',
        values="; ".join(f"_id {each.id!r}: {each.reason}" for each in refused[:5]),
        ids=[each.id for each in refused[:100]],
    )


def too_many_letters(refused: Sequence[Refusal], letters: int, rows: int, limit: float, state: str) -> RowsRejected:
    """Return the error for an epoch with more dead letters than ``limit`` allows; ``refused`` are the last ones."""
    return RowsRejected(
        f"at least {letters} of {rows} rows are refused, more than letters_limit={limit}: {_kinds(refused)}; {state}",
        hint="see which: epochsink letters list CHECKPOINT --sinks MODULE:ATTRIBUTE; correct the mapping or raise "
        "letters_limit=, and start the query again: it applies the epoch",
        values="; ".join(f"_id {each.id!r}: {each.reason}" for each in refused[:5]),
    )


def too_many_unfit(unfit: int, rows: int, limit: float, epoch: int) -> RowsRejected:
    """Return the error for an epoch with more rows that no request can hold than ``limit`` allows."""
    return RowsRejected(
        f"{unfit} of {rows} rows have no valid _id or routing, or a value that no document can hold, more than "
        f"letters_limit={limit}; epoch {epoch} is not recorded, and nothing of it is written",
        hint="correct key=, routing= or the stream, or raise letters_limit=, and start the query again",
    )


def _kinds(refused: Sequence[Refusal]) -> str:
    kinds = Counter(_without_values(each) for each in refused)
    return "; ".join(f"{count} times {kind}" for kind, count in kinds.most_common(5))


def _without_values(refusal: Refusal) -> str:
    """Return the error type of a refusal and the field if it is named, without the reason, which quotes the value."""
    field = re.search(r"field \[([^\]]*)\](?: of type \[([^\]]*)\])?", refusal.reason)
    return f"{refusal.kind} ({field[0]})" if field else refusal.kind


def _reason(error: RequestRefused) -> str:
    body = error.body
    cause = body.get("error") if isinstance(body, dict) else None
    return str(cause.get("reason", "")) if isinstance(cause, dict) else str(body)[:300]
