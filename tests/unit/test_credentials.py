"""Secrets are not shown, and it is known where they would travel readably."""

from __future__ import annotations

import pickle

import pytest

from epochsink.credentials import Secret, is_loopback, masked, without_userinfo


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
        ("https://user:sec/ret@search.example:9200", "https://search.example:9200"),
        ("https://user:sec?r@e#t@search.example:9200/x", "https://search.example:9200/x"),
        ("https://[::1]:9200/a@b", "https://[::1]:9200/a@b"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_addresses_are_shown_without_credentials(address: str, shown: str) -> None:
    assert without_userinfo(address) == shown


@pytest.mark.parametrize(("host", "is_own"), [("localhost", True), ("127.8.0.1", True), ("[::1]", True), ("db", False)])
def test_the_loopback_is_known(host: str, is_own: bool) -> None:  # noqa: FBT001 - an expectation
    assert is_loopback(host) is is_own
