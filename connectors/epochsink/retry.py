"""The one retry policy: a transient failure is tried again, with growing random pauses, until a deadline or a count.

Each family's table of errors defines what is transient; the caller defines how long and how often. Pauses are random,
so that the tasks of an epoch do not all return at the same moment to a server that has just restarted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    stop_any,
    stop_never,
    wait_random_exponential,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0


def retrying(
    is_passing: Callable[[BaseException], bool],
    *,
    seconds: float | None = None,
    attempts: int | None = None,
    first_pause: float = FIRST_PAUSE_SECONDS,
    longest_pause: float = LONGEST_PAUSE_SECONDS,
) -> Retrying:
    """Return a policy: call it with a function, or iterate over its attempts; it raises the last failure unchanged.

    Args:
        is_passing: whether a failure may go away by itself; others are raised at once.
        seconds: no new attempt begins this long after the first; None for no limit.
        attempts: the maximum number of attempts; None for no limit. One of the two limits is needed.
        first_pause: the longest first pause, in seconds; each later one may be twice as long.
        longest_pause: the longest of all pauses, in seconds.
    """
    if seconds is None and attempts is None:
        raise ValueError("retrying() without seconds= and attempts= would never end")
    by_time = stop_never if seconds is None else stop_after_delay(seconds)
    by_count = stop_never if attempts is None else stop_after_attempt(attempts)
    return Retrying(
        retry=retry_if_exception(is_passing),
        stop=stop_any(by_time, by_count),
        wait=wait_random_exponential(first_pause, longest_pause),
        reraise=True,
    )
