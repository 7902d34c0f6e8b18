"""Where the spool's files can lie, and those on a local file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from epochsink.errors import ConfigurationError
from epochsink.protocol.object_storage import ObjectFiles
from epochsink.protocol.spool_files import LocalFiles, is_object_store, open_files
from epochsink.protocol.webhdfs import WebHdfs

if TYPE_CHECKING:
    from pathlib import Path


def test_local_files_are_written_read_and_removed(tmp_path: Path) -> None:
    files, root = open_files(str(tmp_path / "spool"), "{}")
    assert isinstance(files, LocalFiles)
    assert files.folders(root) == []
    files.make_folder(root, "epoch")
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    output = files.create(f"{root}/epoch/rows")
    output.write(b"abc")
    output.close()
    assert files.open(f"{root}/epoch/rows").read() == b"abc"
    assert (files.folders(root), files.size(f"{root}/epoch")) == (["epoch"], 3)
    files.remove_folder(f"{root}/epoch")
    files.remove_folder(f"{root}/epoch")
    assert files.size(f"{root}/epoch") == 0


@pytest.mark.parametrize(
    ("place", "kind", "options"),
    [
        ("file:///data/a%20b", LocalFiles, "{}"),
        ("s3a://lake/spool", ObjectFiles, '{"region": "eu-west-1", "access_key_id": "a", "secret_access_key": "b"}'),
        ("hdfs://lake/spool", WebHdfs, '{"addresses": ["http://lake:9870"], "user": "etl"}'),
    ],
)
def test_each_place_has_its_client(place: str, kind: type, options: str) -> None:
    files, _ = open_files(place, options)
    assert isinstance(files, kind)


def test_a_path_is_what_a_uri_means() -> None:
    assert open_files("file:///data/a%20b", "{}")[1] == "/data/a b"


def test_a_place_without_a_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no client for ftp://"):
        open_files("ftp://host/spool", "{}")


def test_object_stores_are_known_by_their_scheme() -> None:
    assert [is_object_store(place) for place in ("s3://b/x", "gs://b/x", "abfss://c@a/x", "hdfs://n/x", "/x")] == [
        *(True, True, True, False, False)
    ]
