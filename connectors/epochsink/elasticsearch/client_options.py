"""Which options reach the vendor's client, and when credentials may travel. Does not import the client."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def check_options(hosts: Sequence[str], options: Mapping[str, Any], *, allow_insecure: bool) -> None:
    """Refuse unknown options, malformed hosts, and credentials that would travel in the clear.

    Raises `ConfigurationError`.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise ConfigurationError(
            f"Elasticsearch does not know the option(s) {', '.join(unknown)}",
            hint=f"options of the vendor's client that pass through: {', '.join(sorted(OPTIONS))}",
        )
    if not hosts:
        raise ConfigurationError("hosts is empty", hint='name at least one, e.g. "https://search.example:9200"')
    for host in hosts:
        _check_host(host, options, allow_insecure=allow_insecure)


def _check_host(host: str, options: Mapping[str, Any], *, allow_insecure: bool) -> None:
    url = urlsplit(host)
    if url.scheme not in {"http", "https"} or not url.hostname or not _port(host):
        raise ConfigurationError(
            f"the host {shown_host(host)!r} is not a URL with scheme, name and port",
            hint='write it as "https://search.example:9200"',
        )
    credentials = bool(url.password or url.username or SECRETS & options.keys())
    if url.scheme == "http" and credentials and not allow_insecure and not _is_loopback(url.hostname):
        raise ConfigurationError(
            f"credentials would travel in the clear to {shown_host(host)}",
            hint="use https (ca_certs= or ssl_assert_fingerprint= for a private certificate), or allow it with "
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
