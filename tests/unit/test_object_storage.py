"""Object stores: a name is given once, settings come from Hadoop's, and a store that overwrites is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from epochsink.errors import ConfigurationError
from epochsink.protocol import object_storage
from epochsink.protocol.object_storage import ObjectStorage, open_store
from epochsink.protocol.storage import LocalStorage, refuse_unconditional_create
from epochsink.spark import store_options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def files() -> ObjectStorage:
    return ObjectStorage(MemoryStore())


def test_a_name_is_given_once(files: ObjectStorage) -> None:
    assert files.create("ledger/1", b"first")
    assert not files.create("ledger/1", b"second")
    assert files.read("ledger/1") == b"first"


def test_a_create_whose_answer_was_lost_is_known_by_its_bytes(files: ObjectStorage) -> None:
    """The client sends a request again, and the store says that the name is taken."""
    assert files.create("ledger/1", b"mine")
    assert files.create("ledger/1", b"mine")


def test_what_is_not_there_is_no_error(files: ObjectStorage) -> None:
    assert files.read("ledger/1") is None
    assert files.names("ledger") == []
    files.remove_many(["ledger/1"])


def test_many_are_read_in_the_order_of_their_names(files: ObjectStorage) -> None:
    for number in range(40):
        files.create(f"ledger/{number}", b"%d" % number)
    names = [f"ledger/{number}" for number in (39, 7, 40, 0)]
    assert files.read_many(names) == [b"39", b"7", None, b"0"]


def test_names_are_those_of_one_folder(files: ObjectStorage) -> None:
    for name in ("commits/0", "commits/1", "commits/old/2", "commitsnot/3"):
        files.create(name, b"v1")
    assert sorted(files.names("commits")) == ["0", "1", "old"]
    files.remove_many(["commits/0"])
    assert files.names("commits") == ["1", "old"]


def test_a_large_object_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_AT_ONCE_BYTES", 100)
    files = ObjectStorage(MemoryStore())
    for size in (100, 101):
        output = files.write("rows")
        output.write(memoryview(bytes(size)))
        output.close()
        with files.open("rows") as source:
            assert [len(source.read(60)), len(source.read(60))] == [60, size - 60]


def test_an_object_that_was_never_closed_does_not_exist() -> None:
    files = ObjectStorage(MemoryStore())
    files.write("q/1/rows").write(b"half")
    assert files.names("q") == []


class Overwriting(LocalStorage):
    """A store that ignores the condition, as some that speak S3 do."""

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return True


class TellingLies(LocalStorage):
    """A store that says no after it has overwritten."""

    def create(self, name: str, data: bytes) -> bool:
        made = super().create(name, data)
        (self.root / name).write_bytes(data)
        return made


class WithTwoWinners(LocalStorage):
    """A store that says yes to both creates of a race and keeps the bytes of the first, and says no to later ones."""

    def create(self, name: str, data: bytes) -> bool:
        return super().create(name, b"one") or data != b"late"


@pytest.mark.parametrize("kind", [Overwriting, TellingLies, WithTwoWinners])
def test_a_store_that_overwrites_is_refused(kind: type[LocalStorage], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not create conditionally"):
        refuse_unconditional_create(kind(tmp_path), "s3a://lake/orders")


def test_a_store_that_creates_conditionally_is_taken(files: ObjectStorage, tmp_path: Path) -> None:
    refuse_unconditional_create(files, "memory")
    refuse_unconditional_create(LocalStorage(tmp_path), "here")
    assert files.names("epochsink") == []
    assert list((tmp_path / "epochsink").iterdir()) == []


def test_each_scheme_has_its_store() -> None:
    region = '{"region": "eu-west-1"}'
    assert isinstance(open_store("s3a://lake/a%20b", region), S3Store)
    assert isinstance(open_store("s3://lake", region), S3Store)
    azure = open_store("abfss://files@account.dfs.core.windows.net/a/b", '{"account_key": "a2V5"}')
    assert isinstance(azure, AzureStore)
    assert azure.config["account_name"] == "account"
    assert isinstance(open_store("gs://lake/a", '{"skip_signature": true}'), GCSStore)


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="no_such_setting"):
        open_store("s3a://lake/a", '{"no_such_setting": "1"}')


def test_s3_settings_are_hadoops_and_those_of_the_bucket_win() -> None:
    settings = {
        "fs.s3a.endpoint": "minio:9000",
        "fs.s3a.connection.ssl.enabled": "false",
        "fs.s3a.access.key": "everyone",
        "fs.s3a.bucket.lake.access.key": "lake's",
        "fs.s3a.secret.key": "secret",
    }
    found = store_options._s3("lake", settings.get)
    assert found["endpoint"] == "http://minio:9000"
    assert (found["access_key_id"], found["secret_access_key"]) == ("lake's", "secret")
    assert found["virtual_hosted_style_request"] is False
    assert store_options._s3("other", settings.get)["access_key_id"] == "everyone"


def test_without_s3_settings_the_client_looks_for_itself() -> None:
    nothing: dict[str, str] = {}
    assert not any(store_options._s3("lake", nothing.get).values())


def test_azure_settings_are_those_of_the_account() -> None:
    host = "account.dfs.core.windows.net"
    settings = {
        f"fs.azure.account.oauth2.client.endpoint.{host}": "https://login.microsoftonline.com/tenant-1/oauth2/token",
        f"fs.azure.account.oauth2.client.id.{host}": "app",
        "fs.azure.account.oauth2.client.secret": "for all",
    }
    found = store_options._azure(host, settings.get)
    assert (found["tenant_id"], found["client_id"], found["client_secret"]) == ("tenant-1", "app", "for all")


@pytest.mark.parametrize(
    ("authority", "settings", "addresses"),
    [
        ("nn:8020", {}, ["http://nn:9870"]),
        ("nn:8020", {"dfs.namenode.http-address": "0.0.0.0:50070"}, ["http://nn:50070"]),
        ("nn:8020", {"dfs.http.policy": "HTTPS_ONLY"}, ["https://nn:9871"]),
        (
            "cluster",
            {
                "dfs.ha.namenodes.cluster": "a,b",
                "dfs.namenode.http-address.cluster.a": "one:9870",
                "dfs.namenode.http-address.cluster.b": "two:9870",
            },
            ["http://one:9870", "http://two:9870"],
        ),
    ],
)
def test_name_nodes_are_found_in_the_settings(authority: str, settings: dict[str, str], addresses: list[str]) -> None:
    assert store_options._name_nodes(authority, settings.get) == addresses


def test_files_that_are_known_are_removed_without_asking_for_them(files: ObjectStorage) -> None:
    """One request in place of two; what a losing task has left beside them stays for a sweep, which asks."""
    for name in ("accepted", "loser"):
        files.create(f"spool/7/{name}", b"rows")
    files.remove_folder("spool/7", ["accepted", "gone already"])
    assert files.names("spool/7") == ["loser"]
    files.remove_folder("spool/7")
    assert files.names("spool/7") == []


def test_many_files_are_removed_whether_or_not_they_are_there(files: ObjectStorage) -> None:
    for name in ("ledger/1", "ledger/3"):
        files.create(name, b"x")
    files.remove_many(["ledger/1", "ledger/2", "ledger/3"])
    assert files.names("ledger") == []
