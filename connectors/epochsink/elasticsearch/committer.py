"""The driver's side: applies a recorded epoch from the spool, and says so in the marker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import elasticsearch
from elastic_transport import TransportError

from epochsink.elasticsearch import applied_epochs, connection, deduplicate, index, preflight
from epochsink.elasticsearch.apply import Application, Overtaken
from epochsink.elasticsearch.backoff import GaveUp, delays
from epochsink.errors import OutcomeUnknown, PrepareFailed, SpoolDamaged, SpoolMissing, WentBack
from epochsink.sink import COMMITTED, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from epochsink.elasticsearch.sink import Elasticsearch
    from epochsink.sink import Committable, Epoch, Identity, Rows


class ElasticsearchCommitter:
    """Applies epochs to one index. Phase 1 is the spool; everything here can be repeated by any process."""

    def __init__(self, sink: Elasticsearch) -> None:
        self._sink = sink
        self._identity: Identity | None = None
        self._connected: elasticsearch.Elasticsearch | None = None

    @property
    def _client(self) -> elasticsearch.Elasticsearch:
        if self._connected is None:
            self._connected = self._sink.connect()
        return self._connected

    @property
    def _me(self) -> Identity:
        if self._identity is None:
            raise RuntimeError("open() has not been called")
        return self._identity

    def check(self, schema: pa.Schema) -> list[str]:
        """Compare the configuration with the server; create what may be created."""
        return preflight.findings(self._client, self._sink, schema)

    def initial_state(self) -> dict[str, Any]:
        """Claim the version base of this sink."""
        with connection.explained(PrepareFailed, "claiming a version base"):
            return {"base": applied_epochs.claim_base(self._client)}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is."""
        self._identity = identity

    def newest(self) -> int | None:
        """Return the newest epoch that the marker says is applied."""
        with connection.explained(OutcomeUnknown, f"reading the marker in {applied_epochs.INDEX!r}"):
            kept = applied_epochs.read(self._client, self._me)
        return None if kept is None else kept.epoch

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:
        """Verify spool, target and ids. Raises `PrepareFailed`, `RowsRejected` or `WentBack`."""
        tasks = list(rows.tasks())
        expected = {part["task"]: part["rows"] for part in written}
        if set(tasks) != set(expected):
            raise PrepareFailed(
                f"the spool of epoch {epoch.number} holds tasks {tasks}, accepted were {sorted(expected)}"
            )
        with connection.explained(PrepareFailed, f"looking at index {self._sink.index!r} and its marker"):
            kept = applied_epochs.read(self._client, self._me)
            self._refuse_epoch(epoch, kept)
            index.require_same(self._client, self._sink, kept)
            preflight.refuse_too_large(self._client, max(part["largest"] for part in written))
        total = sum(expected.values())
        return [{"tasks": tasks, "rows": total, "replaced": self._replaced(epoch, rows, tasks, total)}]

    def _replaced(self, epoch: Epoch, rows: Rows, tasks: Sequence[str], total: int) -> int:
        """Return how many rows give way to a later one of their id. Raises `RowsRejected` if that is uncertain."""
        if not self._sink.key:
            return 0
        counted, replaced = deduplicate.count(rows, tasks)
        if counted != total:
            raise PrepareFailed(f"the spool of epoch {epoch.number} holds {counted} rows, the tasks wrote {total}")
        if replaced:
            deduplicate.survivors(rows, tasks, ranked=self._sink.order_by is not None)
        return replaced

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:
        """Apply the epoch's operations, then write its marker. Raises `RowsRejected`, `WentBack`, `OutcomeUnknown`,
        `SpoolDamaged`.
        """
        waits = delays(self._sink.patience)
        while True:
            try:
                return self._commit(epoch, part, rows)
            except (elasticsearch.ApiError, TransportError) as error:
                said, hint = connection.describe(error)
                if not connection.is_passing(error):
                    raise OutcomeUnknown(f"applying epoch {epoch.number} failed: {said}", hint=hint) from error
                if (delay := next(waits, None)) is None:
                    return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} may be applied in part; {said}: {hint}")
                time.sleep(delay)

    def _commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:
        kept = applied_epochs.read(self._client, self._me)
        if (verdict := _told(kept, epoch)) is not None:
            return verdict
        try:
            Application(self._client, self._sink, self._me, epoch=epoch, part=part, kept=kept).run(rows)
        except Overtaken:
            return _told(applied_epochs.read(self._client, self._me), epoch) or Verdict(
                Outcome.UNKNOWN,
                f"epoch {epoch.number} is applied, but its marker in {applied_epochs.INDEX!r} cannot be written: "
                "somebody has deleted or changed that document",
            )
        except SpoolMissing as error:
            kept = applied_epochs.read(self._client, self._me)
            newest = "none" if kept is None else kept.epoch
            told = _told(kept, epoch)
            if told is None and isinstance(error, SpoolDamaged):
                raise
            return told or Verdict(
                Outcome.UNKNOWN,
                f"the spool of epoch {epoch.number} is gone ({error.message}) and the marker in "
                f"{applied_epochs.INDEX!r} says that epoch {newest} is the newest applied to index "
                f"{self._sink.index!r}",
            )
        except GaveUp as error:
            return Verdict(Outcome.UNKNOWN, f"epoch {epoch.number} is applied in part; {error}")
        return COMMITTED

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:  # noqa: ARG002 - the protocol's
        """Return the part: it is never ABORTED, since the spool is all that is prepared."""
        return part

    def abort_orphans(self, keep: Sequence[Committable]) -> list[str]:  # noqa: ARG002 - the protocol's
        """Find nothing: the target holds nothing before `commit`."""
        return []

    def await_visible(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Do nothing: `commit` has refreshed the index if it was asked to."""

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Do nothing: a committed epoch leaves nothing behind."""

    def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _refuse_epoch(self, epoch: Epoch, kept: applied_epochs.Marker | None) -> None:
        if kept is not None and kept.epoch >= epoch.number:
            raise WentBack(
                f"epoch {epoch.number} is about to be written, but index {self._sink.index!r} holds epoch {kept.epoch} "
                "of this sink already: the checkpoint is an older copy",
                hint="restore the newest copy of the checkpoint, or start with a new checkpoint",
            )
        if epoch.number >= applied_epochs.EPOCHS:
            raise PrepareFailed(
                f"epoch {epoch.number} is beyond the {applied_epochs.EPOCHS} that a version base has room for",
                hint="start with a new checkpoint",
            )


def _told(kept: applied_epochs.Marker | None, epoch: Epoch) -> Verdict | None:
    """Say what the marker tells about an epoch; None if it is not yet applied."""
    if kept is None or kept.epoch < epoch.number:
        return None
    if kept.epoch == epoch.number and kept.attempt != epoch.attempt:
        return Verdict(
            Outcome.UNKNOWN,
            f"the marker says that attempt {kept.attempt} of epoch {epoch.number} is applied to index "
            f"{kept.index!r}; recorded is attempt {epoch.attempt}",
        )
    return COMMITTED
