"""What reaches OpenSearch and what becomes of its answers: credentials, certificates, versions, absent shards."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import ssl
import traceback
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from elasticsearch_rig import SCHEMA
from http_proxy import Answer, Proxy, Seen

from epochsink import ConfigurationError, EpochsinkError, OpenSearch
from epochsink.elasticsearch.errors import NoAnswer, NotServed, RequestRefused
from epochsink.opensearch.connection import connect
from epochsink.sink import Identity
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "canary-91c0"
BASIC = "Basic " + base64.b64encode(f"writer:{CANARY}".encode()).decode()
IDENTITY = Identity("query", "search", 1, {"base": 2**30})
NO_MARKER = Answer(404, b'{"found":false}')


def newest(url: str, **options: Any) -> int | None:
    with closing(OneSink.of(OpenSearch(url, index="orders", options=options, timeout=2))) as committer:
        committer.open(IDENTITY)
        return committer.newest()


def findings(url: str, **options: Any) -> list[str]:
    with closing(OneSink.of(OpenSearch(url, index="orders", options=options))) as committer:
        return committer.check(SCHEMA)


@pytest.mark.parametrize(
    ("option", "header"),
    [
        ({"http_auth": ("writer", CANARY)}, BASIC),
        ({"http_auth": f"writer:{CANARY}"}, BASIC),
        ({"headers": {"authorization": "Bearer token"}}, "Bearer token"),
    ],
)
def test_credentials_reach_the_server(option: dict[str, Any], header: str) -> None:
    with Proxy(None, lambda _: NO_MARKER) as server:
        assert newest(server.url, **option) is None
    assert {seen.headers["authorization"] for seen in server.seen} == {header}
    assert {"preference=_primary" in seen.path for seen in server.seen} == {True}


def test_other_options_reach_the_wire() -> None:
    with Proxy(None, lambda _: NO_MARKER) as server:
        newest(server.url, headers={"x-found": "yes"}, opaque_id="orders-query", http_compress=True)
    seen = server.seen[0].headers
    assert (seen["x-found"], seen["x-opaque-id"]) == ("yes", "orders-query")
    assert "gzip" in seen["accept-encoding"]


def test_a_bulk_request_is_sent_once_as_it_was_rendered() -> None:
    body = b'{"index":{"_id":"\xc3\xbc"}}\n{}\n'
    with (
        Proxy(None, lambda _: Answer(503, b"no", {"content-type": "text/plain"})) as proxy,
        closing(OpenSearch(proxy.url, index="orders").connected()) as server,
        pytest.raises(RequestRefused, match="HTTP 503") as caught,
    ):
        server.bulk("orders", body, "errors", pipeline="p")
    assert (caught.value.status_code, caught.value.body) == (503, "no")
    (seen,) = proxy.seen
    assert (seen.method, seen.path) == ("PUT", "/orders/_bulk?filter_path=errors&pipeline=p")
    assert (seen.body, seen.headers["content-type"]) == (body, "application/x-ndjson")


def test_an_answer_that_is_no_json_may_pass() -> None:
    with (
        Proxy(None, lambda _: Answer(200, b"<html>", {"content-type": "text/html"})) as proxy,
        closing(OpenSearch(proxy.url, index="orders").connected()) as server,
        pytest.raises(NoAnswer, match="SerializationError"),
    ):
        server.mapping("orders")


def test_a_page_of_a_search_that_lacks_a_shard_is_none() -> None:
    """No parameter makes that an error in a scroll."""
    page = {"_scroll_id": "s", "_shards": {"total": 2, "successful": 1, "failed": 1}, "hits": {"hits": []}}
    with (
        Proxy(None, lambda _: Answer(200, json.dumps(page).encode())) as proxy,
        closing(OpenSearch(proxy.url, index="orders").connected()) as server,
    ):
        for point, after in (("orders", None), ("s", [1])):
            with pytest.raises(NotServed, match="1 of 2 shards"):
                server.search(None, {"match_all": {}}, 2, after=after, point_in_time=point)
        with pytest.raises(NotServed):
            list(server.versions(["orders"]))


def test_the_clients_own_log_is_quiet_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("opensearch")
    monkeypatch.setattr(log, "level", logging.NOTSET)
    log.manager._clear_cache()  # type: ignore[attr-defined] # as setLevel does
    config = OpenSearch("http://127.0.0.1:1", index="orders")
    connect(config).close()
    assert not log.isEnabledFor(logging.WARNING)
    log.setLevel(logging.DEBUG)
    connect(config).close()
    assert log.isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize(
    ("status", "body", "hint"),
    [
        (401, b"Unauthorized", "check http_auth in options="),
        (403, b'{"error":{"type":"security_exception","reason":"no permissions"}}', "the index permissions crud"),
    ],
)
def test_a_refusal_is_a_finding_with_the_names_of_this_product(status: int, body: bytes, hint: str) -> None:
    kind = "application/json" if body.startswith(b"{") else "text/plain"
    with Proxy(None, lambda _: Answer(status, body, {"content-type": kind})) as server:
        (finding,) = findings(server.url, http_auth=("writer", CANARY))
    assert f"OpenSearch at {server.url}: HTTP {status}" in finding
    assert hint in finding
    assert CANARY not in finding


def test_errors_never_show_credentials() -> None:
    with Proxy(None, lambda _: Answer(403)) as server, pytest.raises(EpochsinkError) as caught:
        newest(server.url, http_auth=("writer", CANARY), headers={"x-token": CANARY})
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert CANARY not in repr(OpenSearch(server.url, index="orders", options={"http_auth": ("writer", CANARY)}))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.19.6", "the end of this test"),
        ("3.9.0", "the end of this test"),
        ("1.3.20", "the server is version 1.3.20; supported are 2 and 3"),
        ("8.19.9", "use the sink for its product (Elasticsearch, OpenSearch)"),
    ],
)
def test_a_server_of_another_version_or_product_is_named(version: str, said: str) -> None:
    def behave(seen: Seen) -> Answer:
        if seen.path.startswith("/_nodes"):
            return Answer(200, json.dumps({"nodes": {"n": {"version": version}}}).encode())
        return Answer(403, b'{"error":{"type":"made_up","reason":"the end of this test"}}')

    with Proxy(None, behave) as server:
        (finding,) = findings(server.url)
    assert said in finding


def test_arguments_are_checked_and_named_as_this_sinks() -> None:
    with pytest.raises(ConfigurationError, match=r"OpenSearch\(indx=...\): there is no such argument"):
        OpenSearch("http://127.0.0.1:1", indx="orders")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="names that are not supported: api_key"):
        OpenSearch("http://127.0.0.1:1", index="orders", options={"api_key": "x"})
    with pytest.raises(ConfigurationError, match="credentials would be sent unencrypted"):
        OpenSearch("http://search.example:9200", index="orders", options={"http_auth": ("writer", CANARY)})


def test_an_unknown_certificate_is_refused_before_credentials_leave(tls_server: Proxy) -> None:
    (finding,) = findings(f"https://127.0.0.1:{tls_server.port}", http_auth=("writer", CANARY))
    assert "certificate was refused" in finding
    assert tls_server.seen == []


def test_a_given_authority_is_trusted(tls_server: Proxy, certificate: Path) -> None:
    url = f"https://127.0.0.1:{tls_server.port}"
    assert newest(url, ca_certs=f"{certificate}.crt", http_auth=("writer", CANARY)) is None
    assert tls_server.seen[0].headers["authorization"].startswith("Basic ")


def test_a_given_fingerprint_is_trusted_and_another_refused(tls_server: Proxy, certificate: Path) -> None:
    url = f"https://127.0.0.1:{tls_server.port}"
    der = ssl.PEM_cert_to_DER_cert(certificate.with_name("server.pem.crt").read_text())
    assert newest(url, ssl_assert_fingerprint=hashlib.sha256(der).hexdigest()) is None
    with pytest.raises(EpochsinkError, match="certificate was refused"):
        newest(url, ssl_assert_fingerprint="0" * 64)
