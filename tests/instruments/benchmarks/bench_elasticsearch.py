"""`make bench ONLY=elasticsearch`: the Elasticsearch sink against parallel_bulk, and against the server's limit."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import elasticsearch
from beside import Beside
from elasticsearch import helpers
from epochs import (
    FIRST,
    make_rows,
    noop,
    our_epoch,
    plain_epoch,
    session,
    small_epochs,
    stream,
    ticks,
    timed_files,
)
from measure import Report, console, sizes, spread
from pyarrow import parquet

from epochsink import Elasticsearch
from epochsink_devkit.services import LocalElasticsearch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Row, SparkSession

    from epochsink_devkit.services import ElasticsearchService

EPOCHS = 5
"""Timed epochs, one right after the other: an epoch is applied while the next one is being spooled."""
SHARDS = 2
REQUEST_DOCUMENTS = 10_000
WINDOW_DOCUMENTS = 10_000
MAPPING = {
    "id": {"type": "long"},
    "payload": {"type": "keyword"},
    "amount": {"type": "double"},
    "placed_at": {"type": "date"},
}


class Bench:
    """The server, the documents, and the ways to write them."""

    def __init__(self, spark: SparkSession, server: ElasticsearchService, rows: int, folder: Path) -> None:
        self.spark = spark
        self.url = server.url
        self.rows = rows
        self.path = make_rows(spark, folder, rows, EPOCHS)
        self.client = elasticsearch.Elasticsearch(self.url, request_timeout=120)
        self.bodies = list(self.rendered())

    def index(self, shards: int = SHARDS, **more: str) -> str:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        settings = {"number_of_shards": shards, "number_of_replicas": 0, "gc_deletes": "1h", **more}
        self.client.indices.create(index=name, settings=settings, mappings={"properties": MAPPING})
        return name

    def check_and_delete(self, index: str, expected: int) -> None:
        self.client.indices.refresh(index=index)
        found = self.client.count(index=index)["count"]
        if found != expected:
            raise AssertionError(f"{found} documents instead of {expected}: the measurement means nothing")
        self.client.indices.delete(index=index)

    def ours(self) -> float:
        index = self.index()
        seconds = our_epoch(stream(self.spark, self.path), Elasticsearch(self.url, index=index, key="id"))
        self.check_and_delete(index, FIRST + self.rows)
        return seconds

    def parallel_bulk(self) -> float:
        index, url = self.index(), self.url

        def actions(rows: Iterator[Row]) -> Iterator[dict[str, object]]:
            for row in rows:
                yield {
                    "_index": index,
                    "_id": str(row.id),
                    "_source": row.asDict(),
                    "version": 1,
                    "version_type": "external_gte",
                }

        def write_partition(rows: Iterator[Row]) -> None:
            client = elasticsearch.Elasticsearch(url, request_timeout=120)
            for succeeded, item in helpers.parallel_bulk(client, actions(rows)):
                if not succeeded:
                    raise RuntimeError(item)

        frame = stream(self.spark, self.path)
        seconds = plain_epoch(frame, lambda batch, _epoch: batch.foreachPartition(write_partition))
        self.check_and_delete(index, FIRST + self.rows)
        return seconds

    def limit(self) -> float:
        """Post bulk requests rendered beforehand, by two threads."""
        index = self.index()
        url = f"{self.url}/{index}/_bulk?filter_path=errors"

        def post(body: bytes) -> None:
            headers = {"Content-Type": "application/x-ndjson"}
            request = urllib.request.Request(url, body, headers)  # noqa: S310 - our own server, on the loopback
            with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310 - likewise
                if json.load(reply).get("errors"):
                    raise RuntimeError("the server refused documents")

        begun = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(post, self.bodies))
        seconds = time.perf_counter() - begun
        self.check_and_delete(index, self.rows)
        return seconds

    def fair_limit(self) -> float:
        """Let Spark read the same rows in as many epochs and discard them, and post those requests."""
        return plain_epoch(stream(self.spark, self.path), noop) + self.limit()

    def rendered(self) -> Iterator[bytes]:
        table = parquet.read_table(timed_files(self.path))
        for batch in table.to_batches(max_chunksize=REQUEST_DOCUMENTS):
            lines = []
            for row in batch.to_pylist():
                action = {"index": {"_id": str(row["id"]), "version": 1, "version_type": "external_gte"}}
                lines += [json.dumps(action), json.dumps(row | {"placed_at": row["placed_at"].isoformat()})]
            yield ("\n".join(lines) + "\n").encode()

    def latencies(self, epochs: int) -> None:
        """Print how long after ``commits/N`` documents are searchable."""
        sink = Elasticsearch(self.url, index=self.index(), key="id", refresh=True)
        trigger, delays = small_epochs(ticks(self.spark, 100), sink, epochs)
        console.print(f"an epoch of 100 documents: {trigger:.0f} ms a trigger (median)")
        console.print(f"from commits/N to searchable documents (refresh=True): {spread(delays)}")

    def windows(self, epochs: int) -> None:
        """Print for how long searches saw a part of an epoch, with other refreshes held back and without."""
        frame = ticks(self.spark, WINDOW_DOCUMENTS)
        for shards, held in ((1, True), (2, True), (8, True), (2, False)):
            index = self.index(shards, refresh_interval="-1" if held else "1s")
            sink = Elasticsearch(self.url, index=index, key="id", refresh=held)
            with Onlooker(self.url, index, WINDOW_DOCUMENTS) as onlooker:
                small_epochs(frame, sink, epochs)
            console.print(f"{shards} shard(s), held back={held}: {onlooker.verdict()}", highlight=False)
            self.client.indices.delete(index=index)


class Onlooker(Beside):
    """Counts documents again and again; a count that is no multiple of an epoch's size has seen a part of one."""

    def __init__(self, url: str, index: str, epoch: int) -> None:
        super().__init__()
        self._client = elasticsearch.Elasticsearch(url)
        self._index = index
        self._epoch = epoch
        self._since: float | None = None
        self._until = 0.0
        self._windows: list[float] = []
        self._reads: list[float] = []
        self._newest = 0

    def look(self) -> None:
        """Count once."""
        began = time.perf_counter()
        self._newest = self._client.count(index=self._index)["count"]
        ended = time.perf_counter()
        self._reads.append((ended - began) * 1000)
        if self._newest % self._epoch:
            self._since, self._until = self._since or began, ended
        elif self._since is not None:
            self._windows.append((self._until - self._since) * 1000)
            self._since = None

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def verdict(self) -> str:
        """Say how many epochs were seen in part, for how long, and how closely was looked."""
        seen = f"{len(self._windows)} of {self._newest // self._epoch} epochs seen in part"
        if self._windows:
            seen += f", for {statistics.median(self._windows):.0f} ms (median), {max(self._windows):.0f} ms at the most"
        return f"{seen}; a count took {statistics.median(self._reads):.1f} ms (median)"


def main() -> None:
    """Measure everything."""
    options = sizes(__doc__, 1_000_000)
    with (
        tempfile.TemporaryDirectory(prefix="epochsink-bench-") as folder,
        LocalElasticsearch() as server,
        session() as spark,
    ):
        bench, report = Bench(spark, server, options.rows, Path(folder)), Report.of(options)
        if not options.only:
            bench.latencies(options.epochs)
            bench.windows(max(options.epochs // 3, 10))
        report.ratio("elasticsearch-vs-parallel-bulk", 3.0, bench.rows, bench.ours, bench.parallel_bulk)
        report.ratio("elasticsearch-vs-limit", 0.75, bench.rows, bench.ours, bench.limit)
        report.ratio("elasticsearch-vs-fair-limit", 0.85, bench.rows, bench.ours, bench.fair_limit)
        report.print()


if __name__ == "__main__":
    main()
