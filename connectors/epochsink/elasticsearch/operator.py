"""What an operator asks of an Elasticsearch sink, and the marker that its answers and the commits compare."""
# ruff: noqa: ARG002 - a participant has one sink

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from epochsink.elasticsearch import applied_epochs, errors
from epochsink.elasticsearch.applied_epochs import MarkerDocument
from epochsink.elasticsearch.audit import audit
from epochsink.elasticsearch.committable import SpooledEpoch
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.examine import examine
from epochsink.elasticsearch.letters import ElasticsearchLetters
from epochsink.elasticsearch.repair import ElasticsearchLosses
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import OutcomeUnknown
from epochsink.retry import Clock, retrying
from epochsink.sink import (
    Committable,
    Comparison,
    Finding,
    Identity,
    LastDone,
    Mark,
    Marks,
    Operator,
    Participant,
    Receipt,
    marks_left,
)


class ElasticsearchOperator(Operator):
    """Answers an operator's commands for one index."""

    def __init__(
        self, participant: Participant, server: ElasticsearchServer, clock: Clock, config: ElasticsearchConfig
    ) -> None:
        self._marks = participant.marks
        self._identities = participant.identities
        self._server = server
        self._clock = clock
        self._config = config

    def examine(self, sink: str) -> Iterator[Finding]:
        """Look at the cluster; see `epochsink.elasticsearch.examine`."""
        return examine(self._server, self._config)

    def audit(self, sink: str, receipts: Sequence[Receipt], newest: int) -> Sequence[Comparison]:
        """Count each epoch's documents; see `epochsink.elasticsearch.audit`."""
        with errors.explained(OutcomeUnknown, f"counting the documents of index {self._config.shown_index!r}"):
            return audit(self._server, self._config, self._identities[sink], receipts, newest=newest)

    def letters(self, sink: str) -> ElasticsearchLetters | None:
        """Return the letters in ``dead_letter_index``."""
        index = self._config.dead_letter_index
        if index is None:
            return None
        return ElasticsearchLetters(self._server, self._clock, self._config, self._identities[sink], index)

    def losses(self) -> ElasticsearchLosses:
        """Return a search by the marker; see `epochsink.elasticsearch.repair`."""
        return ElasticsearchLosses(self._marks, self._config)

    def describe(self, part: Committable) -> str:
        """Return the number of spooled rows and their index."""
        prepared = SpooledEpoch.from_json(part)
        return f"{prepared.rows} row(s) in the spool for index {prepared.index!r}"


def read_marker(
    server: ElasticsearchServer, config: ElasticsearchConfig, identity: Identity, clock: Clock = time
) -> MarkerDocument | None:
    """Return the marker, patiently: a server that restarts must not end the query. Raises `OutcomeUnknown`."""
    with errors.explained(OutcomeUnknown, f"reading the marker in {applied_epochs.INDEX!r}"):
        patiently = retrying(errors.is_passing, seconds=config.timeout, clock=clock)
        marker: MarkerDocument | None = patiently(applied_epochs.read, server, identity)
        return marker


def marks_in(
    kept: MarkerDocument | None, config: ElasticsearchConfig, done: LastDone | None, pending: LastDone | None
) -> Marks:
    """Return the mark that a marker holds, beside those that these epochs leave."""
    marks = {} if kept is None else {"": Mark(kept.epoch, kept.attempt)}
    return Marks(f"index {config.shown_index!r}", marks, marks_left(done), marks_left(pending))
