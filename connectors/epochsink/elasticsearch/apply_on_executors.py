"""Run phase 2 of a large epoch on Spark's executors: they post the rows, and the driver handles what is refused.

An executor that lost its connection to the driver may post a part twice or late. That is safe: it sends the same
documents with the epoch's own version. The server refuses them if a later epoch has written, and otherwise stores the
same documents again. The executor also checks the marker before it begins and every few seconds. Only the driver
handles stored documents (those changed elsewhere, dead letters, the marker).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from epochsink import failpoints
from epochsink.elasticsearch import deduplicate
from epochsink.elasticsearch.applied_epochs import Lookout, Overtaken
from epochsink.elasticsearch.bulk_body import Operations
from epochsink.elasticsearch.bulk_request import Poster, post_all
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.deduplicate import NoTemporaryFiles
from epochsink.elasticsearch.errors import CLIENT_ERRORS, GaveUp, Refusal, UnfitIndex, describe, is_passing
from epochsink.elasticsearch.pace import Pace
from epochsink.errors import EpochsinkError
from epochsink.retry import retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import elasticsearch
    import numpy.typing as npt

    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.sink import Epoch, Executors, Identity, Rows

MOST_REFUSED: Final = 1_000
"""Largest number of refused documents of a part sent to the driver. If there are more, it applies the part itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one task: its place in the epoch, its uuid, and a bit for each row to send (None: all rows).

    ``rows`` is their number, once it is known.
    """

    partition: int
    task: str
    survives: bytes | None = None
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Posted:
    """The result of a part: number of rows, whether they have keys, the refused operations, or the error."""

    rows: int
    keyed: bool = False
    refused: tuple[Refusal, ...] = ()
    problem: Exception | None = None


class _TooManyRefused(Exception):
    """A part has more refused documents than it may send to the driver."""


@dataclass(frozen=True, slots=True)
class PartJob:
    """What an executor needs to apply parts of an epoch; pickled.

    ``indices`` as in `Operations`, ``index``, ``pipeline`` and ``stored_in`` as in `Poster`.
    """

    config: ElasticsearchConfig
    identity: Identity
    epoch: Epoch
    rows: Rows
    by_task: bool = False
    pipeline: str | None = None
    index: str = ""
    stored_in: str | None = None
    indices: tuple[str, ...] = ()

    def look(self, part: Part) -> Posted:
        """Compare a part's file with its record in the ledger, and count its rows."""
        try:
            return Posted(sum(batch.num_rows for batch in self.rows.read(part.task)))
        except EpochsinkError as problem:
            return Posted(0, problem=problem)

    def post(self, part: Part) -> Posted:
        """Send a part's operations, with the same retries as the driver."""
        try:
            # what fails is returned, not raised: Spark would run a task that raises again, and tell only its text
            return retrying(is_passing, seconds=self.config.timeout)(self._post, part)
        except (EpochsinkError, GaveUp, UnfitIndex, Overtaken) as problem:
            return Posted(0, problem=problem)
        except NoTemporaryFiles as problem:
            return Posted(0, problem=UnfitIndex(f"an executor: {problem.message}", problem.hint))
        except CLIENT_ERRORS as failure:
            said, hint = describe(failure)
            return Posted(0, problem=GaveUp(said) if is_passing(failure) else UnfitIndex(said, hint))

    def _post(self, part: Part) -> Posted:
        client = _client(self.config)
        lookout = Lookout(client, self.identity, self.epoch)
        # A task that was delayed, or repeated after the epoch was applied, must send nothing.
        lookout.now()
        pace = _pace(self.config)
        poster = Poster(
            client,
            self.index,
            self.config.timeout,
            lookout.now_and_then,
            pipeline=self.pipeline,
            stored_in=self.stored_in,
            pace=pace,
        )
        operations = Operations(
            self.identity,
            self.epoch,
            part.partition,
            part.task,
            size=self.config.bulk_bytes,
            indices=self.indices,
        )
        survives = self._survivors(part)
        refused: list[Refusal] = []

        def answered(refusals: Sequence[Refusal]) -> None:
            refused.extend(refusals)
            failpoints.reach("elasticsearch.part.between")
            if len(refused) > MOST_REFUSED:
                raise _TooManyRefused

        try:
            post_all(poster, operations.requests(self.rows, survives), self.config.threads, answered)
            if operations.unplaced:
                answered(operations.unplaced)
        except _TooManyRefused:
            return Posted(-1)
        finally:
            pace.tell(f"epoch {self.epoch.number} to index {self.index!r}, task {part.partition}")
        return Posted(operations.seen, operations.keyed, tuple(refused))

    def _survivors(self, part: Part) -> npt.NDArray[np.bool_] | None:
        """Return which rows of a part to send: found by the driver, or here if no other task shares its ids."""
        if self.by_task:
            return deduplicate.survivors(self.rows, [part.task], part.rows)
        return None if part.survives is None else np.unpackbits(np.frombuffer(part.survives, np.uint8)).astype(bool)


@lru_cache(maxsize=4)
def _client(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    """Return a client, one for each executor process, so that its connections stay open between parts."""
    return connect(config)


@lru_cache(maxsize=4)
def _pace(config: ElasticsearchConfig) -> Pace:
    """Return the pace of an executor process: its next part begins as the last one ended."""
    return Pace(config.bulk_bytes, config.threads)


class OnExecutors:
    """Lets executors verify and apply the parts of an epoch. Every method may raise `NotCarriedOut`."""

    def __init__(self, executors: Executors, job: PartJob, tasks: Sequence[str]) -> None:
        self._executors = executors
        self._job = job
        self._tasks = tasks
        self._ends: list[int] = []

    def verify(self) -> int:
        """Compare all files with their records in the ledger; return the number of rows. Raises as `Rows.read`."""
        looked = self._map(self._job.look, [Part(number, task) for number, task in enumerate(self._tasks)])
        self._ends = list(accumulate(each.rows for each in looked))
        return self._ends[-1]

    def post(self, survives: npt.NDArray[np.bool_] | None, index: str, stored_in: str | None) -> list[Posted]:
        """Apply all verified parts; return the result of each. ``index`` and ``stored_in`` as in `Poster`.

        Raises `Overtaken`, `GaveUp`, `UnfitIndex`, and what `Rows.read` raises.
        """
        parts = []
        for number, task in enumerate(self._tasks):
            flags = self.flags(number, survives)
            packed = None if flags is None else np.packbits(flags).tobytes()
            parts.append(Part(number, task, packed, self._ends[number] - ([0, *self._ends])[number]))
        return self._map(replace(self._job, index=index, stored_in=stored_in).post, parts)

    def flags(self, partition: int, survives: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
        """Return which rows of a part to send, from the flags of the whole epoch."""
        return None if survives is None else survives[([0, *self._ends])[partition] : self._ends[partition]]

    def _map(self, function: Callable[[Part], Posted], parts: Sequence[Part]) -> list[Posted]:
        answers = self._executors.map(function, parts, self._job.config.timeout)
        for answer in answers:
            if answer.problem is not None:
                raise answer.problem
        return answers
