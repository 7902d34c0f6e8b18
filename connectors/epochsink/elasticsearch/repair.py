"""Warn of what a repair cannot bring back, and refuse targets whose marker does not tell what they lack."""

from __future__ import annotations

from epochsink.elasticsearch.committable import SpooledEpoch
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.errors import ConfigurationError
from epochsink.sink import Committables, LastDone, Losses
from epochsink.sink.marks import ReadMarks


class ElasticsearchLosses(Losses):
    """One search by the marker of an index."""

    def __init__(self, marks: ReadMarks, config: ElasticsearchConfig) -> None:
        super().__init__(marks)
        if config.dead_letter_index is not None:
            self.warning += (
                f"; the index of dead letters {config.dead_letter_index!r} must come from the same snapshot: letters "
                "that were written again since then are missing in the restored index, and no longer in the newer "
                "index of letters"
            )

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Return the part if the marker is older. Raises `ConfigurationError` if the epoch is in several indices."""
        lacking = super().lacking(sink, done)
        # Only now: a target that lacks nothing must not keep other sinks' targets from being repaired.
        if lacking:
            _refuse_several_indices(done)
        return lacking


def _refuse_several_indices(done: LastDone) -> None:
    """Raise `ConfigurationError` for an epoch in a data stream, or in indices that its rows named."""
    recorded = [SpooledEpoch.from_json(part) for part in done.parts]
    if any(each.stream is not None or each.indices is not None for each in recorded):
        raise ConfigurationError(
            f"epoch {done.epoch} is in a data stream, or in indices that its rows named (index_by=): which of them a "
            "snapshot has brought back is not recorded, and epochs are not applied again to such a target",
            hint="load the input of what it lacks with a query of its own, then say so: epochsink accept CHECKPOINT "
            f"{done.epoch} --sink NAME",
        )
