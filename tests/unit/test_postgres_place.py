"""Which server's epochs are whose: what a failover may change, and what shows another cluster."""

from __future__ import annotations

import pytest

from epochsink.errors import WentBack
from epochsink.postgres.place import Place

RECORDED = Place("orders", 16384, "7412", 2)


@pytest.mark.parametrize(
    "now",
    [
        RECORDED,
        Place("orders", 16384, "7412", 3),
        Place("renamed", 16384, "7412", 2),
        Place("orders", 16384, None, 0),
    ],
    ids=["the same", "a standby was promoted", "the database was renamed", "the server does not say"],
)
def test_a_failover_or_a_new_name_is_the_same_place(now: Place) -> None:
    now.require(RECORDED, "orders", 7)


@pytest.mark.parametrize(
    "now", [Place("orders", 16384, "9999", 2), Place("orders", 20000, "7412", 2)], ids=["cluster", "database"]
)
def test_another_cluster_or_database_is_refused_with_the_way_on(now: Place) -> None:
    with pytest.raises(WentBack, match="restored from a dump or upgraded by pg_upgrade") as told:
        now.require(RECORDED, "orders", 7)
    assert "epochsink accept CHECKPOINT 7 --sink NAME" in told.value.hint
    with pytest.raises(WentBack) as told:
        now.require(RECORDED, "orders", -1)
    assert "epochsink accept CHECKPOINT none --sink NAME" in told.value.hint


def test_a_server_that_was_failed_over_from_is_refused() -> None:
    with pytest.raises(WentBack, match="this server is the old primary"):
        Place("orders", 16384, "7412", 1).require(RECORDED, "orders", 7)


@pytest.mark.parametrize(("done", "accepted"), [(6, "6"), (-1, "none")])
def test_the_old_primary_is_accepted_without_what_was_prepared_on_the_new_one(done: int, accepted: str) -> None:
    """It cannot hold that epoch: accepted as well, its rows would be lost."""
    with pytest.raises(WentBack, match="epoch 7 was prepared on timeline 2") as told:
        Place("orders", 16384, "7412", 1).require(RECORDED, "orders", done, 7)
    assert f"epochsink accept CHECKPOINT {accepted} --sink NAME" in told.value.hint


def test_nothing_recorded_refuses_nothing() -> None:
    Place("orders", 16384, "7412", 1).require(None, "orders", 7)
    assert Place.from_json(None) is None
    assert Place.from_json(RECORDED.to_json()) == RECORDED
