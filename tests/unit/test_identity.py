"""Names that targets know epochs by: within the targets' limits, and with an inverse."""

from __future__ import annotations

import re
import string

from hypothesis import given
from hypothesis import strategies as st

from epochsink.identity import (
    PreparedName,
    TransactionalId,
    document_id_prefix,
    identity_label,
    marker_document,
    marker_group,
    marker_group_prefix,
    pipeline_name,
    staging_owner,
    staging_table,
)
from epochsink.sink import Identity, identity_key

KEYS = st.text("0123456789abcdef", min_size=20, max_size=20)
UUIDS = st.text("0123456789abcdef", min_size=32, max_size=32)
NUMBERS = st.integers(min_value=0, max_value=2**63 - 1)
TEXT = st.text(min_size=1)
SMALL = st.integers(min_value=0, max_value=2**31)
LABELS = st.just("") | st.builds(
    lambda pipeline, sink: identity_label(Identity("", sink, pipeline=pipeline)), TEXT, TEXT
)
NAMES = st.builds(PreparedName, KEYS, NUMBERS, NUMBERS, UUIDS, st.just("all") | UUIDS, LABELS)
IDS = st.builds(TransactionalId, KEYS, NUMBERS, SMALL, st.sampled_from([0, 1]), SMALL, st.just("") | UUIDS, LABELS)
PRINTABLE = set(string.ascii_letters + string.digits + "._:-/")


@given(st.text(), st.text(), st.text(), st.text())
def test_a_key_stands_for_one_identity(query: str, sink: str, other_query: str, other_sink: str) -> None:
    key = identity_key(Identity(query, sink, 1))
    assert re.fullmatch("[0-9a-f]{20}", key)
    assert key == identity_key(Identity(query, sink, 2, {"base": 1}))
    same = (query, sink) == (other_query, other_sink)
    no_nul = "\x00" not in query + other_query
    if no_nul:
        assert (key == identity_key(Identity(other_query, other_sink))) is same


@given(NAMES)
def test_gids_have_an_inverse(name: PreparedName) -> None:
    text = str(name)
    assert PreparedName.parse(text) == name
    assert len(text.encode()) < 200
    assert set(text) <= PRINTABLE
    assert text.startswith(PreparedName.pattern(name.key).removesuffix("%"))


@given(IDS)
def test_transactional_ids_have_an_inverse(name: TransactionalId) -> None:
    text = str(name)
    assert TransactionalId.parse(text) == name
    assert len(text) < 249
    assert set(text) <= PRINTABLE
    assert text.startswith(TransactionalId.prefix(name.key))


def test_a_gid_and_a_transactional_id_say_whose_they_are() -> None:
    identity = Identity("5d9b9a9e", 'ta"ble', 7, pipeline=pipeline_name("s3a://lake/checkpoints/orders.v2/"))
    label = identity_label(identity)
    assert label == "orders_v2/ta_ble"
    assert str(PreparedName("0" * 20, 7, 42, "a" * 32, "all", label)).endswith(f":7:42:{'a' * 32}:all:{label}")
    assert str(TransactionalId("0" * 20, 7, 3, 0, 1, label=label)).endswith(f".g7.s3.p0.a1.{label}")


def test_names_of_earlier_versions_are_still_read() -> None:
    gid, name = f"epochsink:{'0' * 20}:7:42:{'a' * 32}:all", f"epochsink.{'0' * 20}.g7.s3.p0.a1"
    assert PreparedName.parse(gid) == PreparedName("0" * 20, 7, 42, "a" * 32)
    assert TransactionalId.parse(name) == TransactionalId("0" * 20, 7, 3, 0, 1)
    assert TransactionalId.parse(f"{name}.{'b' * 32}") == TransactionalId("0" * 20, 7, 3, 0, 1, "b" * 32)


@given(KEYS, UUIDS)
def test_staging_tables_have_an_inverse(key: str, attempt: str) -> None:
    table = staging_table(key, attempt)
    assert staging_owner(table) == (key, attempt)
    assert len(table.encode()) <= 63
    assert re.fullmatch("[a-z_][a-z0-9_]*", table)


@given(st.text())
def test_what_is_not_ours_is_not_taken_for_ours(text: str) -> None:
    for parse in (PreparedName.parse, TransactionalId.parse, staging_owner):
        assert parse(text) is None


@given(NAMES, st.text(min_size=1))
def test_nothing_may_stand_around_a_name(name: PreparedName, more: str) -> None:
    for text in (f"{more}{name}", f"{name}\n"):
        assert PreparedName.parse(text) is None


@given(KEYS, KEYS, NUMBERS, NUMBERS)
def test_names_of_different_things_differ(key: str, other: str, epoch: int, later: int) -> None:
    if key != other:
        assert marker_group(key, 0, 0) != marker_group(other, 0, 0)
        assert not marker_group(key, 0, 0).startswith(marker_group_prefix(other))
        assert marker_document(key) != marker_document(other)
        assert not document_id_prefix(key, epoch).startswith(document_id_prefix(other, epoch))
    groups = {marker_group(key, 0, 0), marker_group(key, 0, 1)}
    assert len(groups) == 2
    assert all(group.startswith(marker_group_prefix(key)) for group in groups)
    if epoch != later:
        assert not document_id_prefix(key, epoch).startswith(document_id_prefix(key, later))
