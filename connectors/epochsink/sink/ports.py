"""What the engine asks of the places beside the targets, Spark's checkpoint and the spool; and the help that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.sink.contract import Rows
    from epochsink.sink.values import Epoch, Identity, SpoolFile


class CheckpointReader(Protocol):
    """What the coordinator asks of Spark's checkpoint: see `epochsink.spark.checkpoint.Checkpoint`."""

    def is_decided(self, epoch: int) -> bool: ...  # noqa: D102 - described there
    def has_commit(self, epoch: int) -> bool: ...  # noqa: D102 - described there
    def newest_decided(self) -> int: ...  # noqa: D102 - described there
    def offsets_digest(self, epoch: int) -> str: ...  # noqa: D102 - described there
    def make_durable(self, epoch: int) -> None: ...  # noqa: D102 - described there


class SpoolKeeper(Protocol):
    """What the coordinator asks of the spool: see `epochsink.protocol.spool.Spool`."""

    def rows(  # noqa: D102 - described there
        self, identity: Identity, epoch: Epoch, tasks: Sequence[str], files: Mapping[str, SpoolFile]
    ) -> Rows: ...
    def make(self, query_id: str, epoch: Epoch) -> None: ...  # noqa: D102 - described there
    def drop(  # noqa: D102 - described there
        self, query_id: str, epoch: Epoch, known: Sequence[tuple[Identity, str]] = ()
    ) -> None: ...
    def attempts(self, query_id: str) -> list[Epoch]: ...  # noqa: D102 - described there


Part = TypeVar("Part")
Answer = TypeVar("Answer")


class NotCarriedOut(Exception):
    """Executors did not do what they were asked for, or not all of it; the argument says why."""


class Executors(Protocol):
    """Spark's executors, for a commit that one process would take too long for."""

    def map(self, function: Callable[[Part], Answer], parts: Sequence[Part], patience: float) -> list[Answer]:
        """Call a function for each part on some executor, beside the stream; return the answers in order.

        All three must pickle. A part may be given to several at once, and one that was cut off may go on for long after
        this has returned or raised: only what is right to do again, and late, may be done there. Raises
        `NotCarriedOut`, also where for ``patience`` seconds no executor is there to take a part.
        """


@runtime_checkable
class UsesExecutors(Protocol):
    """A committer that can let executors do a part of its work: the engine sets them before the first call."""

    executors: Executors | None
