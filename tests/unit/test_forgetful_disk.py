"""The disk of the request faults forgets exactly what was not synced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from epochsink.protocol.storage import sync_path
from request_faults.disk import Disk

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder whose syncs are noted in this process."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, getattr(os, name))
    made = tmp_path / "tree"
    made.mkdir()
    Disk(made, tmp_path / "notes", frozenset()).watch()
    return made


def forget(tree: Path) -> dict[str, bytes]:
    Disk(tree, tree.parent / "notes", frozenset()).forget()
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_a_synced_file_with_a_synced_name_stays(tree: Path) -> None:
    (tree / "a").write_bytes(b"1")
    sync_path(tree / "a")
    sync_path(tree)
    assert forget(tree) == {"a": b"1"}


def test_a_file_without_a_synced_name_is_gone(tree: Path) -> None:
    (tree / "a").write_bytes(b"1")
    sync_path(tree / "a")
    assert forget(tree) == {}


def test_a_name_without_a_synced_file_is_empty(tree: Path) -> None:
    (tree / "a").write_bytes(b"1")
    sync_path(tree)
    assert forget(tree) == {"a": b""}


def test_what_was_written_after_the_sync_is_gone(tree: Path) -> None:
    (tree / "a").write_bytes(b"1")
    sync_path(tree / "a")
    sync_path(tree)
    (tree / "a").write_bytes(b"12")
    assert forget(tree) == {"a": b"1"}


def test_a_removal_that_was_not_synced_is_undone(tree: Path) -> None:
    (tree / "a").write_bytes(b"1")
    sync_path(tree / "a")
    sync_path(tree)
    (tree / "a").unlink()
    (tree / "b").write_bytes(b"2")
    assert forget(tree) == {"a": b"1"}


def test_a_folder_is_as_durable_as_its_name(tree: Path) -> None:
    for name in ("kept", "lost"):
        (tree / name).mkdir()
        if name == "kept":
            sync_path(tree)
        (tree / name / "a").write_bytes(b"1")
        sync_path(tree / name / "a")
        sync_path(tree / name)
    assert forget(tree) == {"kept/a": b"1"}


def test_the_second_name_of_a_synced_file_is_no_more_durable_than_its_folder(tree: Path) -> None:
    """As the ledger writes an entry: a temporary name, a sync, a link, and the folder's sync last."""
    (tree / ".a.tmp").write_bytes(b"1")
    sync_path(tree / ".a.tmp")
    (tree / "a").hardlink_to(tree / ".a.tmp")
    (tree / ".a.tmp").unlink()
    assert forget(tree) == {}
