"""The running query of a run, and the thread that commits its epochs: each ends with the other."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable

from epochsink.errors import Addresses, EpochsinkError
from epochsink.protocol.commit_thread import CommitThread, is_committing
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.store_failure import is_of_store, stopped_by
from epochsink.spark.engine import Execution

_log = logging.getLogger("epochsink")


class RunningQuery:
    """What the commit thread sees of the query (see `epochsink.protocol.commit_thread.RunningStream`).

    Starts the thread when made. ``release`` closes what the run holds.
    """

    def __init__(
        self,
        execution: Execution,
        coordinator: Coordinator,
        poll_seconds: float,
        *,
        release: Callable[[], None],
        show_values: bool,
    ) -> None:
        self.execution = execution
        self.has_state = execution.has_state()
        self.in_batch = False
        self.release = release
        self._addresses = coordinator.addresses
        self._queue = coordinator.queue
        self._show_values = show_values
        _warn_of_chance(execution)
        self._commit_thread = CommitThread(coordinator, self, poll_seconds)
        self._commit_thread.start()
        _flush_at_exit(self._commit_thread)

    def is_alive(self) -> bool:
        """Return whether the stream thread may still write to the checkpoint."""
        return self.execution.is_alive()

    def is_in_batch(self) -> bool:
        """Return whether foreachBatch runs now."""
        return self.in_batch

    def goes_on(self) -> bool:
        """Return whether nothing has ended the query so far: neither a user nor a failed commit."""
        return self._commit_thread.failure is None and self.execution.is_active()

    def report(self, failure: BaseException) -> BaseException:
        """Return what stops the commits, fit to be told."""
        if is_of_store(failure):
            pending = ", ".join(map(str, self._queue.pending)) or "none"
            failure = stopped_by(failure, f"decided epochs were committed (pending: {pending})")
        if isinstance(failure, EpochsinkError):
            complete(failure, self._addresses, show_values=self._show_values)
        return failure

    def interrupt(self) -> None:
        """Make the query fail with what stopped the commits."""
        if self._commit_thread.failure is not None:
            self.execution.fail(self._commit_thread.failure)

    def stop(self) -> None:
        """End the query."""
        self.execution.stop()

    def has_ended(self) -> bool:
        """Return whether the query has ended; if so, first wait for the last commits."""
        # a start by on_progress= is in that thread
        if not self.is_alive() and not is_committing():
            self._commit_thread.join()
        return not self._commit_thread.is_alive()

    def join(self) -> BaseException | None:
        """Wait for the last commits; return what stopped them. The caller raises it, so that users see fewer frames."""
        self._commit_thread.join()
        self.release()
        failure = self._commit_thread.failure
        # its frames and causes, which may quote rows, are those of another thread
        return failure.fresh() if isinstance(failure, EpochsinkError) else failure


def complete(failure: EpochsinkError, addresses: Addresses, *, show_values: bool) -> None:
    """Complete the commands of a failed commit's error, and leave values of rows out unless they may be shown."""
    failure.notes = failure.notes or (failure.note_to_type,)
    failure.address(addresses)
    if not show_values:
        failure.hide_values()


def _warn_of_chance(execution: Execution) -> None:
    if texts := execution.unrepeatable_state():
        _log.warning(
            "the query's state depends on expressions that may give another result when an epoch runs again: %s. "
            "If an epoch was recorded before a crash, the next start keeps its rows and runs it again for the state, "
            "which may then differ from these rows. Have the source provide such values, or compute them after the "
            "stateful operator",
            ", ".join(texts),
        )


def _flush_at_exit(commit_thread: CommitThread) -> None:
    """Let the interpreter's exit wait for a decided epoch's commit: daemon threads are cut off after it."""
    known = weakref.ref(commit_thread)

    def flush() -> None:
        living = known()
        if living is not None:
            living.flush()

    # `atexit` itself comes too late: by then concurrent.futures takes no more work, and commits need some
    getattr(threading, "_register_atexit", atexit.register)(flush)
