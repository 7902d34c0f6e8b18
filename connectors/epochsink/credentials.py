"""What must stay secret: how it is shown, and over which networks it may travel."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

MASK: Final = "***"


class Secret(str):
    """A string that shows itself nowhere: not in repr, not in a client's log of its settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{MASK}'"


def masked(options: Mapping[str, Any], secrets: AbstractSet[str]) -> dict[str, Any]:
    """Return options with the values of those named in ``secrets`` masked."""
    return {name: MASK if name in secrets else value for name, value in options.items()}


def without_userinfo(address: str) -> str:
    """Return a URL, or ``user:password@host`` without a scheme, without the credentials that may stand in it."""
    if "://" not in address:
        return address.rpartition("@")[2]
    url = urlsplit(address)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine itself, so that nobody can read what is sent."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
