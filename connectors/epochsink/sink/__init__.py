"""The words of the protocol: no I/O, no Spark.

An *epoch* is one micro-batch of one streaming query. For each sink it passes through

    written (by tasks)  ->  prepared (durable, invisible)  ->  recorded (in the ledger)
    ->  decided (Spark's checkpoint holds ``commits/N``)   ->  committed (visible)  ->  done

A sink consists of a configuration (`Sink`), which crosses to the executors, a `SinkWriter` for each
task attempt there, and one `SinkCommitter` in the driver. What they exchange are *committables*: plain
JSON values that name what was prepared, so that any later process can commit or abort it.
"""

from epochsink.sink.contract import Rows, Sink, SinkCommitter, SinkWriter
from epochsink.sink.keeping import KeepingCommitter
from epochsink.sink.marks import Mark, verify_marks
from epochsink.sink.nested_json import json_text
from epochsink.sink.outcome import COMMITTED, Outcome, Verdict
from epochsink.sink.ports import CheckpointReader, Executors, NotCarriedOut, SpoolKeeper, UsesExecutors
from epochsink.sink.reading import SpoolReadingCommitter
from epochsink.sink.sharing import MEMBERS, Ballot, SharingCommitter, sharers
from epochsink.sink.values import (
    NOTHING_SPOOLED,
    Committable,
    Epoch,
    Identity,
    LastDone,
    Spooled,
    SpoolFile,
    Task,
    Written,
)
from epochsink.sink.wide import WideCommitter

__all__ = [
    "COMMITTED",
    "MEMBERS",
    "NOTHING_SPOOLED",
    "Ballot",
    "CheckpointReader",
    "Committable",
    "Epoch",
    "Executors",
    "Identity",
    "KeepingCommitter",
    "LastDone",
    "Mark",
    "NotCarriedOut",
    "Outcome",
    "Rows",
    "SharingCommitter",
    "Sink",
    "SinkCommitter",
    "SinkWriter",
    "SpoolFile",
    "SpoolKeeper",
    "SpoolReadingCommitter",
    "Spooled",
    "Task",
    "UsesExecutors",
    "Verdict",
    "WideCommitter",
    "Written",
    "json_text",
    "sharers",
    "verify_marks",
]
