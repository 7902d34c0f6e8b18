"""What reaches the wire: credentials, compression, and the refusal of certificates."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import ssl
import traceback
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import pytest
from elasticsearch_rig import SCHEMA
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.errors import EpochsinkError
from epochsink.sink import Identity
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "canary-91c0"
IDENTITY = Identity("query", "search", 1, {"base": 2**30})
NO_MARKER = Answer(404, b'{"found":false}')


def newest(url: str, **options: Any) -> int | None:
    committer = OneSink.of(Elasticsearch(url, index="orders", options=options))
    committer.open(IDENTITY)
    try:
        return committer.newest()
    finally:
        committer.close()


@pytest.mark.parametrize(
    ("option", "header"),
    [
        ({"api_key": "abc=="}, "ApiKey abc=="),
        ({"api_key": ("id", "key")}, "ApiKey " + base64.b64encode(b"id:key").decode()),
        ({"basic_auth": ("elastic", CANARY)}, "Basic " + base64.b64encode(f"elastic:{CANARY}".encode()).decode()),
        ({"bearer_auth": "token"}, "Bearer token"),
    ],
)
def test_credentials_reach_the_server(option: dict[str, Any], header: str) -> None:
    with Proxy(None, lambda _: NO_MARKER) as server:
        assert newest(server.url, **option) is None
    assert {seen.headers["authorization"] for seen in server.seen} == {header}


def test_other_options_reach_the_wire() -> None:
    with Proxy(None, lambda _: NO_MARKER) as server:
        newest(server.url, headers={"x-found": "yes"}, opaque_id="orders-query", http_compress=True)
    assert server.seen[0].headers["x-found"] == "yes"
    assert server.seen[0].headers["x-opaque-id"] == "orders-query"
    assert "gzip" in server.seen[0].headers["accept-encoding"]


def test_a_bulk_request_that_is_rendered_already_is_not_copied() -> None:
    body = b'{"index":{"_id":"1"}}\n{}\n'
    client = connect(Elasticsearch("http://localhost:9200", index="orders"))
    for mimetype in ("application/x-ndjson", "application/vnd.elasticsearch+x-ndjson; compatible-with=8"):
        assert client.transport.serializers.dumps([body], mimetype) is body
        assert client.transport.serializers.dumps([{"index": {"_id": "1"}}, {}], mimetype) == body
    client.close()


def test_the_clients_own_log_is_quiet_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("elastic_transport")
    monkeypatch.setattr(log, "level", logging.NOTSET)
    log.manager._clear_cache()  # type: ignore[attr-defined] # as setLevel does
    config = Elasticsearch("http://127.0.0.1:1", index="orders")
    connect(config).close()
    assert not log.getChild("transport").isEnabledFor(logging.INFO)
    log.setLevel(logging.DEBUG)
    connect(config).close()
    assert log.getChild("transport").isEnabledFor(logging.DEBUG)


def test_wrong_credentials_are_a_finding_that_hides_them() -> None:
    refusal = json.dumps({"error": {"type": "security_exception", "reason": "unable to authenticate"}}).encode()
    with Proxy(None, lambda _: Answer(401, refusal)) as server:
        sink = Elasticsearch(server.url, index="orders", options={"basic_auth": ("elastic", CANARY)})
        committer = OneSink.of(sink)
        (finding,) = committer.check(SCHEMA)
        committer.close()
    assert "unable to authenticate" in finding
    assert "api_key or basic_auth" in finding
    assert CANARY not in finding


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_overloaded_for_a_while_is_asked_again_for_the_marker(status: int) -> None:
    answers = iter([Answer(status), Answer(status), NO_MARKER])
    with Proxy(None, lambda _: next(answers)) as server:
        assert newest(server.url) is None
    assert len(server.seen) == 3


def test_errors_never_show_credentials() -> None:
    with Proxy(None, lambda _: Answer(403)) as server, pytest.raises(EpochsinkError) as caught:
        newest(server.url, basic_auth=("elastic", CANARY), headers={"x-token": CANARY})
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def version_finding(version: str) -> str:
    """Return what check() finds first on a server of a version; it refuses everything that comes after."""

    def behave(seen: Seen) -> Answer:
        if seen.path.startswith("/_nodes"):
            return Answer(200, json.dumps({"nodes": {"n": {"version": version}}}).encode())
        return Answer(403, b'{"error":{"type":"made_up","reason":"the end of this test"}}')

    with Proxy(None, behave) as server:
        committer = OneSink.of(Elasticsearch(server.url, index="orders"))
        (finding,) = committer.check(SCHEMA)
        committer.close()
    return finding


@pytest.mark.parametrize("version", ["9.2.0", f"{vendor.__version__[0]}.99.0"])
def test_supported_versions_pass(version: str) -> None:
    assert "the end of this test" in version_finding(version)


@pytest.mark.parametrize("version", ["7.17.29", "10.0.0"])
def test_a_wrong_major_version_is_named(version: str) -> None:
    assert f"the server is version {version}; supported are 8 and 9" in version_finding(version)


def test_a_client_newer_than_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "__version__", (9, 1, 0))
    finding = version_finding("8.19.9")
    assert "the server is version 8.19.9, the Python client 9.1.0" in finding
    assert "elasticsearch>=8,<9" in finding


def test_something_else_than_elasticsearch_is_named() -> None:
    with Proxy(None, lambda _: Answer(200, b"{}", {"x-elastic-product": "Other"})) as server:
        committer = OneSink.of(Elasticsearch(server.url, index="orders"))
        (finding,) = committer.check(SCHEMA)
        committer.close()
    assert "not Elasticsearch" in finding


def test_an_unknown_certificate_is_refused_before_credentials_leave(tls_server: Proxy) -> None:
    url = f"https://127.0.0.1:{tls_server.port}"
    sink = Elasticsearch(url, index="orders", options={"basic_auth": ("elastic", CANARY)})
    committer = OneSink.of(sink)
    (finding,) = committer.check(SCHEMA)
    committer.close()
    assert "certificate was refused" in finding
    assert "ca_certs" in finding
    assert tls_server.seen == []


def test_a_given_authority_is_trusted(tls_server: Proxy, certificate: Path) -> None:
    url = f"https://127.0.0.1:{tls_server.port}"
    assert newest(url, ca_certs=f"{certificate}.crt", basic_auth=("elastic", CANARY)) is None
    assert tls_server.seen[0].headers["authorization"].startswith("Basic ")


def test_a_given_fingerprint_is_trusted_and_another_refused(tls_server: Proxy, certificate: Path) -> None:
    url = f"https://127.0.0.1:{tls_server.port}"
    der = ssl.PEM_cert_to_DER_cert(certificate.with_name("server.pem.crt").read_text())
    assert newest(url, ssl_assert_fingerprint=hashlib.sha256(der).hexdigest()) is None
    with pytest.raises(EpochsinkError, match="certificate was refused"):
        newest(url, ssl_assert_fingerprint="0" * 64)
