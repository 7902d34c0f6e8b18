"""What must stay secret: how it is shown, and over which networks it may travel."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any, Final

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
    """Return a URL, or ``user:password@host`` without a scheme, without the credentials that it may contain."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address.rpartition("@")[2]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    host = authority.rpartition("@")[2]
    port = host.rpartition("]")[2].partition(":")[2]
    if port and not port.isdigit():
        # not a port, but the start of a password that contains "/", which ends the authority
        return f"{scheme}{separator}{rest.rpartition('@')[2]}"
    return f"{scheme}{separator}{host}{rest.removeprefix(authority)}"


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine itself, so that nothing sent to it crosses a network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
