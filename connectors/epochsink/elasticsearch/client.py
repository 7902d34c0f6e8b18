"""What sends requests for this family: a vendor's client, whose errors are turned into those of `errors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The status of an answer, and its JSON value."""

    status: int
    body: Any


class Client(Protocol):
    """Sends requests by a vendor's client. ``majors`` are the server's versions that are supported."""

    product: str
    majors: Sequence[int]

    def request(self, method: str, target: str, body: Json | bytes | None, *, once: bool) -> Reply:
        """Send a request to a path with its parameters; bytes are the body of a bulk request.

        With ``once`` it is not repeated, else the client may try other nodes. Raises
        `epochsink.elasticsearch.errors.CLIENT_ERRORS`.
        """

    def close(self) -> None:
        """Close the connections."""

    def wrong_version(self, version: str) -> str | None:
        """Return why the client does not work with a server of a version; None if it does."""
