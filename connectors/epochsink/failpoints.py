"""Named failpoints: places where a test makes the process kill itself. A no-op unless armed.

``EPOCHSINK_FAILPOINT=coordinator.record.after:2`` kills the process with SIGKILL when the point named
``coordinator.record.after`` is reached for the second time in that process (``:1`` may be left out). Tasks
inherit the driver's environment in local mode; elsewhere set ``spark.executorEnv.EPOCHSINK_FAILPOINT``. With
``EPOCHSINK_FAILPOINT_ONCE=/path/of/a/file`` the crash happens only if that file can be created, so a pipeline
that is started again with the same environment continues. ``EPOCHSINK_FAILPOINT_SIGNAL=STOP`` makes the process stop at
the point, until it gets SIGCONT.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Final

POINTS: Final[dict[str, str]] = {
    "coordinator.take.before": "before the ledger is taken",
    "coordinator.take.after": "the ledger is taken, nothing recovered",
    "coordinator.recover.after": "recovered, before the first batch",
    "coordinator.settle.before": "foreachBatch has begun",
    "coordinator.write.before": "settled, before the write job",
    "coordinator.vote.before": "the write job has succeeded, before the sinks vote",
    "coordinator.vote.between": "one sink has voted, another has not",
    "coordinator.record.before": "all sinks have voted, before the ledger entry",
    "coordinator.record.after": "recorded, before foreachBatch returns",
    "coordinator.commit.before": "decided, before the first sink commits",
    "coordinator.commit.compared": "target and ledger agree, before a sink commits",
    "coordinator.commit.between": "one part is committed, the next is not",
    "coordinator.replay.before": "a part is known to be aborted, before it is prepared again",
    "coordinator.replay.prepared": "prepared again, before that is recorded",
    "coordinator.replay.after": "the replay is recorded, before its commit",
    "coordinator.done.before": "all sinks have committed, before the ledger says done",
    "coordinator.done.after": "the ledger says done, before the spool is dropped",
    "coordinator.drain.before": "the stream has ended, before the last commits",
    "repair.epoch.before": "a retained epoch is about to be applied again",
    "repair.epoch.after": "it is applied again, the next is not",
    "task.begin": "a task has got its first rows",
    "task.written": "a task has written its rows, before the spool is durable and the sinks prepare",
    "task.spooled": "the spool is durable, while the sinks prepare",
    "task.prepared": "the sinks have prepared, before the task returns",
    "kafka.produced": "a task's rows are flushed into its open transaction",
    "kafka.commit.between": "one transaction of the epoch is ended, the next is not",
    "kafka.letters.read": "earlier retries of dead letters can no longer commit, and the letters are read",
    "kafka.letters.written": "rows of dead letters are in a transaction that settles the letters, before its commit",
    "kafka.letters.committed": "that transaction is committed",
    "postgres.copied": "rows are copied, before that is committed or prepared",
    "postgres.merged": "the driver has merged, before PREPARE TRANSACTION",
    "postgres.prepared": "prepared, before the vote returns",
    "postgres.committed": "COMMIT PREPARED was answered",
    "postgres.letters.taken": "dead letters are deleted and staged again, before they are merged",
    "postgres.letters.merged": "dead letters are merged, before that is committed",
    "postgres.letters.committed": "a retry of dead letters is committed",
    "elasticsearch.bulk.between": "some bulk requests of the epoch are applied",
    "elasticsearch.letters.written": "documents of dead letters are written, before the letters are deleted",
    "elasticsearch.marker.before": "all bulk requests are applied, before the marker document",
}
"""Every failpoint, and the state in which it fires."""

_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Kill this process here if the environment arms ``point``. Raises KeyError for an unknown point."""
    armed = os.environ.get("EPOCHSINK_FAILPOINT")
    if not armed:
        return
    POINTS[point]
    name, _, count = armed.partition(":")
    if name != point:
        return
    _reached[point] += 1
    if _reached[point] >= int(count or 1) and _first_time():
        # to this thread: sent to the process, another one may take it while this one continues for a moment
        signal.pthread_kill(
            threading.get_ident(), signal.Signals[f"SIG{os.environ.get('EPOCHSINK_FAILPOINT_SIGNAL', 'KILL')}"]
        )


def _first_time() -> bool:
    once = os.environ.get("EPOCHSINK_FAILPOINT_ONCE")
    if not once:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
