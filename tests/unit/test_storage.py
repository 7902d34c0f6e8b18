"""Where the ledger's and the spool's files can lie, and those on a local file system."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from epochsink.errors import ConfigurationError
from epochsink.protocol.object_storage import ObjectStorage
from epochsink.protocol.spool import open_spool
from epochsink.protocol.storage import LocalStorage, is_object_store
from epochsink.protocol.webhdfs import WebHdfs


@pytest.fixture
def files(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, object]]:
    """Return what reaches the disk, in its order: each inode with its content then.

    Of a file that is its size and how many names it has, of a folder the names in it.
    """
    found: list[tuple[int, object]] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        now = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(now.st_mode)
        found.append((now.st_ino, set(os.listdir(descriptor)) if is_folder else (now.st_size, now.st_nlink)))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return found


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_an_entry_is_on_the_disk_before_its_name_and_both_before_it_counts_as_made(
    files: LocalStorage, synced: list[tuple[int, object]]
) -> None:
    files.create("a/b/0", b"data")
    folder = files.root / "a" / "b"
    above = [(inode(path), {name}) for path, name in ((folder.parent.parent, "a"), (folder.parent, "b"))]
    assert above == synced[1:3], "the folders that it has made"
    content, names = synced[3:]
    assert content == (inode(folder / "0"), (4, 1)), "under its temporary name alone"
    assert names[0] == inode(folder)
    assert "0" in names[1]  # type: ignore[operator] # a folder's names
    synced.clear()
    files.create("a/b/1", b"more data")
    assert [place for place, _ in synced] == [inode(folder / "1"), inode(folder)]


def test_a_spooled_file_is_on_the_disk_with_its_folders_when_it_is_closed(
    files: LocalStorage, synced: list[tuple[int, object]]
) -> None:
    """A vote follows, and the record: a power cut after it must leave the rows."""
    files.make_folder("query/attempt")
    attempt = files.root / "query" / "attempt"
    assert (inode(files.root), {"query"}) in synced
    synced.clear()
    output = files.write("query/attempt/rows")
    output.write(b"a" * 1000)
    output.write(b"b" * 1000)
    assert synced == []
    output.close()
    assert synced == [
        (inode(attempt / "rows"), (2000, 1)),
        (inode(attempt), {"rows"}),
        (inode(attempt.parent), {"attempt"}),
    ]


def test_what_is_made_is_read(files: LocalStorage) -> None:
    assert files.create("a/b/0", b"data")
    assert files.read("a/b/0") == b"data"
    assert files.names("a/b") == ["0"]


def test_what_is_not_there(files: LocalStorage) -> None:
    assert files.read("a/0") is None
    assert files.names("a") == []
    files.remove_many(["a/0"])


def test_a_name_is_given_once(files: LocalStorage) -> None:
    assert files.create("a/0", b"first")
    assert not files.create("a/0", b"second")
    assert files.read("a/0") == b"first"
    files.remove_many(["a/0"])
    assert files.create("a/0", b"third")


def test_of_many_at_once_one_succeeds(files: LocalStorage) -> None:
    made: list[bytes] = []
    start = threading.Barrier(8)

    def create(data: bytes) -> None:
        start.wait(10)
        if files.create("a/0", data):
            made.append(data)

    threads = [threading.Thread(target=create, args=(b"%d" % i * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert files.read("a/0") == made[0]
    assert files.names("a") == ["0"]


def test_nobody_else_may_read(files: LocalStorage) -> None:
    old = os.umask(0)
    try:
        files.create("a/b/0", b"data")
    finally:
        os.umask(old)
    assert stat.S_IMODE((files.root / "a/b/0").stat().st_mode) == 0o600
    assert stat.S_IMODE((files.root / "a/b").stat().st_mode) == 0o700


def test_a_failure_leaves_nothing_half_made(files: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    files.create("a/0", b"data")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.create("a/1", b"data")
    assert files.names("a") == ["0"]


def test_what_root_makes_belongs_to_the_owner_of_its_folder(
    files: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that root types must leave no entry that the query's own user cannot read."""
    given: list[tuple[int, int, int]] = []

    def note(made: Path | int, user: int, group: int) -> None:
        given.append((inode(made) if isinstance(made, Path) else os.fstat(made).st_ino, user, group))

    for call in ("fchown", "lchown"):
        monkeypatch.setattr(os, call, note)
    for user in (1000, 0):
        given.clear()
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        files.create(f"a/{user}", b"data")
        files.make_folder(f"b/{user}")
    folder = files.root.stat()
    made = [files.root / name for name in ("a/0", "b/0")]
    assert given == [(inode(path), folder.st_uid, folder.st_gid) for path in made]


@pytest.mark.parametrize(("use", "place"), [("read", "a/0"), ("names", "a")])
def test_a_file_of_another_user_is_named_with_its_owner_and_the_way_out(
    files: LocalStorage, monkeypatch: pytest.MonkeyPatch, use: str, place: str
) -> None:
    def refuse(*_paths: object) -> None:
        raise PermissionError(13, "Permission denied")

    files.create("a/0", b"data")
    for call in ("read_bytes", "iterdir"):
        monkeypatch.setattr(Path, call, refuse)
    owner = files.root.stat().st_uid
    with pytest.raises(ConfigurationError, match=f"{files.root}/{place} may not be used .* to user id {owner}") as told:
        getattr(files, use)(place)
    assert f"chown -R {os.geteuid()} {files.root}/a" in told.value.hint


def test_a_file_system_without_hard_links_is_named(files: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigurationError, match="hard links"):
        files.create("a/0", b"data")


def test_local_files_are_written_read_and_removed(tmp_path: Path) -> None:
    files = open_spool(str(tmp_path / "spool"), "{}")
    assert files.names("") == []
    files.make_folder("epoch")
    assert (tmp_path / "spool" / "epoch").stat().st_mode & 0o777 == 0o700
    output = files.write("epoch/rows")
    output.write(b"abc")
    output.close()
    assert files.open("epoch/rows").read() == b"abc"
    assert (files.names(""), files.size("epoch")) == (["epoch"], 3)
    files.remove_folder("epoch")
    files.remove_folder("epoch")
    assert files.size("epoch") == 0


@pytest.mark.parametrize(
    ("place", "kind", "options"),
    [
        ("file:///data/a%20b", LocalStorage, "{}"),
        ("s3a://lake/spool", ObjectStorage, '{"region": "eu-west-1", "access_key_id": "a", "secret_access_key": "b"}'),
        ("hdfs://lake/spool", WebHdfs, '{"addresses": ["http://lake:9870"], "user": "etl"}'),
    ],
)
def test_each_place_has_its_client(place: str, kind: type, options: str) -> None:
    assert isinstance(open_spool(place, options), kind)


def test_a_path_is_what_a_uri_means() -> None:
    files = open_spool("file:///data/a%20b", "{}")
    assert isinstance(files, LocalStorage)
    assert str(files.root) == "/data/a b"


def test_a_place_without_a_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no client for ftp://"):
        open_spool("ftp://host/spool", "{}")


def test_object_stores_are_known_by_their_scheme() -> None:
    assert [is_object_store(place) for place in ("s3://b/x", "gs://b/x", "abfss://c@a/x", "hdfs://n/x", "/x")] == [
        *(True, True, True, False, False)
    ]
