"""Tools to test pipelines and sinks.

A sink that needs no service, the contract for your own sinks, rows that prove where they went, a history of a test run,
and its checker.
"""

from epochsink.testing.anomalies import ANOMALIES
from epochsink.testing.checker import Report, check
from epochsink.testing.history import History, HistoryLog, Target
from epochsink.testing.local_sink import LocalSink
from epochsink.testing.rows import Workload
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import SinkRig
from epochsink.testing.views import Anomaly

__all__ = [
    "ANOMALIES",
    "Anomaly",
    "History",
    "HistoryLog",
    "LocalSink",
    "Report",
    "SinkContract",
    "SinkRig",
    "Target",
    "Workload",
    "check",
]
