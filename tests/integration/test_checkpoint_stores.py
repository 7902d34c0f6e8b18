"""Checkpoints where users have them: HDFS and an S3 API, ledger and spool beside Spark's own files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import folder_pipeline
import numpy as np
import pyarrow as pa
import pytest
from streams import Stream, raising_after
from waiting import wait_until

from epochsink.cli.checkpoint_folder import open_place
from epochsink.errors import ConfigurationError, SpoolDamaged
from epochsink.protocol import failed_start, webhdfs
from epochsink.protocol.object_storage import ObjectStorage, open_store
from epochsink.protocol.spool import Spool
from epochsink.protocol.webhdfs import WebHdfs
from epochsink.sink import Epoch, Identity, Task
from epochsink.spark.classic.hadoop_storage import open_checkpoint

if TYPE_CHECKING:
    import http.client
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from epochsink.sink import SpoolFile
    from epochsink_devkit.services import LocalHdfs, LocalS3

QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"
EPOCH = Epoch(3, "a" * 32)
SINK = Identity(QUERY, "table", 1)
TASK = "1" * 32


def rows(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": list(ids)})


@pytest.fixture
def s3_url(s3: LocalS3) -> str:
    """Return a folder of the test's own, whose name has what URLs quote."""
    del s3
    return f"s3a://lake/orders é {uuid.uuid4().hex}"


@pytest.fixture
def s3_options(s3: LocalS3) -> str:
    return json.dumps(
        {"endpoint": s3.endpoint, "region": "us-east-1", "access_key_id": "anyone", "secret_access_key": "anything"}
    )


@pytest.fixture
def hdfs_url(hdfs: LocalHdfs) -> str:
    return f"{hdfs.url}/orders é {uuid.uuid4().hex}"


@pytest.fixture
def hdfs_options(hdfs: LocalHdfs) -> str:
    return json.dumps({"addresses": [f"http://127.0.0.1:{hdfs.web_port}"], "user": "root"})


@pytest.fixture(params=["s3", "hdfs"])
def spool(request: pytest.FixtureRequest) -> Spool:
    url: str = request.getfixturevalue(f"{request.param}_url")
    options: str = request.getfixturevalue(f"{request.param}_options")
    return Spool.beside(url, options)


def test_of_many_creates_of_one_name_one_wins(s3_url: str, s3_options: str) -> None:
    files = ObjectStorage(open_store(s3_url, s3_options))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: files.create("ledger/1", b"%d" % i), range(16)))
    assert made.count(True) == 1
    assert files.read("ledger/1") == b"%d" % made.index(True)


def test_a_spool_keeps_rows_and_drops_them(spool: Spool) -> None:
    spool.check()
    spool.make(QUERY, EPOCH)
    writer = spool.writer(Task(SINK, EPOCH, 0, TASK), rows(1).schema)
    batches = [rows(*range(first, first + 100_000)) for first in (0, 100_000, 200_000)]
    for batch in batches:
        writer.write(batch)
    files = {TASK: writer.close()}
    spooled = spool.rows(SINK, EPOCH, [TASK], files)
    spooled.verify()
    assert list(spooled.read(TASK)) == batches
    assert spool.attempts(QUERY) == [EPOCH]
    assert spool.size(QUERY, EPOCH) == files[TASK].size
    spool.drop(QUERY, EPOCH)
    spool.drop(QUERY, EPOCH)
    assert spool.attempts(QUERY) == []
    assert spool.size(QUERY, EPOCH) == 0


def test_a_file_that_another_has_written_over_is_refused(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    recorded: dict[str, SpoolFile] = {}
    for ids in ((1, 2), (1, 3)):
        spool.drop(QUERY, EPOCH)
        spool.make(QUERY, EPOCH)
        writer = spool.writer(Task(SINK, EPOCH, 0, TASK), rows(1).schema)
        writer.write(rows(*ids))
        recorded.setdefault(TASK, writer.close())
    with pytest.raises(SpoolDamaged, match="was cut or changed"):
        next(spool.rows(SINK, EPOCH, [TASK], recorded).read(TASK))


def test_the_record_of_a_retained_epoch_is_replaced(spool: Spool) -> None:
    """A driver that dies before "done" leaves one, and a repair records what it has prepared again."""
    for record in (b"first", b"second", b""):
        spool.note_retained(QUERY, "of an epoch", record)
    assert list(spool.read_retained(QUERY, "of an epoch")) == [b"", b"second", b"first"]
    assert spool.retained(QUERY) == ["of an epoch"]
    spool.forget_retained(QUERY)
    assert list(spool.read_retained(QUERY, "of an epoch")) == []


def test_a_late_task_on_hdfs_is_refused(hdfs_url: str, hdfs_options: str) -> None:
    spool = Spool.beside(hdfs_url, hdfs_options)
    spool.make(QUERY, EPOCH)
    spool.drop(QUERY, EPOCH)
    writer = spool.writer(Task(SINK, EPOCH, 0, TASK), rows(1).schema)
    writer.write(rows(1))
    with pytest.raises(OSError, match=r"Parent directory|File does not exist"):
        writer.close()


def test_the_standby_is_passed_over(hdfs: LocalHdfs) -> None:
    """An address where nobody answers stands for a NameNode that is down."""
    files = WebHdfs(["http://127.0.0.1:1", f"http://127.0.0.1:{hdfs.web_port}"], "root")
    assert files.names("orders") == []
    with pytest.raises(ConnectionError):
        WebHdfs(["http://127.0.0.1:1"], "root").names("orders")


class Cutting:
    """A proxy before a DataNode that cuts the first connections within an answer."""

    def __init__(self, behind: tuple[str, int], cut_after: list[int]) -> None:
        self.cut_after = cut_after
        self._behind = behind
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                left = self.cut_after.pop(0) if self.cut_after else sys.maxsize
                with client, socket.create_connection(self._behind) as node:
                    node.sendall(client.recv(1 << 16))
                    while left > 0 and (data := node.recv(1 << 16)):
                        client.sendall(data[:left])
                        left -= len(data)

    def close(self) -> None:
        self._server.close()


def test_a_read_that_a_data_node_breaks_off_is_no_damage(
    hdfs: LocalHdfs, hdfs_url: str, hdfs_options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where it broke off; where it breaks off again and again, it is an error of the store."""
    spool = Spool.beside(hdfs_url, hdfs_options)
    spool.make(QUERY, EPOCH)
    writer = spool.writer(Task(SINK, EPOCH, 0, TASK), rows(1).schema)
    batch = pa.RecordBatch.from_pydict({"id": np.random.default_rng(7).integers(0, 1 << 62, 100_000)})
    writer.write(batch)
    spooled = spool.rows(SINK, EPOCH, [TASK], {TASK: writer.close()})
    proxies: list[Cutting] = []
    cuts = [300_000, 5_000, 200_000]
    connect = webhdfs._connection

    def through_the_proxy(url: str) -> http.client.HTTPConnection:
        node = urlparse(url)
        if node.port == hdfs.web_port:
            return connect(url)
        proxies.append(Cutting((str(node.hostname), int(node.port or 0)), cuts))
        return connect(node._replace(netloc=f"127.0.0.1:{proxies[-1].port}").geturl())

    monkeypatch.setattr(webhdfs, "_connection", through_the_proxy)
    try:
        assert list(spooled.read(TASK)) == [batch]
        assert cuts == []
        cuts += [300_000, *[0] * 20]
        with pytest.raises(ConnectionError):
            spooled.verify()
    finally:
        for proxy in proxies:
            proxy.close()


# ---- Spark


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    """Return a session with settings of its own."""
    return spark.newSession()


def test_an_s3_checkpoint_is_reached_by_the_sessions_hadoop_settings(
    session: SparkSession, s3: LocalS3, s3_url: str
) -> None:
    """Without Hadoop's S3 connector, which Spark needs for its own files."""
    for name, value in s3.spark_settings.items():
        session.conf.set(name.removeprefix("spark.hadoop."), value)
    opened = open_checkpoint(session, s3_url)
    assert opened.location == s3_url
    assert opened.files.create("ledger/1", b"x")
    opened.spool.check()
    assert opened.spool.attempts(QUERY) == []
    assert "anything" not in repr(opened.spool)


def test_storage_options_go_over_the_settings(session: SparkSession, s3: LocalS3, s3_url: str) -> None:
    session.conf.set("fs.s3a.endpoint", "http://127.0.0.1:1")
    session.conf.set("fs.s3a.access.key", "anyone")
    session.conf.set("fs.s3a.secret.key", "anything")
    opened = open_checkpoint(session, s3_url, {"endpoint": s3.endpoint})
    assert opened.files.read("metadata") is None


def test_a_bucket_that_is_not_there_is_named(session: SparkSession, s3: LocalS3) -> None:
    for name, value in s3.spark_settings.items():
        session.conf.set(name.removeprefix("spark.hadoop."), value)
    opened = open_checkpoint(session, "s3a://nowhere/orders")
    with pytest.raises(OSError, match="NoSuchBucket"):
        opened.files.create("metadata", b"{}")


@pytest.fixture
def on_hdfs(session: SparkSession, hdfs: LocalHdfs, hdfs_url: str, tmp_path: Path) -> Iterator[Stream]:
    for name, value in hdfs.spark_settings.items():
        session.conf.set(name.removeprefix("spark.hadoop."), value)
    made = Stream(session, tmp_path, hdfs_url)
    yield made
    made.end()


@pytest.mark.parametrize("store", ["s3", "hdfs"])
def test_the_note_of_a_failed_start_is_replaced_and_forgotten(
    store: str, on_hdfs: Stream, s3_url: str, s3_options: str
) -> None:
    url, options = {"hdfs": (on_hdfs.url, {}), "s3": (s3_url, json.loads(s3_options))}[store]
    files = open_checkpoint(on_hdfs.spark, url, options, None).files
    assert failed_start.newest(files) is None
    assert files.create("metadata", json.dumps({"id": QUERY}).encode())
    for number in range(3):
        failed_start.note(files, ConfigurationError(f"wrong {number}", hint="correct it"), "app")
    noted = failed_start.newest(files)
    assert noted is not None
    assert noted.failure == "ConfigurationError: wrong 2"
    assert len(files.names(failed_start.FOLDER)) == 1
    failed_start.forget(files)
    failed_start.forget(files)
    assert failed_start.newest(files) is None


def test_a_pipeline_with_its_checkpoint_on_hdfs_goes_on_where_it_failed(on_hdfs: Stream) -> None:
    """An epoch that was recorded and not decided stands; one that was decided and lost is replayed from the spool."""
    for first in (0, 10, 20):
        on_hdfs.put(range(first, first + 10))
    once = on_hdfs.exactly_once()
    with pytest.raises(Exception, match="Boom"):
        on_hdfs.by_hand(raising_after(once, 1)).awaitTermination()
    once.await_committed()
    assert on_hdfs.sink.values() == list(range(10))
    for path in (on_hdfs.folder / "sink" / "prepared").glob("*/*"):
        path.unlink()
    on_hdfs.run()
    assert on_hdfs.sink.values() == list(range(30))
    assert on_hdfs.sink.calls("replay") == ["1"]


def test_an_operator_names_the_pipelines_object_for_a_checkpoint_on_hdfs(on_hdfs: Stream, hdfs: LocalHdfs) -> None:
    """Its own checkpoint is compared with the one that was typed as Spark resolves it: here by its default store."""
    on_hdfs.put(range(10))
    on_hdfs.run()
    (on_hdfs.folder / "operators_pipeline.py").write_text(
        "from folder_sink import FolderSink\n"
        "from epochsink import ExactlyOnce\n"
        f"sinks = {{'folder': FolderSink({on_hdfs.sink.folder!r})}}\n"
        f"sink = ExactlyOnce(checkpoint={on_hdfs.url.removeprefix(hdfs.url)!r}, sinks=sinks)\n"
    )
    chosen = {**hdfs.spark_settings, "spark.hadoop.fs.defaultFS": hdfs.url, "spark.ui.enabled": "false"}
    settings = " ".join(f"--conf {name}={value}" for name, value in chosen.items())
    command = ["recover", on_hdfs.url, "--sinks", "operators_pipeline:sink", "--yes"]
    done = subprocess.run(
        [sys.executable, "-m", "epochsink.cli.app", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=on_hdfs.folder,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell"},
        timeout=240,
    )
    assert (done.returncode, "no recorded epoch is pending" in done.stdout) == (0, True), done.stderr


def test_a_session_that_was_active_before_the_command_goes_on(on_hdfs: Stream, hdfs: LocalHdfs) -> None:
    on_hdfs.put(range(10))
    on_hdfs.run()
    with open_place(on_hdfs.url, own=on_hdfs.url) as place:
        assert place.checkpoint.newest_decided() == 0
    with (
        pytest.raises(ConfigurationError, match=f"the sinks belong to checkpoint {hdfs.url}/other, and this is"),
        open_place(on_hdfs.url, own=f"{hdfs.url}/other"),
    ):
        pytest.fail("a place of other sinks was opened")
    on_hdfs.put(range(10, 20))
    on_hdfs.run()
    assert on_hdfs.sink.values() == list(range(20))


def test_hdfs_without_webhdfs_is_refused_in_a_sentence(on_hdfs: Stream) -> None:
    on_hdfs.spark.conf.set("dfs.namenode.http-address", "127.0.0.1:1")
    on_hdfs.put(range(10))
    with pytest.raises(ConfigurationError, match="executors use WebHDFS"):
        on_hdfs.run()


def test_a_pipeline_killed_with_its_checkpoint_on_hdfs_is_exactly_once(on_hdfs: Stream, hdfs: LocalHdfs) -> None:
    """Driver, JVM and workers die at once, in whatever they are doing then; another process goes on."""
    for first in range(0, 50, 10):
        on_hdfs.put(range(first, first + 10))
    killed = subprocess.Popen(
        [sys.executable, folder_pipeline.__file__, str(on_hdfs.folder), "never"],
        env={
            **os.environ,
            "CHECKPOINT": on_hdfs.url,
            "SPARK_SETTINGS": json.dumps(hdfs.spark_settings),
        },
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(on_hdfs.sink.values()) >= 20, "two epochs are visible", 180)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert len(on_hdfs.sink.values()) < 50
    on_hdfs.run()
    assert on_hdfs.sink.values() == list(range(50))
    assert on_hdfs.sink.prepared() == []
