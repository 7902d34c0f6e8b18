"""The one retry policy: a transient failure is tried again, with growing random pauses, until a deadline or a count.

Each family's table of errors defines what is transient; the caller defines how long and how often. Pauses are random,
so that the tasks of an epoch do not all return at the same moment to a server that has just restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_never, wait_random_exponential

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
Result = TypeVar("Result")


class Clock(Protocol):
    """What the module `time` does. Whatever waits or judges an age takes a clock, so that it can be simulated."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What `retrying` returns; its fields are described there. May be used again, and by several threads."""

    is_passing: Callable[[BaseException], bool]
    seconds: float | None
    attempts: int | None
    first_pause: float
    longest_pause: float
    clock: Clock
    sleep: Callable[[float], None]

    def __call__(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Return what a function returns, once it succeeds; raises its last failure unchanged."""
        begun = self.clock.monotonic()
        first: list[BaseException] = []
        try:
            # not by tenacity, which makes a dozen objects for each call: nearly all calls succeed at once
            return function(*args, **kwargs)
        except BaseException as failure:
            if not self.is_passing(failure):
                raise
            first.append(failure)

        def attempt() -> Result:
            if first:
                raise first.pop()
            return function(*args, **kwargs)

        by_count = stop_never if self.attempts is None else stop_after_attempt(self.attempts)
        policy = Retrying(
            retry=retry_if_exception(self.is_passing),
            stop=lambda state: self._is_late(begun) or by_count(state),
            sleep=self.sleep,
            wait=wait_random_exponential(self.first_pause, self.longest_pause),
            reraise=True,
        )
        return policy(attempt)

    def _is_late(self, begun: float) -> bool:
        return self.seconds is not None and self.clock.monotonic() - begun >= self.seconds


def retrying(
    is_passing: Callable[[BaseException], bool],
    *,
    seconds: float | None = None,
    attempts: int | None = None,
    first_pause: float = FIRST_PAUSE_SECONDS,
    longest_pause: float = LONGEST_PAUSE_SECONDS,
    clock: Clock = time,
    sleep: Callable[[float], None] | None = None,
) -> RetryPolicy:
    """Return a policy: call it with a function and its arguments.

    Args:
        is_passing: whether a failure may go away by itself; others are raised at once.
        seconds: no new attempt begins this long after the first; None for no limit.
        attempts: the maximum number of attempts; None for no limit. One of the two limits is needed.
        first_pause: the longest first pause, in seconds; each later one may be twice as long.
        longest_pause: the longest of all pauses, in seconds.
        clock: by which the time is taken and the pauses are made.
        sleep: makes the pauses instead.
    """
    if seconds is None and attempts is None:
        raise ValueError("retrying() without seconds= and attempts= would never end")
    return RetryPolicy(is_passing, seconds, attempts, first_pause, longest_pause, clock, sleep or clock.sleep)
