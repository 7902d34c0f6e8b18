"""For tests of pipelines: rows that prove where they went, a history of what happened, and the checker of it."""

from epochsink.testing.anomalies import ANOMALIES, Anomaly
from epochsink.testing.checker import Report, check
from epochsink.testing.history import History, HistoryLog, Target
from epochsink.testing.local_sink import LocalSink
from epochsink.testing.rows import Workload

__all__ = ["ANOMALIES", "Anomaly", "History", "HistoryLog", "LocalSink", "Report", "Target", "Workload", "check"]
