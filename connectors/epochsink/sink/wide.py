"""A committer whose epochs have a part for each task, and whose target decides many of them at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from epochsink.sink.contract import SinkCommitter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from epochsink.sink.values import Committable, Epoch, LastDone


class WideCommitter(SinkCommitter, Protocol):
    """The committer of a sink for which one commit after another would add up, where an epoch has many tasks."""

    def commit_at_once(
        self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None
    ) -> Collection[int]:
        """Decide the parts of an epoch side by side; return the indices of those that are committed for certain.

        Called once, before `SinkCommitter.commit` is for each part that is not returned: nothing is said of those, so
        whatever goes wrong is left for that to meet again and to name. ``after`` as there. Raises what it raises where
        no part may be committed at all (`WentBack`).
        """
