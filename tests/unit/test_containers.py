"""A server in a container is stopped by signals where its engine cannot freeze it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from docker.errors import APIError  # type: ignore[import-not-found, import-untyped, unused-ignore]

from epochsink_devkit.services.containers import ContainerKafka


class Unfreezable:
    """A container of an engine whose freezer gives up; `told` is what it was asked for."""

    status = "running"

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        raise APIError("unable to freeze")

    def exec_run(self, command: list[str], user: str) -> None:
        self.told.append(f"{user}: {command[-1]}")

    def kill(self, signal: str = "KILL") -> None:
        self.told.append(signal)

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_named: self.told.append(name)


def test_what_cannot_be_frozen_is_stopped_by_signals_to_all_its_processes() -> None:
    service, container = ContainerKafka(), Unfreezable()
    service._container = SimpleNamespace(get_wrapped_container=lambda: container, stop=lambda: None)
    service.pause()
    assert container.told == ["root: kill -STOP -1", "STOP"]
    container.told.clear()
    service.resume()
    service.resume()
    assert container.told == ["reload", "root: kill -CONT -1", "CONT", "reload"]
    service.close()
