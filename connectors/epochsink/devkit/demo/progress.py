"""How far Spark's checkpoint has come in the topic of orders: which offsets belong to a decided epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from epochsink.protocol.storage import LocalStorage
from epochsink.spark.checkpoint import NOTHING_DECIDED, Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.devkit.demo.destination import Offsets


def decided_offsets(checkpoint: Path) -> Offsets:
    """Return where the newest epoch with a ``commits/N`` ends, for each partition; empty before the first."""
    files = LocalStorage(checkpoint)
    newest = Checkpoint(files).newest_decided()
    if newest == NOTHING_DECIDED:
        return {}
    text = (files.read(f"offsets/{newest}") or b"").decode()
    (ends,) = json.loads(text.splitlines()[2]).values()
    return {int(partition): end for partition, end in ends.items()}
