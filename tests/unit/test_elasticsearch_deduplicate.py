"""One epoch writes each id once: which row that is, and when it cannot be told."""

from __future__ import annotations

import pytest
from elasticsearch_rig import ListedRows, rendered
from hypothesis import given
from hypothesis import strategies as st

from epochsink.elasticsearch import deduplicate
from epochsink.errors import RowsRejected


def rows_of(*tasks: list[str], ranks: list[list[int | None]] | None = None) -> ListedRows:
    made = {}
    for partition, ids in enumerate(tasks):
        given_ranks = ranks[partition] if ranks else None
        made[f"task{partition}"] = [rendered([(each, {}) for each in ids], given_ranks)]
    return ListedRows(made)


def test_count_tells_rows_and_replaced_rows() -> None:
    rows = rows_of(["a", "b", "a"], ["c"])
    assert deduplicate.count(rows, rows.tasks()) == (4, 1)


def test_within_a_task_the_later_row_survives() -> None:
    rows = rows_of(["a", "b", "a"], ["c"])
    assert deduplicate.survivors(rows, rows.tasks()).tolist() == [False, True, True, True]


def test_across_tasks_without_an_order_is_refused_and_named() -> None:
    rows = rows_of(["a", "b"], ["c", "a"])
    with pytest.raises(RowsRejected, match="order_by=") as caught:
        deduplicate.survivors(rows, rows.tasks())
    assert '{"_id":"a"}' in str(caught.value)


def test_highest_rank_survives_across_tasks_and_null_is_lowest() -> None:
    rows = rows_of(["a", "b", "a"], ["a", "b"], ranks=[[5, None, 9], [7, 0]])
    assert deduplicate.survivors(rows, rows.tasks()).tolist() == [False, False, True, False, True]


def test_among_equal_ranks_the_later_row_survives() -> None:
    rows = rows_of(["a"], ["a"], ranks=[[1], [1]])
    assert deduplicate.survivors(rows, rows.tasks()).tolist() == [False, True]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, 3)), min_size=1, max_size=40))
def test_survivors_are_what_a_plain_loop_keeps(given_rows: list[tuple[str, int | None]]) -> None:
    rows = rows_of([name for name, _ in given_rows], ranks=[[rank for _, rank in given_rows]])
    best: dict[str, tuple[int, int]] = {}
    for number, (name, rank) in enumerate(given_rows):
        best[name] = max(best.get(name, (-2, -1)), (-1 if rank is None else rank, number))
    kept = {number for _, number in best.values()}
    found = deduplicate.survivors(rows, rows.tasks())
    assert {number for number, survives in enumerate(found) if survives} == kept
