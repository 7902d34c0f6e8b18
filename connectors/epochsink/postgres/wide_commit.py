"""Many prepared transactions of one epoch, committed in several sessions: each commit waits for the disk.

The server writes its log once for all commits that wait at the same moment, so that sessions side by side take little
longer than one.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Final

import psycopg

from epochsink.errors import EpochsinkError
from epochsink.failpoints import reach
from epochsink.postgres.errors import AwaitsStandby, describe
from epochsink.postgres.prepared_transaction import commit_prepared
from epochsink.postgres.sessions import watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from epochsink.postgres.server import Server

_log = logging.getLogger(__name__)

MOST_SESSIONS: Final = 8
WORTH_A_SESSION: Final = 8
"""Transactions for which another session is opened: that takes about as long as to commit so many."""


def commit_side_by_side(server: Server, name: str, gids: Mapping[int, str], seconds: float) -> set[int]:
    """Commit prepared transactions; return the keys of those of which the server has said so.

    ``name`` is that of the sessions, ``seconds`` what one commit may take. What fails is left to who asks one by one.
    """
    sessions = min(MOST_SESSIONS, len(gids) // WORTH_A_SESSION)
    if sessions < 2:  # noqa: PLR2004 - one session is there already
        return set()
    turns = _Turns(gids)
    with ThreadPoolExecutor(sessions, "epochsink-commit-prepared") as threads:
        done = threads.map(lambda _: _commit(server, name, turns, seconds), range(sessions))
        return set().union(*done)


class _Turns:
    """What is left to commit, for several threads."""

    def __init__(self, gids: Mapping[int, str]) -> None:
        self._left = iter(gids.items())
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        with self._lock:
            return next(self._left)


def _commit(server: Server, name: str, turns: _Turns, seconds: float) -> set[int]:
    try:
        connection = server.connect(name)
    except (psycopg.Error, EpochsinkError) as refused:
        _log.info("%s: no further session to commit in: %s", server.database, refused)
        return set()
    committed = set()
    with closing(connection):
        for key, gid in turns:
            try:
                with watched(connection, server, seconds):
                    commit_prepared(connection, gid)
            except psycopg.Error as failure:
                _log.info("%s: %s is asked for again: %s", server.database, gid, describe(failure))
                if connection.closed or isinstance(failure, AwaitsStandby):
                    break
            else:
                reach("postgres.committed")
                committed.add(key)
    return committed
