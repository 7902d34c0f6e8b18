"""A history of a test run and its checker: rows that prove where they went, readers of targets, named anomalies."""

from epochsink_devkit.history.anomalies import ANOMALIES
from epochsink_devkit.history.checker import Report, check
from epochsink_devkit.history.history import CheckedTarget, History, HistoryLog
from epochsink_devkit.history.rows import Workload
from epochsink_devkit.history.views import Anomaly

__all__ = [
    "ANOMALIES",
    "Anomaly",
    "CheckedTarget",
    "History",
    "HistoryLog",
    "Report",
    "Workload",
    "check",
]
