"""Secrets are not shown, and it is known where they would travel readably."""

from __future__ import annotations

import pickle
import re

import pytest

from epochsink.credentials import Secret, is_loopback, masked, refuse_unencoded, without_userinfo
from epochsink.errors import ConfigurationError
from epochsink.protocol.storage import refuse_credentials


def test_a_secret_shows_itself_nowhere_and_stays_a_string() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in repr({"password": secret})
    assert secret == "hunter2"
    assert pickle.loads(pickle.dumps(secret)) == secret  # noqa: S301 - our own


def test_named_options_are_masked() -> None:
    assert masked({"user": "u", "password": "p"}, {"password"}) == {"user": "u", "password": "***"}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:secret@search.example:9200/x", "https://search.example:9200/x"),
        ("user:secret@search.example:9200", "search.example:9200"),
        ("search.example", "search.example"),
        ("https://[::1]:9200/a", "https://[::1]:9200/a"),
        ("https://user:sec/ret@search.example:9200", "https://***"),
        ("https://user:12/ret@search.example:9200", "https://***"),
        ("https://user:s@e/cret@search.example:9200", "https://***"),
        ("https://user:sec?r@e#t@search.example:9200/x", "https://***"),
    ],
)
def test_addresses_are_shown_without_credentials(address: str, shown: str) -> None:
    assert without_userinfo(address) == shown


SECRETS = ("s3c/r3t", "s3c#r3t", "s3c?r3t", "s3c@r3t", "12/s3cr3t", "s3c@r3/t3", "12#s3/cr@3t")
"""Passwords that a URL cannot hold as they are."""


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_password_that_is_not_encoded_is_shown(secret: str) -> None:
    """A client would take it for the host, the port or the path, and quote that."""
    url = f"https://app:{secret}@search.example:9200"
    with pytest.raises(ConfigurationError, match="percent-encode") as refused:
        refuse_unencoded("hosts=", url)
    said = f"{refused.value} {without_userinfo(url)}"
    assert not [part for part in re.split("[/#?@]", secret) if part in said.partition("Hint")[0]]


@pytest.mark.parametrize("url", ["https://app:%40%2f%3F@search.example:9200/a?b#c", "search.example:9200", "https://h"])
def test_other_urls_are_taken(url: str) -> None:
    refuse_unencoded("hosts=", url)


@pytest.mark.parametrize(
    "place", ["s3a://key:canary@bucket/x", "s3://key:can/ary@bucket", "gs://canary@bucket", "abfss://c:x@canary@host/y"]
)
def test_no_part_of_the_credentials_in_the_uri_of_a_store_is_shown(place: str) -> None:
    with pytest.raises(ConfigurationError, match="storage_options=") as refused:
        refuse_credentials("checkpoint=", place)
    assert "ary" not in str(refused.value)


@pytest.mark.parametrize(
    "place", ["s3a://bucket/a@b:c", "abfss://c@account.dfs.core.windows.net/x", "hdfs://host:8020/x", "/a:b/c@d", ""]
)
def test_other_places_are_taken(place: str) -> None:
    refuse_credentials("checkpoint=", place)


@pytest.mark.parametrize(("host", "is_own"), [("localhost", True), ("127.8.0.1", True), ("[::1]", True), ("db", False)])
def test_the_loopback_is_known(host: str, is_own: bool) -> None:  # noqa: FBT001 - an expectation
    assert is_loopback(host) is is_own
