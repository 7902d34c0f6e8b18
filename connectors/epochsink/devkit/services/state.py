"""Record what `services up` has started, for `status` and `down`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import platformdirs
import psutil

from epochsink.devkit.services.ports import answers
from epochsink.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = "services.lock"


@dataclass(frozen=True)
class ProcessId:
    """One process. Ids are reused, so its start time (seconds since 1970) is part of its identity."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this id now. Raises `psutil.NoSuchProcess` if there is none."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """Return the running process, or None if it has ended, even if another process has its id now."""
        try:
            process = psutil.Process(self.pid)
            alive = process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None


@dataclass(frozen=True)
class ServiceRecord:
    """One service; `process` is None for a container, whose process may live on another machine."""

    name: str
    version: str
    address: str
    port: int
    log: str
    process: ProcessId | None

    @property
    def ready(self) -> bool:
        """Whether the process runs and its port accepts connections."""
        return (self.process is None or self.process.process() is not None) and answers(self.port)


@dataclass(frozen=True)
class State:
    """The services, and the process that owns them. They end when it ends."""

    owner: ProcessId
    services: tuple[ServiceRecord, ...]

    @staticmethod
    def folder() -> Path:
        """Return the user's state folder. Created if missing, for this user only, because addresses hold passwords."""
        folder = Path(platformdirs.user_state_dir("epochsink"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @classmethod
    @contextlib.contextmanager
    def claimed(cls) -> Iterator[None]:
        """Own the services of this user until the end of the block.

        Raises `ServiceError` if another process owns them, even if it has not written its state yet.
        """
        with (cls.folder() / _LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServiceError(
                    f"services are up already, or being started, by process {_claimant(lock)}",
                    hint="epochsink services down",
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    @classmethod
    def load(cls) -> Self | None:
        """Return the last written state, or None if there is none or its owner has ended.

        If the file cannot be read, for example after a full disk, only the owner is known, and only while it runs.
        """
        try:
            state = cls._parsed((cls.folder() / "services.json").read_text())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return cls._of_claimant()
        return state if state.owner.process() else None

    @classmethod
    def _parsed(cls, text: str) -> Self:
        content = json.loads(text)
        services = tuple(
            ServiceRecord(**{**record, "process": ProcessId(**record["process"]) if record["process"] else None})
            for record in content["services"]
        )
        return cls(ProcessId(**content["owner"]), services)

    @classmethod
    def _of_claimant(cls) -> Self | None:
        with (cls.folder() / _LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return cls(ProcessId.of(int(_claimant(lock))), ())
        return None

    def save(self) -> None:
        """Replace the state in one step."""
        draft = self.folder() / f"services.json.{self.owner.pid}"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(self), indent=2))
        draft.replace(self.folder() / "services.json")

    @classmethod
    def remove(cls) -> None:
        """Forget the services."""
        (cls.folder() / "services.json").unlink(missing_ok=True)


def _claimant(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "0"
