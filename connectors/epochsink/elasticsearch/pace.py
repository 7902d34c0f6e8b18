"""Adapt the number and size of bulk requests to what the server takes: less after a 429, more after successes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_log = logging.getLogger("epochsink")

_LEAST_SHARE: Final = 1 / 64
"""The smallest share: requests of 39 kB are so small that a node which refuses them needs time, not smaller ones."""
_FALL: Final = 0.5
_RISE: Final = 1 / 16


class Pace:
    """How many bulk requests a process sends at once, and how large they are; for posters in several threads.

    Both are ``share`` of their maximum. An answer of 429 halves the share, but only once for all requests that were on
    their way together: they met the same overload. Each request that the server takes adds a sixteenth. At least one
    request is sent at once.

    Args:
        size: the largest size of a request, in bytes.
        threads: the largest number of requests at once.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._size = size
        self._threads = threads
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._under_way = 0
        self._falls = 0
        self._overloads = 0
        self._lowest = self._share = 1.0

    @property
    def most(self) -> int:
        """The largest number of requests at once, whatever the share."""
        return self._threads

    @property
    def share(self) -> float:
        """The share of the maximum that is sent now, up to 1."""
        return self._share

    @property
    def size(self) -> int:
        """The largest size of the next request, in bytes. An operation that is larger is sent alone."""
        return max(1, int(self._size * self._share))

    @property
    def threads(self) -> int:
        """How many requests may be on their way now."""
        return max(1, int(self._threads * self._share))

    @contextmanager
    def turn(self, stopped: threading.Event) -> Iterator[Turn]:
        """Wait, in order of arrival, until a request may be sent, and count it while the block runs.

        The wait ends with another request's answer, which the client's request timeout limits, or at once if
        ``stopped`` is set and `wake` is called: the caller looks at it.
        """
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(
                    lambda: (self._waiting[0] is place and self._under_way < self.threads) or stopped.is_set()
                )
            finally:
                self._waiting.remove(place)
            self._under_way += 1
            turn = Turn(self, self._falls)
            # The next in line may have a turn too.
            self._changed.notify_all()
        try:
            yield turn
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def wake(self) -> None:
        """Let all who wait for a turn look whether they were stopped."""
        with self._changed:
            self._changed.notify_all()

    def fall(self, falls: int) -> None:
        """Send less. ``falls`` is how often the share had fallen when the refused request was sent."""
        with self._changed:
            self._overloads += 1
            # a request that was sent before the last fall has met the same overload
            if falls == self._falls:
                self._falls += 1
                self._share = max(_LEAST_SHARE, self._share * _FALL)
                self._lowest = min(self._lowest, self._share)

    def rise(self) -> None:
        """Send more, after a request that the server took."""
        with self._changed:
            self._share = min(1.0, self._share + _RISE)
            self._changed.notify_all()

    def tell(self, what: str) -> None:
        """Log what ``what`` (the epoch and its index) has met since the last call, if anything."""
        with self._changed:
            overloads, lowest = self._overloads, self._lowest
            self._overloads, self._lowest = 0, self._share
            now = self._shown(self._share)
        if overloads:
            _log.warning(
                "%s: the server answered 429 to %d bulk request(s), so fewer and smaller ones were sent: %s at the "
                "least, %s now",
                what,
                overloads,
                self._shown(lowest),
                now,
            )

    def _shown(self, share: float) -> str:
        return f"{max(1, int(self._threads * share))} at once of up to {max(1, int(self._size * share))} bytes"


class Turn:
    """One request on its way."""

    def __init__(self, pace: Pace, falls: int) -> None:
        self._pace = pace
        self._falls = falls

    def overloaded(self) -> None:
        """Send less: the server answered 429 to the request or to some of its operations."""
        self._pace.fall(self._falls)

    def taken(self) -> None:
        """Send more: the server took the whole request."""
        self._pace.rise()
