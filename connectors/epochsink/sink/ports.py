"""What the engine asks of the places beside the targets: Spark's checkpoint and the spool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
