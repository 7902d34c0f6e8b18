"""Apply one epoch: send bulk requests in parallel, handle refused documents, write the marker last."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from epochsink import failpoints
from epochsink.elasticsearch import applied_epochs, bulk_body, deduplicate, preflight, target_index
from epochsink.elasticsearch.applied_epochs import Lookout, Overtaken
from epochsink.elasticsearch.apply_on_executors import OnExecutors, PartJob
from epochsink.elasticsearch.bulk_body import Operations
from epochsink.elasticsearch.bulk_request import Poster, post_all
from epochsink.elasticsearch.changed_elsewhere import ChangedElsewhere
from epochsink.elasticsearch.data_stream import Copies, Created, Stream
from epochsink.elasticsearch.dead_letter import DeadLetters
from epochsink.elasticsearch.errors import Refusal, documents_rejected, too_many_letters
from epochsink.errors import OutcomeUnknown, RowsRejected
from epochsink.sink import NotCarriedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import elasticsearch
    import numpy as np
    import numpy.typing as npt

    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.elasticsearch.committable import PreparedEpoch
    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.elasticsearch.pace import Pace
    from epochsink.sink import Epoch, Executors, Identity, Rows

_log = logging.getLogger("epochsink")

_MOST_SHOWN: Final = 1000
_TURNS: Final = 3


class Application:
    """Applies an epoch, in one run or, if its target changes meanwhile, several. Every run sends the same operations.

    ``kept`` is the marker that was read before, ``found`` the index that was read after it. ``executors`` send the
    requests of a large epoch; None means that this process sends all of them. ``pace`` is that of the sink's requests.
    ``require_ours`` as in `Participant`. ``runs`` counts the runs that have begun.
    """

    def __init__(
        self,
        client: elasticsearch.Elasticsearch,
        config: ElasticsearchConfig,
        identity: Identity,
        *,
        epoch: Epoch,
        prepared: PreparedEpoch,
        kept: applied_epochs.Marker | None,
        found: target_index.Target | target_index.Targets | Stream,
        pace: Pace,
        executors: Executors | None = None,
        require_ours: Callable[[], object],
    ) -> None:
        self._client = client
        self._config = config
        self._identity = identity
        self._epoch = epoch
        self._prepared = prepared
        self._require_ours = require_ours
        self._kept = kept
        self._found = found
        self._pace = pace
        self._run = ""
        self._executors = executors
        self._parts: OnExecutors | None = None
        self._lookout = lookout = Lookout(client, identity, epoch)
        self._created = Created(prepared.index) if isinstance(found, Stream) else None
        # No version refuses a late document of a data stream: look before each request.
        self._look = lookout.now_and_then if self._created is None else lookout.now
        self._poster = self._poster_to(found)
        self.runs = 0
        self._searchable = False
        self._rejected: list[Refusal] = []
        self._set_aside = 0
        self._keyed = False
        self._dead_letters = (
            DeadLetters(
                client,
                config.dead_letter_index,
                prepared.index,
                identity,
                epoch,
                timeout=config.timeout,
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
        if self._executors is not None and self._created is None and self._is_large():
            by_task = self._prepared.by_task
            pipeline = self._prepared.pipeline
            job = PartJob(
                self._config,
                self._identity,
                self._epoch,
                rows,
                by_task,
                pipeline,
                indices=tuple(self._prepared.indices or ()),
            )
            self._parts = OnExecutors(self._executors, job, self._prepared.tasks)
        # Verify all tasks before the first request: a partly applied, damaged epoch could not be undone.
        if not self._verified_on_executors():
            rows.verify()
        try:
            reached = self._apply_to_same_indices(rows)
        finally:
            self._pace.tell(f"epoch {self._epoch.number} to index {self._prepared.index!r}")
        if self._config.refresh and not self._searchable:
            # Before the marker: once it is written, no later run would refresh.
            reached.refresh(self._client)
        failpoints.reach("elasticsearch.marker.before")
        applied: dict[str, object] = {
            "run": self._run,
            "index": reached.index,
            "index_uuid": reached.uuid,
            "history": reached.history,
        }
        if self._prepared.placed_by:
            applied["placed_by"] = self._prepared.placed_by
        if reached.indices:
            applied["indices"] = [[name, *each] for name, each in reached.indices.items()]
        if not applied_epochs.write(self._client, self._identity, self._epoch, after=self._kept, **applied):
            raise Overtaken
        return self._set_aside

    def _apply_to_same_indices(self, rows: Rows) -> target_index.Target | target_index.Targets | Stream:
        """Apply the epoch to the index that each name resolves to, and again if an index or its pipeline changed."""
        pipeline = self._prepared.pipeline
        for _ in range(_TURNS):
            before = self._found
            self._poster = self._poster_to(before)
            # Letters of an earlier run do not count: this one may store their documents.
            self._run = uuid.uuid4().hex
            self.runs += 1
            self._apply(rows)
            # Read again: an index that was restored during the run, or a new target of the alias, may lack documents of
            # this epoch and of earlier ones.
            after = target_index.require_recorded(self._client, self._config, self._at(before), self._prepared)
            if self._created is not None and isinstance(after, Stream):
                self._created.require_within(after)
            if (before.incarnation, before.stored_in(pipeline)) == (after.incarnation, after.stored_in(pipeline)):
                return after
            self._found = after
        raise OutcomeUnknown(
            f"{self._prepared.index!r} named a different index, had a different ingest pipeline, or rolled over, in "
            f"each of {_TURNS} runs of epoch {self._epoch.number}",
            hint="leave the alias and the index settings unchanged, and start the query again: it applies the epoch",
        )

    def _poster_to(
        self, found: target_index.Target | target_index.Targets | Stream, *, refresh: bool = False
    ) -> Poster:
        return Poster(
            self._client,
            found.posted_to,
            self._config.timeout,
            self._look,
            refresh=refresh,
            pipeline=self._prepared.pipeline,
            stored_in=found.stored_in(self._prepared.pipeline),
            pace=self._pace,
            created=self._created,
        )

    def _at(self, index: target_index.Target | target_index.Targets | Stream) -> applied_epochs.Marker | None:
        """Return the marker with ``index`` in place of the index that its epoch was applied to."""
        if self._kept is None:
            return None
        return replace(
            self._kept,
            index=index.index,
            index_uuid=index.uuid,
            history=index.history,
            indices=index.indices,
            placed_by=self._prepared.placed_by,
        )

    def _is_large(self) -> bool:
        most = self._config.executors_above
        return most is not None and self._prepared.rows > most and len(self._prepared.tasks) > 1

    def _verified_on_executors(self) -> bool:
        if self._parts is None:
            return False
        try:
            self._require_all(self._parts.verify())
        except NotCarriedOut as failure:
            self._go_on_alone(failure)
            return False
        return True

    def _go_on_alone(self, failure: NotCarriedOut) -> None:
        # Executors may already have applied some of it, or still do. Sending it again is safe: the same documents have
        # the same versions.
        _log.warning("executors could not apply epoch %d, so the driver applies it: %s", self._epoch.number, failure)
        self._parts = None

    def _apply(self, rows: Rows) -> None:
        self._searchable = False
        self._set_aside = 0
        if not self._applied_on_executors(rows):
            self._apply_here(rows)
        if self._rejected:
            raise self._stopped()

    def _applied_on_executors(self, rows: Rows) -> bool:
        if self._parts is None:
            return False
        survives = self._survivors(rows)
        try:
            posted = self._parts.post(survives, self._found.posted_to, self._poster.stored_in)
        except NotCarriedOut as failure:
            self._go_on_alone(failure)
            return False
        failpoints.reach("elasticsearch.parts.after")
        for partition, each in enumerate(posted):
            # More documents were refused than a result may hold. The driver sends the part again, request by request.
            if each.rows < 0:
                requests = self._of_task(rows, partition, self._parts.flags(partition, survives))
                post_all(self._poster, requests, self._config.threads, self._answered)
            elif each.refused:
                self._keyed = each.keyed
                self._judge(each.refused)
        return True

    def _apply_here(self, rows: Rows) -> None:
        requests = bulk_body.gathered(self._requests(rows), self._config.bulk_bytes)
        first = list(islice(requests, 2))
        # On an index that does not refresh itself, an epoch should appear in all shards at once. A separate refresh
        # comes close to that; a refresh within a bulk request does not.
        if len(first) == 1 and self._config.refresh and self._found.refreshes_itself:
            self._apply_searchable(first[0])
        else:
            post_all(self._poster, chain(first, requests), self._config.threads, self._answered)

    def _apply_searchable(self, request: Request) -> None:
        """Apply an epoch with one request that also refreshes the index, which takes a third less time."""
        refused = self._poster_to(self._found, refresh=True).post(request)
        # Documents changed elsewhere are overwritten by other requests, which do not refresh.
        self._searchable = not refused
        self._answered(refused)

    def _answered(self, refused: Sequence[Refusal]) -> None:
        self._judge(refused)
        failpoints.reach("elasticsearch.bulk.between")

    def _requests(self, rows: Rows) -> Iterator[Request]:
        survives = self._survivors(rows)
        counted = 0
        for partition in range(len(self._prepared.tasks)):
            counted += yield from self._of_task(rows, partition, None if survives is None else survives[counted:])
        self._require_all(counted)

    def _of_task(
        self, rows: Rows, partition: int, survives: npt.NDArray[np.bool_] | None
    ) -> Generator[Request, None, int]:
        task = self._prepared.tasks[partition]
        if self._prepared.by_task:
            survives = deduplicate.survivors(rows, [task], self._prepared.rows)
        operations = Operations(
            self._identity,
            self._epoch,
            partition,
            task,
            size=self._config.bulk_bytes,
            indices=self._prepared.indices or (),
            creates=self._created is not None,
        )
        # Without a rollover since the vote, all documents are in one index, which refuses a second one of an _id.
        if isinstance(self._found, Stream) and len(self._found.backing) > 1:
            count = sum(batch.num_rows for batch in rows.read(task))
            survives = Copies(self._client, self._found).missing(operations.prefix, count)
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
        if not self._prepared.replaced:
            return None
        return deduplicate.survivors(rows, self._prepared.tasks, self._prepared.rows)

    def _require_all(self, counted: int) -> None:
        if counted != self._prepared.rows:
            raise OutcomeUnknown(
                f"the spool of epoch {self._epoch.number} holds {counted} rows, but the ledger records "
                f"{self._prepared.rows}",
                hint="find out what changed or removed spool files; `epochsink resolve` lists the choices",
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
                self._client,
                self._poster,
                self._found.posted_to,
                base=base,
                version=base + self._epoch.number,
                stop_if_overtaken=self._stop_if_overtaken,
            )
            others += changed_elsewhere.overwrite(conflicts, keyed=self._keyed)
        if others and self._dead_letters is not None:
            self._refuse_unfit_index(others)
            self._dead_letters.keep(others, self._run)
            self._set_aside += len(others)
            if self._set_aside > self._config.letters_limit * self._prepared.rows:
                raise too_many_letters(
                    others, self._set_aside, self._prepared.rows, self._config.letters_limit, self._pending
                )
            return
        self._rejected += others
        # The error shows only a few of them, and millions would fill the memory.
        if len(self._rejected) >= _MOST_SHOWN:
            raise self._stopped()

    def _refuse_unfit_index(self, refusals: Sequence[Refusal]) -> None:
        """Stop if an index itself is at fault, for example lacks a pipeline: it would refuse every document."""
        for index in {refusal.place.get("_index", self._found.posted_to) for refusal in refusals}:
            if self._prepared.indices is not None and index not in self._prepared.indices:
                continue  # the name itself is at fault
            pipeline, routed = self._prepared.pipeline, self._config.routing is not None
            written = self._found.written if isinstance(self._found, Stream) else index
            poster = Poster(self._client, written, self._config.timeout, self._lookout.now_and_then, pipeline=pipeline)
            if faults_of_index := preflight.refused_by_index(self._client, written, poster, pipeline, routed=routed):
                raise RowsRejected(
                    f"the index {index!r} refuses even an empty document: {faults_of_index[0].reason}",
                    hint="correct its settings, pipelines or mapping; the epoch stays pending and nothing is set aside",
                )

    def _stopped(self) -> RowsRejected:
        return documents_rejected(self._rejected, f"index {self._prepared.index!r}; {self._pending}")

    @property
    def _pending(self) -> str:
        return f"epoch {self._epoch.number} stays pending in the ledger, and its rows in the spool: nothing is lost"
