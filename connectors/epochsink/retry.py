"""The one retry policy: a transient failure is tried again, with growing random pauses, until a deadline or a count.

Each family's table of errors defines what is transient; the caller defines how long and how often. Pauses are random,
so that the tasks of an epoch do not all return at the same moment to a server that has just restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_never, wait_random_exponential

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0


class Clock(Protocol):
    """What the module `time` does. Whatever waits or judges an age takes a clock, so that it can be simulated."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


def retrying(
    is_passing: Callable[[BaseException], bool],
    *,
    seconds: float | None = None,
    attempts: int | None = None,
    first_pause: float = FIRST_PAUSE_SECONDS,
    longest_pause: float = LONGEST_PAUSE_SECONDS,
    clock: Clock = time,
) -> Retrying:
    """Return a policy: call it with a function, or iterate over its attempts; it raises the last failure unchanged.

    Args:
        is_passing: whether a failure may go away by itself; others are raised at once.
        seconds: no new attempt begins this long after the first; None for no limit.
        attempts: the maximum number of attempts; None for no limit. One of the two limits is needed.
        first_pause: the longest first pause, in seconds; each later one may be twice as long.
        longest_pause: the longest of all pauses, in seconds.
        clock: by which the time is taken and the pauses are made.
    """
    if seconds is None and attempts is None:
        raise ValueError("retrying() without seconds= and attempts= would never end")

    def note_beginning(state: Any) -> None:
        # in the state of one call: a policy may be used again, and by several threads
        if state.attempt_number == 1:
            state.begun = clock.monotonic()

    def is_late(state: Any) -> bool:
        return seconds is not None and clock.monotonic() - state.begun >= seconds

    by_count = stop_never if attempts is None else stop_after_attempt(attempts)
    return Retrying(
        retry=retry_if_exception(is_passing),
        before=note_beginning,
        stop=lambda state: is_late(state) or by_count(state),
        sleep=clock.sleep,
        wait=wait_random_exponential(first_pause, longest_pause),
        reraise=True,
    )
