"""Metrics of running queries for Prometheus; needs the extra ``metrics`` (prometheus-client)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from epochsink import arguments
from epochsink.errors import ConfigurationError

arguments.require_package("epochsink.metrics", "metrics", "prometheus_client")

from prometheus_client import REGISTRY  # noqa: E402 - the line above names the extra if it is missing
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: E402 - likewise
from prometheus_client.registry import Collector  # noqa: E402 - likewise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from epochsink.protocol.progress import QueryProgress, SinkProgress
    from epochsink.spark.exactly_once import ExactlyOnce

_GAUGES: Final[dict[str, tuple[str, Callable[[QueryProgress], float]]]] = {
    "epochsink_decided_not_visible_seconds": (
        "For how long readers have waited for the oldest epoch that Spark has decided; 0 if they see all of them.",
        lambda query: query.late_seconds,
    ),
    "epochsink_oldest_open_epoch_seconds": (
        "For how long the oldest epoch that has begun and is not visible has been under way; 0 if there is none.",
        lambda query: query.open_seconds,
    ),
    "epochsink_pending_epochs": (
        "Epochs that are recorded and not visible yet.",
        lambda query: len(query.pending),
    ),
    "epochsink_spooled_bytes": (
        "Bytes that pending epochs keep in the spool.",
        lambda query: query.spooled_bytes,
    ),
    "epochsink_failed": ("1 if the query has stopped with a failure.", lambda query: bool(query.failure)),
    "epochsink_newest_visible_epoch": (
        "The newest epoch that readers see; -1 before the first of this run.",
        lambda query: query.recent[-1].epoch if query.recent else -1,
    ),
    "epochsink_newest_visible_timestamp_seconds": (
        "When the newest epoch became visible, in seconds since 1970; 0 before the first of this run.",
        lambda query: query.recent[-1].done_at if query.recent else 0.0,
    ),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[QueryProgress], float]]]] = {
    "epochsink_epochs": ("Epochs that became visible.", lambda query: query.epochs),
    "epochsink_repeated_attempts": (
        "Attempts at an epoch that failed and were repeated.",
        lambda query: query.retries,
    ),
    "epochsink_leftovers_ended": (
        "Leftovers of losing attempts that sweeps ended.",
        lambda query: query.leftovers,
    ),
}
_OF_A_SINK: Final[dict[str, tuple[str, Callable[[SinkProgress], float]]]] = {
    "epochsink_rows": ("Rows written.", lambda sink: sink.rows),
    "epochsink_deleted_rows": ("Rows among them that delete a key.", lambda sink: sink.deleted),
    "epochsink_written_bytes": ("Their size in memory, as Arrow data.", lambda sink: sink.bytes),
    "epochsink_dead_letters": ("Rows that were set aside.", lambda sink: sink.set_aside or 0),
    "epochsink_replays": ("Parts that the target lost and that were prepared again.", lambda sink: sink.replays),
    "epochsink_vote_seconds": ("Time of the votes.", lambda sink: sink.vote_seconds),
    "epochsink_commit_seconds": ("Time of the commits, replays included.", lambda sink: sink.commit_seconds),
}


class QueryMetrics(Collector):
    """Reads the progress of queries when Prometheus asks: it costs a query nothing in between."""

    def __init__(self) -> None:
        self._sinks: dict[str, ExactlyOnce] = {}

    def add(self, query: str, sink: ExactlyOnce) -> None:
        """Add a query, under the name that becomes its label ``query``. Raises `ConfigurationError` if it is taken."""
        if self._sinks.setdefault(query, sink) is not sink:
            raise ConfigurationError(
                f"query={query!r} is already the name of another query's metrics",
                hint="give each query of the process a name of its own: export(sink, query='orders')",
            )

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of every query."""
        queries = {query: sink.progress() for query, sink in self._sinks.items()}
        for families, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, (text, value) in families.items():
                family = kind(name, text, labels=["query"])
                for query, progress in queries.items():
                    family.add_metric([query], value(progress))
                yield family
        for name, (text, of_sink) in _OF_A_SINK.items():
            counter = CounterMetricFamily(name, text, labels=["query", "sink"])
            for query, progress in queries.items():
                for sink, total in progress.totals.items():
                    counter.add_metric([query, sink], of_sink(total))
            yield counter


_exported: Final[WeakKeyDictionary[CollectorRegistry, QueryMetrics]] = WeakKeyDictionary()
"""What each registry shows: one collector for all queries, as a name of a metric is registered once."""


def export(sink: ExactlyOnce, *, query: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Register a query's metrics with a registry of prometheus-client, under the label ``query``.

    The registry is served by whatever serves it already, or by ``prometheus_client.start_http_server(9400)``. Counters
    begin at 0 with each run. May be repeated. Raises `ConfigurationError` if the name belongs to another query.
    """
    if registry not in _exported:
        _exported[registry] = QueryMetrics()
        registry.register(_exported[registry])
    _exported[registry].add(query, sink)
