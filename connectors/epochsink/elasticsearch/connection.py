"""Send requests with the vendor's client, and turn its errors into those of this family."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import elasticsearch
from elastic_transport import NdjsonSerializer, TlsError, TransportError

from epochsink.elasticsearch.client import Json, Reply
from epochsink.elasticsearch.config import MOST_AT_ONCE, ElasticsearchConfig
from epochsink.elasticsearch.errors import CertificateRefused, NoAnswer, OtherProduct, RequestRefused, error_type

_JSON: Final = "application/json"
_LINES: Final = "application/x-ndjson"


def connect(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    """Create a client. Sends nothing yet. It logs warnings only, unless its logger has been given a level."""
    log = logging.getLogger("elastic_transport")
    if log.level == logging.NOTSET:
        # its INFO is a line for each request
        log.setLevel(logging.WARNING)
    return elasticsearch.Elasticsearch(
        list(config.hosts),
        # One more than the bulk requests at once, because markers are read while those run.
        connections_per_node=MOST_AT_ONCE + 1,
        serializers={_AsRendered.mimetype: _AsRendered()},
        **config.client_options,
    )


class _AsRendered(NdjsonSerializer):
    """Passes on a rendered body. The client's own serializer copies it twice, which takes as long as sending it."""

    def dumps(self, data: Any) -> bytes:
        match data:
            case [bytes(body)]:
                return body
        return super().dumps(data)


class ElasticsearchClient:
    """The client of versions 8 and 9, which works with servers of its own major version and of the next one."""

    product: str = "Elasticsearch"
    majors: Sequence[int] = (8, 9)

    def __init__(self, vendor: elasticsearch.Elasticsearch) -> None:
        self._vendor = vendor
        # The client's own retries would repeat whole requests and hide the reason.
        self._once = vendor.options(max_retries=0)

    def request(self, method: str, target: str, body: Json | bytes | None, *, once: bool) -> Reply:
        """Send a request; see `epochsink.elasticsearch.client.Client`."""
        headers = {"accept": _JSON}
        if body is not None:
            headers["content-type"] = _LINES if isinstance(body, bytes) else _JSON
        sent: Any = [body] if isinstance(body, bytes) else body
        client = self._once if once else self._vendor
        try:
            answer = client.perform_request(method, target, headers=headers, body=sent)
        except elasticsearch.UnsupportedProductError as error:
            text = f"this is not Elasticsearch: {error}"
            hint = "check the address, and the answers of a proxy in front of it; for OpenSearch, use OpenSearch(...)"
            raise OtherProduct(error.status_code, text, type(error).__name__, hint) from error
        except elasticsearch.ApiError as error:
            raise _refused(error) from error
        except TlsError as error:
            raise CertificateRefused(str(error)) from error
        except TransportError as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        return Reply(answer.meta.status, answer.body)

    def close(self) -> None:
        """Close the connections."""
        self._vendor.close()

    def wrong_version(self, version: str) -> str | None:
        """Return that the client is newer than a server of this version, if it is."""
        major, own = int(version.partition(".")[0]), int(elasticsearch.__version__[0])
        if own <= major:
            return None
        return (
            f"the server is version {version}, the Python client {_version()}: install the client of "
            f"the server's major version (elasticsearch>={major},<{major + 1})"
        )


def _refused(error: elasticsearch.ApiError) -> RequestRefused:
    refused = RequestRefused(error.status_code, error.body, type(error).__name__)
    if error_type(refused) == "media_type_header_exception":
        refused.hint = (
            f"client {_version()} and server differ in their major version: "
            "install the client of the server's major version (elasticsearch>=8,<9 or >=9,<10)"
        )
    return refused


def _version() -> str:
    return ".".join(map(str, elasticsearch.__version__))
