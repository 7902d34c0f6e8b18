"""Record what `services up` has started, for `status` and `down`: in a group for each folder, or each name."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Self

import platformdirs
import psutil

from epochsink.errors import ServiceError
from epochsink_devkit.services.ports import answers

_TITLE: Final = "title"


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
class RunningServices:
    """What one `up` has started, and the process that owns it. The services end when it ends."""

    owner: ProcessId
    services: tuple[ServiceRecord, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the state that `text` says. Raises `ValueError`, `KeyError` or `TypeError` if it is not one."""
        content = json.loads(text)
        services = tuple(
            ServiceRecord(**{**record, "process": ProcessId(**record["process"]) if record["process"] else None})
            for record in content["services"]
        )
        return cls(ProcessId(**content["owner"]), services)


@dataclass(frozen=True)
class Group:
    """The services that belong together: those that were started in one folder, or by one ``--name``.

    ``title`` is the folder's path or the name; by its path a folder's group is reached from elsewhere, too.
    """

    title: str
    folder: Path

    @classmethod
    def of(cls, name: str | None = None) -> Self:
        """Return the group of a name, without one that of the current folder. Its state is for this user only."""
        title = name or str(Path.cwd())
        folder = _states() / hashlib.sha256(title.encode()).hexdigest()[:16]
        # addresses hold passwords
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _TITLE).write_text(title)
        return cls(title, folder)

    def others(self) -> list[Group]:
        """Return this user's other groups of which services are up."""
        titles = sorted(file.read_text() for file in _states().glob(f"*/{_TITLE}"))
        groups = [Group.of(title) for title in titles if title != self.title]
        return [group for group in groups if group.states()]

    @contextlib.contextmanager
    def claimed(self, kinds: Sequence[str]) -> Iterator[None]:
        """Own the services of these kinds until the end of the block.

        Raises `ServiceError` if another process of the group owns one, even if it has not written its state yet.
        """
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                lock = stack.enter_context((self.folder / f"{kind}.lock").open("a+"))
                if not _locked(lock):
                    raise ServiceError(
                        f"{kind} is up already, or being started, by process {_claimant(lock)}",
                        hint="epochsink services status",
                    )
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
            # says that this process lives, even if its state cannot be read
            lock = stack.enter_context(self._alive(os.getpid()).open("a+"))
            _locked(lock)
            stack.callback(self._forget, os.getpid())
            yield

    def states(self) -> list[RunningServices]:
        """Return what the group's owners have started, the oldest first; one that has ended has started nothing.

        If a file cannot be read, for example after a full disk, only the owner is known, and only while it runs.
        """
        states = []
        for file in self.folder.glob("*.json"):
            try:
                state = RunningServices.of(file.read_text())
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                if not self._is_alive(int(file.stem)):
                    continue
                state = RunningServices(ProcessId.of(int(file.stem)), ())
            if state.owner.process():
                states.append(state)
        return sorted(states, key=lambda state: state.owner.started)

    def save(self, state: RunningServices) -> None:
        """Replace an owner's state in one step."""
        draft = self.folder / f"{state.owner.pid}.draft"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(state), indent=2))
        draft.replace(self.folder / f"{state.owner.pid}.json")

    def forget_ended(self) -> None:
        """Forget the owners that have ended."""
        running = {state.owner.pid for state in self.states()}
        for file in self.folder.glob("*.json"):
            if int(file.stem) not in running:
                self._forget(int(file.stem))

    def _forget(self, pid: int) -> None:
        for file in (self.folder / f"{pid}.json", self._alive(pid)):
            file.unlink(missing_ok=True)

    def _alive(self, pid: int) -> Path:
        return self.folder / f"{pid}.alive"

    def _is_alive(self, pid: int) -> bool:
        try:
            with self._alive(pid).open("a+") as lock:
                return not _locked(lock, seconds=0)
        except FileNotFoundError:
            return False


def _states() -> Path:
    return Path(platformdirs.user_state_dir("epochsink")) / "services"


def _locked(lock: IO[str], seconds: float = 1) -> bool:
    """Lock a file, and return whether that was possible in time: another process may just be looking."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _claimant(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "0"
