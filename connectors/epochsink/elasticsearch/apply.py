"""Applying one epoch: bulk requests in parallel, what is refused judged, the marker written last."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink import failpoints
from epochsink.elasticsearch import applied_epochs, bulk_body, deduplicate, target_index, validation
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.changed_elsewhere import ChangedElsewhere
from epochsink.elasticsearch.dead_letter import DeadLetters
from epochsink.elasticsearch.errors import Refusal, documents_rejected
from epochsink.errors import OutcomeUnknown, RowsRejected
from epochsink.identity import document_id_prefix, identity_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import elasticsearch

    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.elasticsearch.committable import PreparedEpoch
    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.sink import Epoch, Identity, Rows

_MOST_SHOWN: Final = 1000
_TURNS: Final = 3

LOOK_EVERY = 10.0
"""Seconds after which a run looks, before it sends more, whether it was overtaken: paused for long, it would bring back
documents whose deletion the server has forgotten (``gc_deletes``)."""


class Overtaken(Exception):
    """While this epoch was applied, another driver has applied it, or later ones."""


class Application:
    """One run at applying one part of an epoch. A further run does the same again.

    ``kept`` is the marker as read before; ``trusted`` is it too, unless an operator vouches for the index as it is.
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
        trusted: applied_epochs.Marker | None,
    ) -> None:
        self._client = client
        self._config = config
        self._identity = identity
        self._epoch = epoch
        self._prepared = prepared
        self._index = prepared.index or config.index
        self._kept = kept
        self._trusted = trusted
        self._run = uuid.uuid4().hex
        self._looked_at = time.monotonic()
        self._version = identity.origin["base"] + epoch.number
        self._poster = Poster(client, self._index, config.timeout, self._look_now_and_then)
        self._searchable = False
        self._rejected: list[Refusal] = []
        self._keyed = False
        self._changed_elsewhere = ChangedElsewhere(
            client,
            self._poster,
            self._index,
            base=identity.origin["base"],
            version=self._version,
            stop_if_overtaken=self._stop_if_overtaken,
        )
        self._dead_letters = (
            DeadLetters(
                client,
                config.dead_letter_index,
                self._index,
                identity,
                epoch,
                run=self._run,
                timeout=config.timeout,
                # Each time: a letter written after the successor has cleared away would stay.
                stop_if_overtaken=self._stop_if_overtaken,
            )
            if config.dead_letter_index
            else None
        )

    def run(self, rows: Rows) -> None:
        """Apply everything, then write the marker.

        Raises `Overtaken`, `GaveUp`, `RowsRejected`, `SpoolMissing`, `OutcomeUnknown`, `WentBack`.
        """
        # of all tasks before the first request: what was applied of a damaged epoch could not be taken back
        rows.verify()
        reached = self._apply_to_one_index(rows)
        if self._config.refresh and not self._searchable:
            # Before the marker: once that is written, nobody would come back to refresh.
            self._client.indices.refresh(index=self._index)
        failpoints.reach("elasticsearch.marker.before")
        applied = {
            "run": self._run,
            "index": reached.index,
            "index_uuid": reached.uuid,
            "history": reached.history,
        }
        if not applied_epochs.write(self._client, self._identity, self._epoch, after=self._kept, **applied):
            raise Overtaken

    def _apply_to_one_index(self, rows: Rows) -> target_index.Target:
        """Apply all to the index that the name stands for; where no epoch was before, again if that has changed."""
        before = target_index.require_same(self._client, self._index, self._trusted, self._config.accept_index)
        for _ in range(_TURNS):
            self._apply(rows)
            # asked again: what was restored, or moved to, while this ran may lack any of it, and of the epochs before
            after = target_index.require_same(self._client, self._index, self._at(before), self._config.accept_index)
            if (before.index, before.incarnation) == (after.index, after.incarnation):
                return after
            before = after
        raise OutcomeUnknown(
            f"{self._index!r} stood for another index after each of {_TURNS} runs at epoch {self._epoch.number}",
            hint="keep the alias still and start the query again: the epoch is then applied",
        )

    def _at(self, index: target_index.Target) -> applied_epochs.Marker | None:
        """Return the marker as it would be, had its epoch been applied to what the index is now."""
        if self._kept is None:
            return None
        return replace(self._kept, index=index.index, index_uuid=index.uuid, history=index.history)

    def _apply(self, rows: Rows) -> None:
        self._searchable = False
        requests = self._requests(rows)
        first = list(islice(requests, 2))
        # held back, an epoch shall appear in all shards at once: only a refresh of its own comes close to that
        if len(first) == 1 and self._config.refresh and not self._config.epoch_visibility:
            self._apply_searchable(first[0])
        else:
            self._apply_in_parallel(chain(first, requests))
        if self._rejected:
            raise self._stopped()

    def _apply_searchable(self, request: Request) -> None:
        """Apply an epoch of one request, which refreshes the index too: a third of a small epoch's time is saved."""
        poster = Poster(self._client, self._index, self._config.timeout, self._look_now_and_then, refresh=True)
        refused = poster.post(request)
        # what is written over documents changed elsewhere goes by other requests
        self._searchable = not refused
        self._judge(refused)
        failpoints.reach("elasticsearch.bulk.between")

    def _apply_in_parallel(self, requests: Iterable[Request]) -> None:
        with ThreadPoolExecutor(self._config.threads, thread_name_prefix="epochsink-bulk") as pool:
            under_way: set[Future[list[Refusal]]] = set()
            try:
                for request in requests:
                    under_way.add(pool.submit(self._poster.post, request))
                    if len(under_way) > self._config.threads:
                        under_way = self._settle(under_way)
                while under_way:
                    under_way = self._settle(under_way)
            except BaseException:
                self._poster.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _settle(self, under_way: set[Future[list[Refusal]]]) -> set[Future[list[Refusal]]]:
        ended, going_on = wait(under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            self._judge(future.result())
            failpoints.reach("elasticsearch.bulk.between")
        return going_on

    def _look_now_and_then(self) -> None:
        if time.monotonic() - self._looked_at > LOOK_EVERY:
            self._stop_if_overtaken()

    def _stop_if_overtaken(self) -> None:
        self._looked_at = time.monotonic()
        kept = applied_epochs.read(self._client, self._identity)
        if kept is not None and kept.epoch >= self._epoch.number:
            raise Overtaken

    def _requests(self, rows: Rows) -> Iterator[Request]:
        heads = bulk_body.action_heads(version=self._version, version_type="external_gte")
        counted = 0
        for ids, sources, seen in self._columns(rows):
            yield from bulk_body.cut(bulk_body.render(ids, sources, heads), self._config.bulk_bytes)
            counted += seen
        if counted != self._prepared.rows:
            raise OutcomeUnknown(
                f"the spool of epoch {self._epoch.number} holds {counted} rows, recorded are {self._prepared.rows}",
                hint="look for what has changed or removed spool files; `epochsink resolve` says what can be done",
            )

    def _columns(self, rows: Rows) -> Iterator[tuple[pa.Array, pa.Array, int]]:
        """Yield ids and documents of about one request each, and how many spooled rows they stand for."""
        tasks = self._prepared.tasks
        survives = None
        if self._prepared.replaced:
            survives = deduplicate.survivors(rows, tasks, self._prepared.rows)
        start = 0
        for partition, task in enumerate(tasks):
            prefix = f"{document_id_prefix(identity_key(self._identity), self._epoch.number)}{partition}-"
            row = 0
            for batches in _gathered(rows.read(task), self._config.bulk_bytes):
                seen = sum(map(len, batches))
                sources = pa.concat_arrays([batch.column("source") for batch in batches])
                # The spool says whether there is a key: a later start with other options must not change that.
                self._keyed = "id" in batches[0].schema.names
                if self._keyed:
                    ids = pa.concat_arrays([batch.column("id") for batch in batches])
                else:
                    ids = bulk_body.position_ids(prefix, row, seen)
                if survives is not None:
                    mask = pa.array(survives[start : start + seen])
                    ids, sources = ids.filter(mask), sources.filter(mask)
                yield ids, sources, seen
                row += seen
                start += seen

    def _judge(self, refusals: Sequence[Refusal]) -> None:
        others = [refusal for refusal in refusals if not refusal.conflict]
        if conflicts := [refusal for refusal in refusals if refusal.conflict]:
            others += self._changed_elsewhere.overwrite(conflicts, keyed=self._keyed)
        if others and self._dead_letters is not None:
            self._refuse_unfit_index()
            self._dead_letters.keep(others)
            return
        self._rejected += others
        if len(self._rejected) >= _MOST_SHOWN:
            raise self._stopped()

    def _refuse_unfit_index(self) -> None:
        """Keep a fault of the index (a missing pipeline, say) from setting every document aside."""
        if faults_of_index := validation.refused_by_index(self._client, self._index, self._poster):
            raise RowsRejected(
                f"the index {self._index!r} refuses even an empty document: {faults_of_index[0].reason}",
                hint="correct its settings, pipelines or mapping; the epoch stays pending and nothing is set aside",
            )

    def _stopped(self) -> RowsRejected:
        state = f"epoch {self._epoch.number} stays pending in the ledger, and its rows in the spool: nothing is lost"
        return documents_rejected(self._rejected, f"index {self._index!r}; {state}")


def _gathered(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield small batches together, at least ``size`` bytes of them."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(each.nbytes for each in gathered) >= size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
