"""The sink of examples/mariadb_sink.py on a real MariaDB server: the contract of every sink, and kills at random."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pymysql
import pytest

from epochsink.testing import SinkContract, SinkRig
from mariadb_sink import MariaDB, Xid

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = 12
ROWS = 100
KILLS = 4
STARTS_SECONDS = 60.0
RUN_SECONDS = 240.0


class Server:
    """A MariaDB server on a free port of the loopback, with a database ``test``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"mysql://root@127.0.0.1:{self._port}/test"
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={folder}/data",
            "--auth-root-authentication-method=normal",
        ]
        command = [*install, *self._user]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=STARTS_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def _user(self) -> list[str]:
        # a server that root starts refuses to run as root unless told so
        return ["--user=root"] if os.geteuid() == 0 else []

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [shutil.which("mariadbd") or "/usr/sbin/mariadbd", "--no-defaults", f"--datadir={self._folder}/data"]
        command += [f"--socket={self._folder}/socket", f"--port={self._port}", "--bind-address=127.0.0.1", *self._user]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + STARTS_SECONDS
        while True:
            try:
                self.ask("SELECT 1")
            except pymysql.Error:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def ask(self, statement: str) -> Any:
        """Return what the server answers."""
        with closing(MariaDB(url=self.url, table="").connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def prepared(self) -> list[Xid]:
        """Return the prepared transactions."""
        found = (Xid.parse(length, data) for _, length, _, data in self.ask("XA RECOVER"))
        return [xid for xid in found if xid is not None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of this module."""
    made = Server(tmp_path_factory.mktemp("mariadb"))
    made.start()
    yield made
    made.kill()


class MariaDBRig(SinkRig):
    """A table of numbers."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._table = server, f"t_{uuid.uuid4().hex}"
        server.ask(f"CREATE TABLE {self._table} (id bigint) ENGINE=InnoDB")
        super().__init__(MariaDB(url=server.url, table=self._table), folder)

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"id": rows})

    def visible(self) -> list[int]:
        statement = f"SELECT id FROM {self._table} ORDER BY id"  # noqa: S608
        return [number for (number,) in self._server.ask(statement)]

    def lose_prepared(self) -> None:
        for xid in self._server.prepared():
            self._server.ask(f"XA ROLLBACK {xid}")

    def leftovers(self) -> list[str]:
        return list(map(str, self._server.prepared()))


class TestMariaDB(SinkContract):
    @pytest.fixture
    def rig(self, server: Server, tmp_path: Path) -> Iterator[MariaDBRig]:
        made = MariaDBRig(server, tmp_path / "spool")
        yield made
        made.lose_prepared()
        made.close()


@pytest.mark.timeout(900)
def test_a_pipeline_is_exactly_once_while_driver_and_server_are_killed_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("EPOCHSINK_SEED") or random.randrange(2**32))
    print(f"EPOCHSINK_SEED={seed}")  # noqa: T201 - to run it again
    chance, server = random.Random(seed), Server(tmp_path)
    server.start()
    try:
        server.ask("CREATE TABLE numbers (id bigint, name text) ENGINE=InnoDB")
        source, fed = tmp_path / "source", 0
        source.mkdir()
        # the last run is not struck
        for victim in [*(chance.choice(["driver", "server"]) for _ in range(KILLS)), ""]:
            for number in range(fed, fed + FILES):
                rows = [{"id": number * ROWS + row, "name": f"n{row}"} for row in range(ROWS)]
                (source / f"{number:03d}.json").write_text("\n".join(map(json.dumps, rows)))
            fed += FILES
            with Run(server.url, source, tmp_path / "checkpoint") as run:
                if victim:
                    run.reaches_epoch_after(chance.uniform(0, 1.5), server)
                if victim == "driver":
                    run.kill()
                if victim == "server":
                    server.kill()
                    server.start()
                ends_well = run.ends_well()
        assert ends_well
        assert [number for (number,) in server.ask("SELECT id FROM numbers ORDER BY id")] == list(range(fed * ROWS))
        assert server.prepared() == []
    finally:
        server.kill()


class Run:
    """One run of the pipeline, in a process of its own."""

    def __init__(self, url: str, source: Path, checkpoint: Path) -> None:
        program = Path(__file__).with_name("mariadb_pipeline.py")
        examples = Path(__file__).parents[3] / "examples"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(examples), os.environ.get("PYTHONPATH", "")])}
        environment["PYSPARK_PYTHON"] = sys.executable
        self._log = checkpoint.with_name("pipeline.log")
        with self._log.open("ab") as log:
            command = [sys.executable, str(program), url, str(source), str(checkpoint)]
            # a session of its own: the JVM and the workers are ended with it
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self._commits = checkpoint / "commits"
        self._before = self._decided()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _decided(self) -> int:
        return len(list(self._commits.glob("[0-9]*")))

    def reaches_epoch_after(self, pause: float, server: Server) -> None:
        """Wait until the run has decided an epoch or prepared one, and then for a while."""
        deadline = time.monotonic() + RUN_SECONDS
        while self._decided() == self._before and not server.prepared():
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, self._log.read_text()[-4000:]
            time.sleep(0.02)
        time.sleep(pause)

    def kill(self) -> None:
        """Kill the driver, its JVM and its workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ends_well(self) -> bool:
        """Wait for the end; return whether all files were read."""
        return self._process.wait(RUN_SECONDS) == 0
