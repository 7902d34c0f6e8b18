"""What must stay secret: how it is shown, and over which networks it may travel."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from epochsink.errors import ConfigurationError

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
    authority = _authority(rest)
    if "@" in rest.removeprefix(authority):
        # perhaps no path, but the end of a password: what comes before may be a part of it too
        return f"{scheme}{separator}{MASK}"
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{rest.removeprefix(authority)}"


def refuse_unencoded(argument: str, url: str) -> None:
    """Raise `ConfigurationError`, which shows no part of the URL, if clients may take a part of a password for a host.

    A "/", "?" or "#" in a password ends the host for most of them, and the first "@" the password for some.
    """
    _, separator, rest = url.partition("://")
    authority = _authority(rest)
    if separator and (authority.count("@") > 1 or "@" in rest.removeprefix(authority)):
        raise ConfigurationError(
            f"invalid {argument}: the URL (not shown, it may hold a password) has an '@' where none may be", hint=ENCODE
        )


ENCODE: Final = (
    "percent-encode special characters of user and password in a URL: %40 for @, %3A for :, %2F for /, %3F for ?, "
    "%23 for #, %25 for %; or give them in options="
)


def _authority(rest: str) -> str:
    """Return the part of a URL, without its scheme, that names user, host and port."""
    return re.split("[/?#]", rest, maxsplit=1)[0]


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine itself, so that nothing sent to it crosses a network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
