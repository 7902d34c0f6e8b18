"""The threads of simulated drivers: greenlets, each of which hands over what it wants to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """The simulated process is gone: nothing of it runs on."""


@dataclass(slots=True)
class Operation:
    """An I/O step that a thread wants to make."""

    name: str
    apply: Callable[[], Any]
    reads: bool


@dataclass(slots=True)
class Wait:
    """A thread waits for a condition within its own process."""

    ready: Callable[[], bool]


class Thread:
    """One thread of a driver. ``request`` is what it waits for; None when it has ended."""

    def __init__(self, name: str, body: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        self.name = name
        self.request: Operation | Wait | None = Wait(lambda: True)
        self.stalled_until = 0
        self._ended = ended
        self._greenlet = greenlet(self._run)
        self._body = body

    def _run(self, _: object = None) -> tuple[str, BaseException | None]:
        try:
            self._body()
        except Killed:
            return ("killed", None)
        except BaseException as failure:  # noqa: BLE001 - whatever ends a thread ends the driver
            return ("ended", failure)
        return ("ended", None)

    def resume(self, answer: object) -> None:
        """Let the thread run to its next request."""
        self._take(self._greenlet.switch(answer))

    def throw(self, error: BaseException) -> None:
        """Let the thread's request raise."""
        self._take(self._greenlet.throw(error))

    def kill(self) -> None:
        """End the thread without a goodbye."""
        self.request = None
        if not self._greenlet:
            return
        while not self._greenlet.dead:
            self._greenlet.throw(Killed())

    def _take(self, request: Operation | Wait | tuple[str, BaseException | None]) -> None:
        if isinstance(request, tuple):
            self.request = None
            if request[0] == "ended":
                self._ended(request[1])
        else:
            self.request = request


class Condition:
    """A `threading.Condition` between greenlets: only waiting hands over, so that holding it needs no lock.

    ``wait`` suspends the calling thread until what it is given holds.
    """

    def __init__(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        self._wait = wait

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return None

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait; with a time limit, one turn passes and the caller looks again."""
        if timeout is None:
            self._wait(predicate)
        return predicate()

    def notify_all(self) -> None:
        """Do nothing: the scheduler asks the predicates."""
