"""Abort what no recorded epoch names: in the targets, and in the spool.

Attempts that failed, tasks that lost, drivers that died between their vote and their record leave things prepared,
which hold locks or hold readers back. Only the owner of the ledger may end them.
"""

from __future__ import annotations

import logging

from epochsink.protocol import transaction_groups
from epochsink.protocol.run_state import RunState
from epochsink.sink import Epoch

_log = logging.getLogger("epochsink")


class Sweep(RunState):
    """The sweep of a run, from either of its threads."""

    def tidy(self) -> None:
        """Abort what losing tasks have left since the last sweep; does nothing unless the stream is idle.

        For the commit thread, now and then while nothing is pending: an open transaction of a task that lost late holds
        readers back until it ends, and without input no `settle` would end it. An attempt that begins meanwhile
        waits. A target that cannot be reached now is no failure: the next sweep finds what is left.
        """
        try:
            with self._queue.alone_if_idle() as idle:
                if idle:
                    self._end_unrecorded()
        except OSError as failure:
            _log.warning("leftovers of losing tasks stay for the next sweep: %s", failure)
        except BaseException as failure:
            self.fail(failure)
            raise

    def _abort_orphans(self) -> None:
        with self._queue.alone():
            self._end_unrecorded()

    def _end_unrecorded(self) -> None:
        """Abort what the ledger does not name. Only the owner may: the ledger is read again for each sink."""
        for name, sink in self._sinks.items():
            history = self._ledger.verify()
            # those of its whole group: what several share stands for as long as one of them has yet to commit it
            together = transaction_groups.group(self._sinks, name)
            keep = [part for prepared in history.pending for each in together for part in prepared.parts_of(each)]
            with self._if_ours(name):
                ended = sink.abort_orphans(keep, history.done_parts(name))
            for line in ended:
                _log.info("sink '%s': aborted what no recorded epoch names: %s", name, line)
        # listed before the ledger is read: a newer driver's attempts cannot be among them, if it is still ours
        spooled = self._spool.attempts(self._query_id)
        kept = {Epoch(prepared.epoch, prepared.attempt) for prepared in self._ledger.verify().pending}
        for epoch in spooled:
            if epoch not in kept:
                self._spool.drop(self._query_id, epoch)
