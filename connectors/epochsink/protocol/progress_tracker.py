"""Follow the epochs of one run, and report them: to the program, in the ledger's receipts, in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from epochsink.errors import epochs
from epochsink.protocol.ledger_entries import Prepared
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.progress import EpochProgress, QueryProgress, SinkProgress

_log = logging.getLogger("epochsink")

RECENT: Final = 100
"""Done epochs whose progress a running query remembers."""
LOG_SECONDS: Final = 60.0
"""How often a running query logs a line about its epochs."""


@dataclass(slots=True)
class _Epoch:
    """An epoch under way, and when its steps ended (monotonic seconds; None: not yet, or by an earlier driver).

    The other fields are those of its `EpochProgress`; ``sinks`` has for each sink those of its `SinkProgress`.
    """

    number: int
    begun: float | None = None
    recorded: float | None = None
    decided: float | None = None
    spooled: int = 0
    done_at: float = 0.0
    write_seconds: float = 0.0
    record_seconds: float = 0.0
    decision_seconds: float = 0.0
    commit_seconds: float = 0.0
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def progress(self) -> EpochProgress:
        """Return the progress so far. A new value each time: an epoch's steps change it far more often."""
        return EpochProgress(
            self.number,
            self.done_at,
            self.write_seconds,
            self.record_seconds,
            self.decision_seconds,
            self.commit_seconds,
            {name: SinkProgress(**known) for name, known in self.sinks.items()},
        )


class ProgressTracker:
    """Collects the progress of one run; its methods may be called from any thread.

    ``listener`` gets each done epoch, in the commit thread. What it raises is logged. ``begun_at`` says when Spark
    began an epoch, in seconds since 1970, if it knows.
    """

    def __init__(
        self,
        listener: Callable[[EpochProgress], None] | None = None,
        begun_at: Callable[[int], float | None] = lambda _number: None,
    ) -> None:
        self._listener = listener
        self._begun_at = begun_at
        self._lock = threading.Lock()
        self._epochs: dict[int, _Epoch] = {}
        self._opened: dict[int, float] = {}
        self._opened_before: dict[int, float] = {}
        self._recent: deque[EpochProgress] = deque(maxlen=RECENT)
        self._untold: deque[EpochProgress] = deque()
        self._done = 0
        self._totals: dict[str, SinkProgress] = {}
        self._retries = 0
        self._leftovers = 0
        self._failure = ""
        self._logged_at = time.monotonic()
        self._since_log: list[EpochProgress] = []

    def opened(self, number: int) -> None:
        """Note that Spark has called for an epoch, before any target is asked; it is under way until it is visible."""
        with self._lock:
            first = not self._opened and not self._done
        # an earlier run may have begun it: an age that began anew with each start would stay small if a scheduler
        # started the query every few seconds
        begun = self._begun_at(number) if first else None
        with self._lock:
            if begun is not None:
                self._opened_before[number] = max(0.0, time.time() - begun)
            self._opened.setdefault(number, time.monotonic())

    def closed(self, number: int) -> None:
        """Note that an earlier run has recorded the epoch: nothing of it is under way."""
        with self._lock:
            self._opened.pop(number, None)

    def begin(self, number: int) -> None:
        """Note that an attempt begins; an earlier one is void, and its time counts."""
        with self._lock:
            begun = self._opened.setdefault(number, time.monotonic())
            self._epochs[number] = _Epoch(number, begun=begun)

    def written(self, number: int) -> None:
        """Note that the write job has ended."""
        with self._lock:
            known = self._of(number)
            known.write_seconds = _seconds(known.begun)

    @contextmanager
    def timed(
        self, step: Literal["vote_seconds", "commit_seconds"], number: int, sinks: Sequence[str]
    ) -> Iterator[None]:
        """Time a participant's vote or commit, replays included."""
        began = time.monotonic()
        yield
        took = _seconds(began)
        with self._lock:
            for name in sinks:
                self._sink(number, name)[step] = took

    def recorded(self, prepared: Prepared) -> None:
        """Note that an epoch is recorded, by this run or by an earlier one."""
        number = prepared.epoch
        with self._lock:
            known = self._of(number)
            known.recorded = time.monotonic()
            known.spooled = sum(file.size for share in prepared.shares.values() for file in share.files.values())
            if known.begun is not None:
                known.record_seconds = round(known.recorded - known.begun - known.write_seconds, 3)
            for name, share in prepared.shares.items():
                counted = share.counted
                self._sink(number, name).update(
                    parts=len(share.parts), rows=counted.rows, deleted=counted.deleted, bytes=counted.bytes
                )

    def decided(self, number: int) -> None:
        """Note that Spark has decided an epoch; may be repeated."""
        with self._lock:
            known = self._of(number)
            if known.decided is None:
                known.decided = time.monotonic()
                known.decision_seconds = 0.0 if known.begun is None else _seconds(known.recorded or known.decided)

    def replayed(self, number: int, sinks: Sequence[str]) -> None:
        """Note that a part of some sinks was prepared again."""
        with self._lock:
            for name in sinks:
                sink = self._sink(number, name)
                sink["replays"] = sink.get("replays", 0) + 1

    def set_aside(self, number: int, sink: str, rows: Sequence[int | None]) -> None:
        """Note how many rows of each part became dead letters."""
        known = [each for each in rows if each is not None]
        with self._lock:
            self._sink(number, sink).update(set_aside=sum(known) if len(known) == len(rows) else None)

    def visible(self, number: int) -> EpochProgress:
        """Note that readers see an epoch; return its progress, which the ledger records."""
        with self._lock:
            known = self._of(number)
            known.commit_seconds, known.done_at = _seconds(known.decided), round(time.time(), 3)
            return known.progress()

    def done(self, number: int) -> None:
        """Note that an epoch is recorded as done; `tell` tells the listener."""
        with self._lock:
            progress = self._of(number).progress()
            del self._epochs[number]
            self._opened.pop(number, None)
            self._recent.append(progress)
            self._since_log.append(progress)
            self._done += 1
            for name, sink in progress.sinks.items():
                self._totals[name] = self._totals.get(name, SinkProgress()) + sink
            if self._listener is not None:
                self._untold.append(progress)

    def tell(self) -> None:
        """Tell the listener of the epochs that are done; when nothing waits for the caller to go on."""
        while self._untold:
            progress = self._untold.popleft()
            # without the lock: the user's function may ask for the progress
            try:
                self._listener(progress)  # type: ignore[misc] # none is noted without a listener
            except Exception:  # noqa: BLE001 - it is the user's
                _log.exception("on_progress= failed for epoch %d; the query continues", progress.epoch)

    def retried(self) -> None:
        """Note that an attempt at an epoch failed and is repeated."""
        with self._lock:
            self._retries += 1

    def ended(self, leftovers: int) -> None:
        """Note how many leftovers a sweep has ended."""
        with self._lock:
            self._leftovers += leftovers

    def failed(self, failure: str) -> None:
        """Keep the first failure of the query, in words without values of rows."""
        with self._lock:
            self._failure = self._failure or failure

    def of(self, number: int) -> EpochProgress:
        """Return the progress of an epoch so far."""
        with self._lock:
            return self._of(number).progress()

    def snapshot(self) -> QueryProgress:
        """Return the state now."""
        now = time.monotonic()
        with self._lock:
            recorded = {number: one for number, one in self._epochs.items() if one.recorded is not None}
            decided = [one.decided for one in recorded.values() if one.decided is not None]
            ages = [now - at + self._opened_before.get(number, 0.0) for number, at in self._opened.items()]
            return QueryProgress(
                pending=tuple(sorted(recorded)),
                late_seconds=round(now - min(decided), 3) if decided else 0.0,
                open_seconds=round(max(ages), 3) if ages else 0.0,
                epochs=self._done,
                totals=dict(self._totals),
                retries=self._retries,
                leftovers=self._leftovers,
                spooled_bytes=sum(one.spooled for one in recorded.values()),
                recent=tuple(self._recent),
                failure=self._failure,
            )

    def log_now_and_then(self) -> None:
        """Log a line a minute about the epochs since the last one; nothing if there are none under way."""
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            return
        with self._lock:
            since, self._since_log, self._logged_at = self._since_log, [], now
        progress = self.snapshot()
        late = progress.late_seconds
        if since:
            slowest = max(since, key=lambda one: one.commit_seconds)
            _log.info(
                "%s: %d rows are visible; commits took %.3f s at most (epoch %d)%s",
                epochs(since[0].epoch, since[-1].epoch),
                sum(one.rows for one in since),
                slowest.commit_seconds,
                slowest.epoch,
                f"; the next one is late by {late:.0f} s" if late >= 1.0 else "",
            )
        elif late >= LOG_SECONDS:
            _log.warning("no epoch became visible in the last minute; the oldest decided one is late by %.0f s", late)
        elif progress.open_seconds >= LOG_SECONDS:
            _log.info(
                "no epoch became visible in the last minute; one has been under way for %.0f s", progress.open_seconds
            )

    def _of(self, number: int) -> _Epoch:
        # an epoch that an earlier driver has recorded was not begun here
        return self._epochs.setdefault(number, _Epoch(number))

    def _sink(self, number: int, name: str) -> dict[str, Any]:
        return self._of(number).sinks.setdefault(name, {})


def log_recovery(history: LedgerHistory, waiting: Sequence[int]) -> None:
    """Log what a start has found pending in ``history``, and which of these epochs still await Spark's decision."""
    what = "everything recorded was visible"
    if pending := [prepared.epoch for prepared in history.pending]:
        committed = [number for number in pending if number not in waiting]
        what = f"found epochs {pending} recorded and not visible, committed {committed}; {list(waiting)} not decided"
    _log.info("recovered as generation %d: %s", history.owner.generation if history.owner else 0, what)


def _seconds(since: float | None) -> float:
    return 0.0 if since is None else round(time.monotonic() - since, 3)
