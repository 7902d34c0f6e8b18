"""Run services as plain processes, with one life cycle for all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from epochsink.errors import ServiceError
from epochsink_devkit.services.accounts import Account
from epochsink_devkit.services.ports import free_port, is_free
from epochsink_devkit.services.process import Launch, SupervisedProcess
from epochsink_devkit.services.service import Service

_POLL_SECONDS = 0.05
# The caller's environment without variables that would override a server's settings file.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


class LocalService(Service):
    """A service run as plain processes under a supervisor, which ends them if this process dies.

    `settings` override the defaults. Every start reads them again, so they can change between a stop and a start;
    "{port}" in a value is replaced by the port. `home` is a folder for data, configuration and log that is kept.
    Without it, a temporary folder is created; close(), the end of the interpreter or the death of this process removes
    it. `startup_timeout` and `stop_timeout` are in seconds.
    """

    def __init__(
        self,
        settings: Mapping[str, str | int | bool] | None = None,
        *,
        home: Path | None = None,
        port: int | None = None,
        startup_timeout: float = 120,
        stop_timeout: float = 60,
    ) -> None:
        self.settings = dict(settings or {})
        self.startup_timeout = startup_timeout
        self.stop_timeout = stop_timeout
        self._named_home = home
        self._named_port = port
        self._port = port
        self._home: Path | None = None
        self._process: SupervisedProcess | None = None
        self._removal: weakref.finalize[[Path, bool], LocalService] | None = None
        self._log_start = 0

    # Implemented by each kind of service

    @abstractmethod
    def _prepare(self) -> None:
        """Initialise the data in the home folder. Called once per home folder."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Write the configuration and return the command. Called at every start."""

    def _after_spawn(self, deadline: float) -> None:
        """Do what must happen after the process started and before it can become ready."""

    def _account(self) -> Account | None:
        """Return the account that the server runs as, or None for the caller's."""
        return None

    _stop_signal = signal.SIGTERM

    # Life cycle

    def start(self) -> Self:
        if self.running:
            return self
        self._set_up_home()
        self._choose_port()
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        launch = self._launch()
        deadline = time.monotonic() + self.startup_timeout
        self._process = SupervisedProcess(launch)
        try:
            self._after_spawn(deadline)
            self._wait_until_ready(deadline, _POLL_SECONDS)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        if (process := self._process) is None:
            return
        self.resume()  # a frozen process would not get the signal
        process.send(self._stop_signal)
        try:
            process.wait(self.stop_timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(
                f"{self.name} did not stop within {self.stop_timeout:.0f} s and was killed; its data is kept\n"
                f"{self._tail()}"
            ) from None
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def pause(self) -> None:
        self._living().send_to_all(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_to_all(signal.SIGCONT)

    def close(self) -> None:
        try:
            if self._removal is not None:
                self.kill()  # not stop(): the data is deleted anyway
            self.stop()
        finally:
            if self._removal is not None:
                self._removal()
                self._removal = self._home = None
                self._port = self._named_port

    # Facts

    @property
    def home(self) -> Path:
        """The folder with data, configuration and log. Raises `ServiceError` before the first start."""
        if self._home is None:
            raise ServiceError(f"{self.name} has no folder before its first start")
        return self._home

    @property
    def data(self) -> Path:
        """The folder with the server's data files."""
        return self.home / "data"

    @property
    def port(self) -> int:
        if self._port is None:
            raise ServiceError(f"{self.name} has no port before its first start")
        return self._port

    @property
    def pid(self) -> int:
        return self._living().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def log_path(self) -> Path:
        return self.home / f"{self.name}.log"

    # Steps

    def _living(self) -> SupervisedProcess:
        if self._process is None or not self._process.running:
            raise ServiceError(f"{self.name} is not running")
        return self._process

    def _set_up_home(self) -> None:
        if self._home is None:
            if self._named_home is None:
                self._home = Path(tempfile.mkdtemp(prefix=f"epochsink-{self.name}-"))
                self._removal = weakref.finalize(self, shutil.rmtree, self._home, True)  # noqa: FBT003
            else:
                self._home = self._named_home.absolute()
                self._home.mkdir(parents=True, exist_ok=True)
            self._home.chmod(0o711)  # the server's account must reach its data below
        if not (prepared := self.home / ".prepared").exists():
            shutil.rmtree(self.data, ignore_errors=True)  # an earlier initialisation was interrupted
            self._prepare()
            prepared.touch()

    def _choose_port(self) -> None:
        if self._port is None:
            self._port = free_port()
        elif not is_free(self._port):
            raise ServiceError(f"{self.name} cannot start: port {self._port} is taken by another process")

    def _launch(self) -> Launch:
        account = self._account()
        return Launch(
            command=self._command(),
            log=self.log_path,
            cwd=self.home,
            env=self._environment(),
            uid=account.uid if account else None,
            gid=account.gid if account else None,
            remove=self.home if self._removal else None,
        )

    def _environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}

    def _check_alive(self) -> None:
        if self._process is None or not self._process.running:
            status = self._process.returncode if self._process else None
            raise ServiceError(
                f"{self.name} ended with status {status} while starting; the end of its log:\n{self._tail()}"
            )

    def _log_of_this_start(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _with_port(self, value: str | int | bool) -> str:  # noqa: FBT001 - a setting's value
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return text.replace("{port}", str(self.port))
