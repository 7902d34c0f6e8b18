"""Repeat failed reads of a checkpoint, with growing pauses: a store that is unreachable for a moment ends no query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from epochsink.protocol.storage import Storage
from epochsink.retry import retrying
from epochsink.spark.error_translation import is_of_lost_jvm

if TYPE_CHECKING:
    _Read = TypeVar("_Read")

RETRY_SECONDS: Final = 30.0
LONGEST_PAUSE_SECONDS: Final = 2.0


class RetriedReads(Storage):
    """Files below one root, read again after a transient failure (see `epochsink.protocol.storage.Storage`).

    Writes are never repeated: a `create` that failed may have been carried out, and only the next driver, which reads
    the ledger from its beginning, can find out.
    """

    def __init__(self, files: Storage) -> None:
        self._files = files

    def read(self, name: str) -> bytes | None:
        return self._again(lambda: self._files.read(name))

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        return self._again(lambda: self._files.read_many(names))

    def names(self, folder: str) -> list[str]:
        return self._again(lambda: self._files.names(folder))

    def create(self, name: str, data: bytes) -> bool:
        """Make a file, in one attempt."""
        return self._files.create(name, data)

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete files, in one attempt: what stays is deleted later."""
        self._files.remove_many(names)

    def make_durable(self, name: str) -> None:
        """Make a file of Spark's durable, in one attempt: after a failed sync, a second one may report success."""
        self._files.make_durable(name)

    @staticmethod
    def _again(call: Callable[[], _Read]) -> _Read:
        again = retrying(_may_pass, seconds=RETRY_SECONDS, longest_pause=LONGEST_PAUSE_SECONDS)
        return again(call)


def _may_pass(failure: BaseException) -> bool:
    """Whether the store may answer later: not if a right is missing, the JVM has ended or the query was stopped."""
    if not isinstance(failure, OSError) or isinstance(failure, PermissionError):
        return False
    return not is_of_lost_jvm(failure.__cause__) and "Interrupt" not in str(failure)
