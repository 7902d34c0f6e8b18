"""Whether another driver has gone on meanwhile: looked at before anything is sent, in the driver and in executors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from epochsink.elasticsearch import applied_epochs

if TYPE_CHECKING:
    import elasticsearch

    from epochsink.sink import Epoch, Identity

LOOK_EVERY = 10.0
"""Seconds after which a run looks, before it sends more, whether it was overtaken: paused for long, it would bring back
documents whose deletion the server has forgotten (``gc_deletes``)."""


class Overtaken(Exception):
    """While this epoch was applied, another driver has applied it, or later ones."""


class Lookout:
    """Reads the marker now and then, from several threads. ``begun`` is when it was read last, in monotonic seconds."""

    def __init__(
        self, client: elasticsearch.Elasticsearch, identity: Identity, epoch: Epoch, begun: float | None = None
    ) -> None:
        self._client = client
        self._identity = identity
        self._epoch = epoch
        self._looked_at = time.monotonic() if begun is None else begun

    def now_and_then(self) -> None:
        """Look if the last look is long ago. Raises `Overtaken`."""
        if time.monotonic() - self._looked_at > LOOK_EVERY:
            self.now()

    def now(self) -> None:
        """Look. Raises `Overtaken`."""
        self._looked_at = time.monotonic()
        kept = applied_epochs.read(self._client, self._identity)
        if kept is not None and kept.epoch >= self._epoch.number:
            raise Overtaken
