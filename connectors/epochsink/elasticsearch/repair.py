"""Warn of what a repair cannot bring back, and refuse targets whose marker does not tell what they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.elasticsearch.committable import PreparedEpoch
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.sink import LastDone


def warning_of_letters(config: ElasticsearchConfig) -> str:
    """Return what to add to the warning of a repair if the sink has dead letters, else ""."""
    if config.dead_letter_index is None:
        return ""
    return (
        f"; the index of dead letters {config.dead_letter_index!r} must come from the same snapshot: letters that were "
        "written again since then are missing in the restored index, and no longer in the newer index of letters"
    )


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
