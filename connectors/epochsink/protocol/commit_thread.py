"""The thread that commits what Spark has decided, and drains when the stream has ended: steps 6 and 7.

Spark calls nothing in Python after ``commits/N``; its listener events come late or not at all. So the thread looks at
the commit log itself, often while an epoch is pending and seldom otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, Protocol

from epochsink.errors import ConfigurationError
from epochsink.protocol.coordinator import Coordinator

_log = logging.getLogger("epochsink")

LIVENESS_SECONDS: Final = 0.25
"""How often the thread checks that the stream is alive."""
TIDY_SECONDS: Final = 10.0
"""How often what losing tasks have left is looked for while the stream is idle."""
SHARE_OF_WAIT: Final = 1 / 32
LONGEST_IN_POLLS: Final = 20
"""How the looks at the commit log become less frequent while Spark decides nothing."""
GRACE_SECONDS: Final = 2.0
"""How long after a failed commit a batch may come and raise the failure before an idle query is made to fail."""
EXIT_SECONDS: Final = 30.0
"""How long the interpreter's exit waits for a decided epoch's commit."""


def is_committing() -> bool:
    """Return whether this is a thread that commits: of our code, on_progress= is called there."""
    return isinstance(threading.current_thread(), CommitThread)


def refuse_to_wait() -> None:
    """Raise `ConfigurationError` in a thread that commits: it would wait for itself."""
    if is_committing():
        raise ConfigurationError(
            "on_progress= called a function that waits for commits. It is called in the thread that commits, which "
            "would wait for itself and never end",
            hint="wait in another thread, and let on_progress= tell it by a threading.Event or a queue; query.stop() "
            "may be called here, and does not wait",
        )


class RunningStream(Protocol):
    """The running query, as the commit thread sees it."""

    def is_alive(self) -> bool:
        """Return whether the stream thread may still write to the checkpoint."""

    def is_in_batch(self) -> bool:
        """Return whether foreachBatch runs now, and so will see a failure."""

    def report(self, failure: BaseException) -> BaseException:
        """Return the failure that stops the commits, as it is logged and shown to the user."""

    def interrupt(self) -> None:
        """Make the query fail, so that ``awaitTermination`` raises."""

    def stop(self) -> None:
        """End the query."""

    def release(self) -> None:
        """Release the connections to the targets: the stream and the commits have ended."""


class CommitThread(threading.Thread):
    """Commits decided epochs of one run of a query until that ends; ``failure`` is why it stopped early, if it did."""

    def __init__(self, coordinator: Coordinator, stream: RunningStream, poll_seconds: float) -> None:
        super().__init__(name="epochsink-commit", daemon=True)
        self._coordinator = coordinator
        self._stream = stream
        self._poll_seconds = poll_seconds
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Watch, then drain."""
        try:
            self._watch()
            # a run that has failed does not commit: the next start does
            self._coordinator.queue.raise_failure()
            self._coordinator.drain()
            # last: no recorded epoch is left then that a sweep would have to spare
            self._coordinator.tidy()
        except BaseException as failure:  # noqa: BLE001 - the stream has to raise it, whatever it is
            self._give_up(failure)
        # nobody may wait for a query that was started by hand: its sessions would stay open as long as the process
        if not self._stream.is_alive():
            self._stream.release()

    def _watch(self) -> None:
        look_again = 0.0
        waiting_since: float | None = None
        tidy_next = time.monotonic() + TIDY_SECONDS
        while True:
            if time.monotonic() >= look_again:
                if not self._stream.is_alive():
                    return
                look_again = time.monotonic() + LIVENESS_SECONDS
            self._coordinator.progress.log_now_and_then()
            # after the look at the stream: what Spark decided just before its end is still found by the drain
            if self._coordinator.commit_decided():
                waiting_since = None
                self._coordinator.queue.wait_pending(LIVENESS_SECONDS)
                if time.monotonic() >= tidy_next:
                    self._coordinator.tidy()
                    tidy_next = time.monotonic() + TIDY_SECONDS
            else:
                waiting_since = waiting_since or time.monotonic()
                self._coordinator.queue.wait_run(self._pause(time.monotonic() - waiting_since))

    def _pause(self, waited: float) -> float:
        """Return how long to wait for the next look: in proportion to the wait so far, so that its end is seen soon."""
        return min(max(self._poll_seconds, waited * SHARE_OF_WAIT), self._poll_seconds * LONGEST_IN_POLLS)

    def _give_up(self, failure: BaseException) -> None:
        failure = self._stream.report(failure)
        self.failure = failure
        # before anything ends the query: a batch under way then raises this, and Spark reports it
        self._coordinator.fail(failure)
        # after that: it writes to the store, which may be what failed
        self._coordinator.note_failure(failure)
        _log.error("epochsink stops the query: %s", failure)
        if self._outlives_grace():
            self._stream.interrupt()
            if self._outlives_grace():
                self._stream.stop()

    def _outlives_grace(self) -> bool:
        # a batch that runs, or begins soon, raises the failure itself: Spark then reports it as the query's error
        deadline = time.monotonic() + GRACE_SECONDS
        while alive := self._stream.is_alive():
            if not self._stream.is_in_batch() and time.monotonic() > deadline:
                break
            time.sleep(LIVENESS_SECONDS)
        return alive

    def flush(self) -> None:
        """Wait, at the interpreter's exit, until nothing decided is pending."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self.is_alive() and self._coordinator.has_decided() and time.monotonic() < deadline:
            time.sleep(self._poll_seconds)
