"""Send requests with the vendor's client, and turn its errors into those of the family."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, Final

import opensearchpy

from epochsink.elasticsearch.client import Json, Reply
from epochsink.elasticsearch.config import MOST_AT_ONCE, ElasticsearchConfig
from epochsink.elasticsearch.errors import CertificateRefused, NoAnswer, RequestRefused

HINTS: Final = {
    401: "check http_auth in options=: the server does not accept these credentials",
    403: "remove the index's block, or grant this user the index permissions crud and manage, and the cluster "
    "permissions cluster_composite_ops and cluster_monitor",
}
"""What to tell instead of the hints for Elasticsearch, whose privileges have other names."""
_FOUND: Final = 200
_NOT_FOUND: Final = 404


def connect(config: ElasticsearchConfig) -> opensearchpy.OpenSearch:
    """Create a client. Sends nothing yet. It logs errors only, unless its logger has been given a level."""
    log = logging.getLogger("opensearch")
    if log.level == logging.NOTSET:
        # its INFO is a line for each request, its WARNING a traceback for each that fails, which the sink reports
        log.setLevel(logging.ERROR)
    # One more than the bulk requests at once, because markers are read while those run.
    return opensearchpy.OpenSearch(list(config.hosts), pool_maxsize=MOST_AT_ONCE + 1, **config.client_options)


class OpenSearchClient:
    """The client, any version of which works with every server that is supported."""

    product: str = "OpenSearch"
    majors: Sequence[int] = (2, 3)

    def __init__(self, vendor: opensearchpy.OpenSearch) -> None:
        self._vendor = vendor
        # over the same connections: the client's own retries would repeat whole requests and hide the reason
        self._once = copy.copy(vendor.transport)
        self._once.max_retries = 0

    def request(self, method: str, target: str, body: Json | bytes | None, *, once: bool) -> Reply:
        """Send a request; see `epochsink.elasticsearch.client.Client`."""
        headers = {"content-type": "application/x-ndjson"} if isinstance(body, bytes) else None
        transport = self._once if once else self._vendor.transport
        try:
            answer: Any = transport.perform_request(method, target, headers=headers, body=body)
        except opensearchpy.SSLError as error:
            raise CertificateRefused(str(error.info)) from error
        except (opensearchpy.ConnectionError, opensearchpy.SerializationError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        except opensearchpy.TransportError as error:
            status = int(error.status_code)
            text = error.error if error.info is None else error.info
            raise RequestRefused(status, text, type(error).__name__, HINTS.get(status, "")) from error
        if method == "HEAD":
            return Reply(_FOUND if answer else _NOT_FOUND, None)
        return Reply(_FOUND, answer)

    def close(self) -> None:
        """Close the connections."""
        self._vendor.close()

    def wrong_version(self, version: str) -> None:  # noqa: ARG002 - any version of the client will do
        """Return nothing."""
        return
