"""What `services up` has started, written down for `status` and `down`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import platformdirs
import psutil

from epochsink.devkit.services.ports import answers


@dataclass(frozen=True)
class ProcessId:
    """A process for sure: ids are used again, an id with its start time (seconds since 1970) is not."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this id now; psutil.NoSuchProcess if none has."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """Return the living process, None when it has ended, whoever has its id now."""
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
        """Whether the process lives and its port accepts connections."""
        return (self.process is None or self.process.process() is not None) and answers(self.port)


@dataclass(frozen=True)
class State:
    """The process that owns the services and ends them with itself, and the services."""

    owner: ProcessId
    services: tuple[ServiceRecord, ...]

    @staticmethod
    def folder() -> Path:
        """Return the user's state folder for this program; it exists."""
        folder = Path(platformdirs.user_state_dir("epochsink"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def load(cls) -> Self | None:
        """Return the state written last, None if none is there or its owner has ended."""
        try:
            text = json.loads((cls.folder() / "services.json").read_text())
        except FileNotFoundError:
            return None
        services = tuple(
            ServiceRecord(**{**record, "process": ProcessId(**record["process"]) if record["process"] else None})
            for record in text["services"]
        )
        state = cls(ProcessId(**text["owner"]), services)
        return state if state.owner.process() else None

    def save(self) -> None:
        """Write the state in one step, over an older one."""
        draft = self.folder() / f"services.json.{self.owner.pid}"
        draft.write_text(json.dumps(asdict(self), indent=2))
        draft.replace(self.folder() / "services.json")

    @classmethod
    def remove(cls) -> None:
        """Forget the services."""
        (cls.folder() / "services.json").unlink(missing_ok=True)
