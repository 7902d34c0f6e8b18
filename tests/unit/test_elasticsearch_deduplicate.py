"""One epoch writes each id once: which row that is, and when it cannot be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from elasticsearch_rig import ListedRows, rendered
from hypothesis import given
from hypothesis import strategies as st

from epochsink.elasticsearch import deduplicate
from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyarrow import RecordBatch

ALL = 100
"""More rows than any epoch here has."""


@pytest.fixture(scope="module", params=[1, 3, deduplicate.ROWS_IN_MEMORY], ids=lambda rows: f"{rows} rows in memory")
def patched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let epochs of a few rows be spread over files, or kept in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplicate, "ROWS_IN_MEMORY", request.param)
        patch.setattr(deduplicate, "_ROWS_GATHERED", 2)
        yield


pytestmark = pytest.mark.usefixtures("patched")


def rows_of(*tasks: list[str], ranks: list[list[int | None]] | None = None) -> ListedRows:
    """Return tasks with two rows in a record batch."""
    made: dict[str, list[RecordBatch]] = {}
    for partition, ids in enumerate(tasks):
        whole = rendered([(each, {}) for each in ids], ranks[partition] if ranks else None)
        made[f"task{partition}"] = [whole.slice(start, 2) for start in range(0, len(ids), 2)]
    return ListedRows(made)


def test_count_tells_rows_and_replaced_rows() -> None:
    rows = rows_of(["a", "b", "a"], ["c"])
    assert deduplicate.count(rows, rows.tasks(), ALL) == (4, 1)


def test_ids_that_are_all_different_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate, "RowsById", None)
    rows = rows_of(["a", "b", "c"], ["d"])
    assert deduplicate.count(rows, rows.tasks(), ALL) == (4, 0)
    assert deduplicate.count(rows_of(), [], ALL) == (0, 0)


def test_ids_of_one_hash_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate, "hash", lambda _: 7, raising=False)
    rows = rows_of(["a", "b", "c"], ["d"])
    assert deduplicate.count(rows, rows.tasks(), ALL) == (4, 0)


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from([0, ALL]),
)
def test_rows_are_counted_alike_with_and_without_hashes(given_tasks: list[list[str]], most: int) -> None:
    together = [each for task in given_tasks for each in set(task)]
    rows = rows_of(*given_tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplicate, "MOST_HASHED", most)
        if len(set(together)) < len(together):
            with pytest.raises(RowsRejected):
                deduplicate.count(rows, rows.tasks(), ALL)
        else:
            total = sum(map(len, given_tasks))
            assert deduplicate.count(rows, rows.tasks(), ALL) == (total, total - len(together))


def test_within_a_task_the_later_row_survives() -> None:
    rows = rows_of(["a", "b", "a"], ["c"])
    assert deduplicate.survivors(rows, rows.tasks(), ALL).tolist() == [False, True, True, True]


def test_across_tasks_without_an_order_is_refused_and_named() -> None:
    rows = rows_of(["a", "b"], ["c", "a"])
    with pytest.raises(RowsRejected, match=r"^1 document\(s\)(.|\n)*order_by=") as caught:
        deduplicate.count(rows, rows.tasks(), ALL)
    assert '{"_id":"a"}' in str(caught.value)


def test_highest_rank_survives_across_tasks_and_null_is_lowest() -> None:
    rows = rows_of(["a", "b", "a"], ["a", "b"], ranks=[[5, None, 9], [7, 0]])
    assert deduplicate.survivors(rows, rows.tasks(), ALL).tolist() == [False, False, True, False, True]


def test_among_equal_ranks_the_later_row_survives() -> None:
    rows = rows_of(["a"], ["a"], ranks=[[1], [1]])
    assert deduplicate.survivors(rows, rows.tasks(), ALL).tolist() == [False, True]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, 3)), min_size=1, max_size=40))
def test_survivors_are_what_a_plain_loop_keeps(given_rows: list[tuple[str, int | None]]) -> None:
    rows = rows_of([name for name, _ in given_rows], ranks=[[rank for _, rank in given_rows]])
    best: dict[str, tuple[int, int]] = {}
    for number, (name, rank) in enumerate(given_rows):
        best[name] = max(best.get(name, (-2, -1)), (-1 if rank is None else rank, number))
    kept = {number for _, number in best.values()}
    found = deduplicate.survivors(rows, rows.tasks(), ALL)
    assert {number for number, survives in enumerate(found) if survives} == kept
    assert deduplicate.count(rows, rows.tasks(), ALL) == (len(given_rows), len(given_rows) - len(kept))


def test_many_rows_of_one_id_are_counted_and_the_last_one_survives() -> None:
    rows = rows_of(["a"] * 20 + ["b"], ["c"])
    assert deduplicate.count(rows, rows.tasks(), ALL) == (22, 19)
    assert deduplicate.survivors(rows, rows.tasks(), ALL).nonzero()[0].tolist() == [19, 20, 21]


def test_many_rows_of_one_id_in_two_tasks_are_refused() -> None:
    rows = rows_of(["a"] * 20, ["b", "a"] * 10)
    with pytest.raises(RowsRejected, match="several tasks"):
        deduplicate.count(rows, rows.tasks(), ALL)
