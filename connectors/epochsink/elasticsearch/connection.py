"""The client: which options reach it, when credentials may travel, and what its errors mean."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import elasticsearch
from elastic_transport import TlsError, TransportError

from epochsink.errors import ConfigurationError, EpochsinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SECRETS: Final = frozenset({"api_key", "basic_auth", "bearer_auth", "headers"})
"""Options whose values are never shown."""

OPTIONS: Final = SECRETS | {
    "ca_certs",
    "client_cert",
    "client_key",
    "http_compress",
    "opaque_id",
    "request_timeout",
    "ssl_assert_fingerprint",
    "ssl_assert_hostname",
    "ssl_show_warn",
    "verify_certs",
}
"""Options of the vendor's client that pass through: those that pickle and that versions 8 and 9 share."""

UNAUTHENTICATED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409
TOO_LARGE: Final = 413
PASSING: Final = frozenset({429, 502, 503, 504})
"""HTTP statuses that a later try may not see again."""


def check_options(hosts: Sequence[str], options: Mapping[str, Any], *, allow_insecure: bool) -> None:
    """Refuse unknown options, malformed hosts, and credentials that would travel in the clear.

    Raises `ConfigurationError`.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise ConfigurationError(
            f"Elasticsearch does not know the option(s) {', '.join(unknown)}",
            way_out=f"options of the vendor's client that pass through: {', '.join(sorted(OPTIONS))}",
        )
    if not hosts:
        raise ConfigurationError("hosts is empty", way_out='name at least one, e.g. "https://search.example:9200"')
    for host in hosts:
        _check_host(host, options, allow_insecure=allow_insecure)


def _check_host(host: str, options: Mapping[str, Any], *, allow_insecure: bool) -> None:
    url = urlsplit(host)
    if url.scheme not in {"http", "https"} or not url.hostname or not _port(host):
        raise ConfigurationError(
            f"the host {shown_host(host)!r} is not a URL with scheme, name and port",
            way_out='write it as "https://search.example:9200"',
        )
    credentials = bool(url.password or url.username or SECRETS & options.keys())
    if url.scheme == "http" and credentials and not allow_insecure and not _is_loopback(url.hostname):
        raise ConfigurationError(
            f"credentials would travel in the clear to {shown_host(host)}",
            way_out="use https (ca_certs= or ssl_assert_fingerprint= for a private certificate), or allow it with "
            "allow_insecure=True",
        )


def _port(host: str) -> int | None:
    try:
        return urlsplit(host).port
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def shown_host(host: str) -> str:
    """Return a host without the credentials that may stand in its URL."""
    url = urlsplit(host)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with secrets masked."""
    return {name: "***" if name in SECRETS else value for name, value in options.items()}


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
    """Return what an error of the client says, and the way out."""
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
    """Turn the client's errors into ``kind``, saying what was being done and the way out."""
    try:
        yield
    except (elasticsearch.ApiError, TransportError) as error:
        said, way_out = describe(error)
        raise kind(f"{doing} failed: {said}", way_out=way_out) from error
