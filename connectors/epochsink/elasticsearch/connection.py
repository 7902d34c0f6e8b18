"""The vendor's client, and what its errors mean."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import elasticsearch
from elastic_transport import TlsError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.errors import EpochsinkError

UNAUTHENTICATED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409
TOO_LARGE: Final = 413
PASSING: Final = frozenset({429, 502, 503, 504})
"""HTTP statuses that a later try may not see again."""


def connect(hosts: Sequence[str], options: Mapping[str, Any], connections: int) -> elasticsearch.Elasticsearch:
    """Make a client that keeps up to ``connections`` open; nothing is sent yet."""
    return elasticsearch.Elasticsearch(list(hosts), connections_per_node=connections, **options)


def client_version() -> str:
    """Return the version of the vendor's client."""
    return ".".join(map(str, elasticsearch.__version__))


def error_type(error: Exception) -> str:
    """Return the type that the server gave an error, or the exception's name."""
    body = getattr(error, "body", None)
    cause = body.get("error") if isinstance(body, dict) else None
    if isinstance(cause, dict):
        return str(cause.get("type", ""))
    return type(error).__name__


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later: a lost connection, a time-out, an overloaded server."""
    if isinstance(error, elasticsearch.ApiError):
        return error.status_code in PASSING
    return isinstance(error, TransportError) and not isinstance(error, TlsError)


def describe(error: Exception) -> tuple[str, str]:
    """Return what an error of the client says, and the hint."""
    if isinstance(error, TlsError):
        return f"the server's certificate was refused: {error}", (
            "give the authority that signed it (ca_certs=) or its fingerprint (ssl_assert_fingerprint=)"
        )
    if isinstance(error, elasticsearch.UnsupportedProductError):
        return f"this is not Elasticsearch: {error}", "check the address, and what the proxy before it answers"
    if not isinstance(error, elasticsearch.ApiError):
        return f"{type(error).__name__}: {error}", "check that the hosts are right and reachable, then start again"
    return f"HTTP {error.status_code} {error_type(error)}: {_reason(error)}", _way_out(error)


def _way_out(error: elasticsearch.ApiError) -> str:
    if error.status_code == UNAUTHENTICATED:
        return "check api_key= or basic_auth=: the server does not accept these credentials"
    if error.status_code == FORBIDDEN:
        return "grant this user the privileges read, write, manage and view_index_metadata on the indices"
    if error_type(error) == "media_type_header_exception":
        return (
            f"client {client_version()} and server differ in their major version: "
            "install the client of the server's (elasticsearch>=8,<9 or >=9,<10)"
        )
    return "look at the reason; the server's log says more"


def _reason(error: elasticsearch.ApiError) -> str:
    body = error.body
    cause = body.get("error") if isinstance(body, dict) else None
    return str(cause.get("reason", "")) if isinstance(cause, dict) else str(body)[:300]


@contextlib.contextmanager
def explained(kind: type[EpochsinkError], doing: str) -> Iterator[None]:
    """Turn the client's errors into ``kind``, saying what was being done and the hint."""
    try:
        yield
    except (elasticsearch.ApiError, TransportError) as error:
        said, hint = describe(error)
        raise kind(f"{doing} failed: {said}", hint=hint) from error
