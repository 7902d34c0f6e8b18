"""Apply one epoch: send bulk requests in parallel, handle refused documents, write the marker last."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from epochsink import failpoints
from epochsink.elasticsearch import applied_epochs, bulk_body, dead_letter, deduplicate, preflight, target_index
from epochsink.elasticsearch.applied_epochs import Lookout, MarkerDocument, Overtaken
from epochsink.elasticsearch.bulk_body import Operations, Request
from epochsink.elasticsearch.bulk_request import Poster, post_all
from epochsink.elasticsearch.changed_elsewhere import ChangedElsewhere
from epochsink.elasticsearch.committable import SpooledEpoch
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.data_stream import Copies, Created
from epochsink.elasticsearch.dead_letter import DeadLetters
from epochsink.elasticsearch.errors import Refusal, documents_rejected, too_many_letters
from epochsink.elasticsearch.pace import Pace
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.target import ElasticsearchTarget
from epochsink.errors import OutcomeUnknown, RowsRejected
from epochsink.retry import Clock
from epochsink.sink import Epoch, Identity, Rows, over_limit

_MOST_SHOWN: Final = 1000
_MOST_RUNS: Final = 100
"""With more runs than this, the marker names only those whose letters are still there."""
_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What is the same for all epochs of a sink. ``require_ours`` as in `Participant`."""

    server: ElasticsearchServer
    clock: Clock
    config: ElasticsearchConfig
    identity: Identity
    pace: Pace
    require_ours: Callable[[], object]


class Application:
    """Applies an epoch, in one run or, if its target changes meanwhile, several. Every run sends the same operations.

    ``kept`` is the marker that was read before, ``target`` was read after it. ``run`` names the first run, ``runs``
    counts those that have begun.
    """

    def __init__(
        self,
        sink: SinkContext,
        epoch: Epoch,
        spooled: SpooledEpoch,
        *,
        kept: MarkerDocument | None,
        target: ElasticsearchTarget,
        run: str,
    ) -> None:
        self._server = server = sink.server
        self._clock = clock = sink.clock
        self._config = config = sink.config
        self._identity = identity = sink.identity
        self._pace = sink.pace
        self._require_ours = sink.require_ours
        self._epoch = epoch
        self._spooled = spooled
        self._kept = kept
        self._target = target
        self._run = run
        self._lookout = lookout = Lookout(server, identity, epoch, clock)
        self._created = Created(spooled.index) if target.appends else None
        # No version refuses a late document of a data stream: look before each request.
        self._look = lookout.now_and_then if self._created is None else lookout.now
        self._poster = self._poster_to(target)
        self.runs = 0
        self._searchable = False
        self._rejected: list[Refusal] = []
        self._set_aside = 0
        self._keyed = False
        self._dead_letters = (
            DeadLetters(
                server,
                config.dead_letter_index,
                spooled.index if spooled.indices is None else None,
                identity,
                epoch,
                timeout=config.timeout,
                clock=clock,
                # Before each request: a letter written after the successor deleted this run's letters would remain.
                stop_if_overtaken=self._lookout.now,
            )
            if config.dead_letter_index
            else None
        )

    def run(self, rows: Rows) -> int:
        """Apply everything, then write the marker; return how many rows became dead letters.

        Raises `Overtaken`, `GaveUp`, `RowsRejected`, `SpoolMissing`, `OutcomeUnknown`, `WentBack`.
        """
        # Verify all tasks before the first request: a partly applied, damaged epoch could not be undone.
        rows.verify()
        try:
            reached = self._apply_to_same_indices(rows)
        finally:
            self._pace.tell(f"epoch {self._epoch.number} to index {self._spooled.index!r}")
        if self._config.refresh and not self._searchable:
            # Before the marker: once it is written, no later run would refresh.
            reached.refresh(self._server)
        failpoints.reach("elasticsearch.marker.before")
        applied: dict[str, object] = {"run": self._run, "index": reached.index}
        applied["index_uuid"], applied["history"] = reached.incarnation
        if self._spooled.placed_by:
            applied["placed_by"] = self._spooled.placed_by
        if reached.indices:
            applied["indices"] = [[name, *each] for name, each in reached.indices.items()]
        if letters := self._letters():
            applied["letters"] = letters
        after, clock = self._kept, self._clock
        if not applied_epochs.write(
            self._server, self._identity, self._epoch, after=after, applied=applied, clock=clock
        ):
            raise Overtaken
        return self._set_aside

    def _letters(self) -> dict[str, int]:
        """Return `MarkerDocument.letters` of this epoch's marker."""
        known = dict(self._kept.letters) if self._kept else {}
        if not self._set_aside or self._config.dead_letter_index is None:
            return known
        if self._run not in known and len(known) >= _MOST_RUNS:
            known = dead_letter.with_letters(self._server, self._config.dead_letter_index, known)
        return {**known, self._run: self._epoch.number}

    def _apply_to_same_indices(self, rows: Rows) -> ElasticsearchTarget:
        """Apply the epoch to the index that each name resolves to, and again if an index or its pipeline changed."""
        pipeline = self._spooled.pipeline
        for _ in range(_TURNS):
            before = self._target
            self._poster = self._poster_to(before)
            if self.runs:
                # Letters of an earlier run do not count: this one may store their documents.
                self._run = uuid.uuid4().hex
            self.runs += 1
            self._apply(rows)
            # Read again: an index that was restored during the run, or a new target of the alias, may lack documents of
            # this epoch and of earlier ones.
            after = target_index.require_recorded(self._server, self._config, self._at(before), self._spooled)
            if self._created is not None:
                self._created.require_within(after.indices)
            if (before.incarnations, before.stored_in(pipeline)) == (after.incarnations, after.stored_in(pipeline)):
                return after
            self._target = after
        raise OutcomeUnknown(
            f"{self._spooled.index!r} named a different index, had a different ingest pipeline, or rolled over, in "
            f"each of {_TURNS} runs of epoch {self._epoch.number}",
            hint="leave the alias and the index settings unchanged, and start the query again: it applies the epoch",
        )

    def _poster_to(self, target: ElasticsearchTarget, *, refresh: bool = False) -> Poster:
        return Poster(
            self._server,
            target.posted_to,
            self._config.timeout,
            self._look,
            refresh=refresh,
            pipeline=self._spooled.pipeline,
            stored_in=target.stored_in(self._spooled.pipeline),
            pace=self._pace,
            created=self._created,
        )

    def _at(self, target: ElasticsearchTarget) -> MarkerDocument | None:
        """Return the marker with ``target`` in place of the one that its epoch was applied to."""
        if self._kept is None:
            return None
        index_uuid, history = target.incarnation
        return replace(
            self._kept,
            index=target.index,
            index_uuid=index_uuid,
            history=history,
            indices=target.indices,
            placed_by=self._spooled.placed_by,
        )

    def _apply(self, rows: Rows) -> None:
        self._searchable = False
        self._set_aside = 0
        requests = bulk_body.gathered(self._requests(rows), self._config.bulk_bytes)
        first = list(islice(requests, 2))
        # On an index that does not refresh itself, an epoch should appear in all shards at once. A separate refresh
        # comes close to that; a refresh within a bulk request does not.
        if len(first) == 1 and self._config.refresh and self._target.refreshes_itself:
            self._apply_searchable(first[0])
        else:
            post_all(self._poster, chain(first, requests), self._pace.most, self._answered)
        if self._rejected:
            raise self._stopped()

    def _apply_searchable(self, request: Request) -> None:
        """Apply an epoch with one request that also refreshes the index, which takes a third less time."""
        refused = self._poster_to(self._target, refresh=True).post(request)
        # Documents changed elsewhere are overwritten by other requests, which do not refresh.
        self._searchable = not refused
        self._answered(refused)

    def _answered(self, refused: Sequence[Refusal]) -> None:
        self._judge(refused)
        failpoints.reach("elasticsearch.bulk.between")

    def _requests(self, rows: Rows) -> Iterator[Request]:
        survives = self._survivors(rows)
        counted = 0
        for partition in range(len(self._spooled.tasks)):
            counted += yield from self._of_task(rows, partition, None if survives is None else survives[counted:])
        self._require_all(counted)

    def _of_task(
        self, rows: Rows, partition: int, survives: npt.NDArray[np.bool_] | None
    ) -> Generator[Request, None, int]:
        task = self._spooled.tasks[partition]
        if self._spooled.by_task:
            survives = deduplicate.survivors(rows, [task], self._spooled.rows)
        operations = Operations(
            self._identity,
            self._epoch,
            partition,
            task,
            size=self._config.bulk_bytes,
            indices=self._spooled.indices or (),
            creates=self._created is not None,
        )
        # Without a rollover since the vote, all documents are in one index, which refuses a second one of an _id.
        if self._target.appends and len(self._target.indices) > 1:
            count = sum(batch.num_rows for batch in rows.read(task))
            survives = Copies(self._server, self._target).missing(operations.prefix, count)
        for request in operations.requests(rows, survives):
            self._keyed = operations.keyed
            self._judge_unplaced(operations)
            yield request
        self._judge_unplaced(operations)
        return operations.seen

    def _judge_unplaced(self, operations: Operations) -> None:
        if operations.unplaced:
            self._judge(operations.unplaced)
            operations.unplaced = []

    def _survivors(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        # Equal versions overwrite each other in the order of arrival, so each id must be sent only once.
        if not self._spooled.replaced:
            return None
        return deduplicate.survivors(rows, self._spooled.tasks, self._spooled.rows)

    def _require_all(self, counted: int) -> None:
        if counted != self._spooled.rows:
            raise OutcomeUnknown(
                f"the spool of epoch {self._epoch.number} holds {counted} rows, but the ledger records "
                f"{self._spooled.rows}",
                hint="find out what has changed or removed files of the spool, and put them back. Look at the epoch: "
                "epochsink status CHECKPOINT",
            )

    def _stop_if_overtaken(self) -> None:
        """Raise `Overtaken` or `Fenced`: after a restore no marker may show the later epochs, but the ledger does."""
        self._lookout.now()
        self._require_ours()

    def _judge(self, refusals: Sequence[Refusal]) -> None:
        others = [refusal for refusal in refusals if not refusal.conflict]
        # In a data stream, the _id names the attempt: a document that exists is the one to write.
        if self._created is None and (conflicts := [refusal for refusal in refusals if refusal.conflict]):
            base = self._identity.origin["base"]
            changed_elsewhere = ChangedElsewhere(
                self._server,
                self._poster,
                self._target.posted_to,
                base=base,
                version=base + self._epoch.number,
                stop_if_overtaken=self._stop_if_overtaken,
            )
            others += changed_elsewhere.overwrite(conflicts, keyed=self._keyed)
        if others and self._dead_letters is not None:
            self._refuse_unfit_index(others)
            self._dead_letters.keep(others, self._run)
            self._set_aside += len(others)
            if over_limit(self._set_aside, self._spooled.rows, self._config.letters_limit):
                raise too_many_letters(
                    others, self._set_aside, self._spooled.rows, self._config.letters_limit, self._pending
                )
            return
        self._rejected += others
        # The error shows only a few of them, and millions would fill the memory.
        if len(self._rejected) >= _MOST_SHOWN:
            raise self._stopped()

    def _refuse_unfit_index(self, refusals: Sequence[Refusal]) -> None:
        """Stop if an index itself is at fault, for example lacks a pipeline: it would refuse every document."""
        for index in {refusal.place.get("_index", self._target.posted_to) for refusal in refusals}:
            if self._spooled.indices is not None and index not in self._spooled.indices:
                continue  # the name itself is at fault
            pipeline, routed = self._spooled.pipeline, self._config.routing is not None
            written = self._target.index_behind(index)
            poster = Poster(self._server, written, self._config.timeout, self._lookout.now_and_then, pipeline=pipeline)
            if faults_of_index := preflight.refused_by_index(self._server, written, poster, pipeline, routed=routed):
                raise RowsRejected(
                    f"the index {index!r} refuses even an empty document: {faults_of_index[0].reason}",
                    hint="correct its settings, pipelines or mapping; the epoch stays pending and nothing is set aside",
                )

    def _stopped(self) -> RowsRejected:
        return documents_rejected(self._rejected, f"index {self._spooled.index!r}; {self._pending}")

    @property
    def _pending(self) -> str:
        return f"epoch {self._epoch.number} stays pending in the ledger, and its rows in the spool: nothing is lost"
