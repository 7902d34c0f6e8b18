"""Refuse to apply epochs again where a marker does not tell what the target lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.elasticsearch.committable import PreparedEpoch
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from epochsink.sink import LastDone


def refuse_several_indices(done: LastDone) -> None:
    """Raise `ConfigurationError` for an epoch in a data stream, or in indices that its rows named."""
    recorded = [PreparedEpoch.from_json(part) for part in done.parts]
    if any(each.stream is not None or each.indices is not None for each in recorded):
        raise ConfigurationError(
            f"epoch {done.epoch} is in a data stream, or in indices that its rows named (index_by=): which of them a "
            "snapshot has brought back is not recorded, and epochs are not applied again to such a target",
            hint="load the input of what it lacks with a query of its own, then say so: epochsink accept CHECKPOINT "
            f"{done.epoch} --sink NAME",
        )
