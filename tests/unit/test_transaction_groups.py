"""Which sinks prepare an epoch together, in which order, and who is called for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from epochsink.protocol import transaction_groups
from epochsink.protocol.ledger_entries import Prepared, Replay, Share, Take
from epochsink.protocol.ledger_history import History
from epochsink.sink import Ballot, Epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable, SinkCommitter

EPOCH = Epoch(3, "a" * 32)


class Committer:
    """Says what it was asked."""

    def __init__(self, group: object = None) -> None:
        self.group = group

    def vote(self, *_given: Any) -> list[Committable]:
        return [{"alone": True}]

    def vote_together(self, _epoch: Epoch, ballots: Mapping[str, Ballot]) -> Committable:
        return {"members": {name: {} for name in ballots}}

    def replay(self, *_given: Any) -> Committable:
        return {"alone": "again"}

    def replay_together(
        self, _epoch: Epoch, _part: Committable, ballots: Mapping[str, Ballot], attempt: str
    ) -> Committable:
        return {"members": {name: {} for name in ballots}, "attempt": attempt}


class Plain:
    """Has never heard of groups."""


SINKS = cast(
    "dict[str, SinkCommitter]", {"a": Committer(1), "b": Plain(), "c": Committer(1), "d": Committer(), "e": Committer()}
)


def ballots(*names: str) -> dict[str, Ballot]:
    return {name: Ballot(SINKS[name], (), cast("Any", None), None) for name in names}


def test_members_stand_together_in_the_order_of_the_query() -> None:
    assert transaction_groups.in_groups(SINKS, ["e", "d", "c", "b", "a"]) == [["a", "c"], ["b"], ["d"], ["e"]]
    assert transaction_groups.in_groups(SINKS, ["c"]) == [["c"]]
    assert transaction_groups.group(SINKS, "c") == ["a", "c"]


def test_a_sink_that_the_query_lacks_is_never_passed_over() -> None:
    with pytest.raises(KeyError):
        transaction_groups.in_groups(SINKS, ["a", "gone"])


def test_a_group_votes_once_and_each_of_it_records_the_same_part() -> None:
    part: Committable = {"members": {"a": {}, "c": {}}}
    assert transaction_groups.vote(EPOCH, ballots("a", "c")) == {"a": (part,), "c": (part,)}
    assert transaction_groups.vote(EPOCH, ballots("a")) == {"a": ({"alone": True},)}


def test_what_is_lost_is_prepared_again_for_all_whose_rows_it_holds() -> None:
    part: Committable = {"members": {"a": {}, "c": {}}}
    again = transaction_groups.replay(EPOCH, part, "c", ballots("d", "c", "a"), "new")
    assert again == {"members": {"a": {}, "c": {}}, "attempt": "new"}
    assert transaction_groups.replay(EPOCH, part, "c", ballots("c"), "new") == {"alone": "again"}
    assert transaction_groups.replay(EPOCH, {}, "d", ballots("d", "c"), "new") == {"alone": "again"}


def test_one_entry_replaces_a_shared_part_for_all_of_its_sinks_and_no_other() -> None:
    lost: Committable = {"members": {"a": {}, "c": {}}, "attempt": "old"}
    again: Committable = {**lost, "attempt": "new"}
    history = History()
    history.add(Take(1, "driver", "query", {}))
    shares = {name: Share((lost,), ()) for name in ("a", "c", "d")}
    history.add(Prepared(3, EPOCH.attempt, "offsets", shares))
    history.add(Replay(3, "c", (again,)))
    assert {name: share.parts for name, share in history.epochs[3].shares.items()} == {
        "a": (again,),
        "c": (again,),
        "d": (lost,),
    }
