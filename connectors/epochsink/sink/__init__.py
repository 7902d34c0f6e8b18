"""The interface between the engine and the sinks: no I/O, no Spark.

An *epoch* is one micro-batch of one streaming query. For each sink it passes through

    written (by tasks)  ->  prepared (durable, invisible)  ->  recorded (in the ledger)
    ->  decided (Spark's checkpoint holds ``commits/N``)   ->  committed (visible)  ->  done

A sink consists of a configuration (`Sink`), which crosses to the executors, a `SinkWriter` for each
task attempt there, and a `Participant` in the driver, which it may share with other sinks. What they exchange are
*committables*: plain JSON values that name what was prepared, so that any later process can commit or abort it.
"""

from epochsink.sink.audit import Compared, Comparison, Receipt
from epochsink.sink.contract import (
    Ballot,
    Ballots,
    Marks,
    Participant,
    Parts,
    Rows,
    Sink,
    SinkWriter,
    participants_of,
)
from epochsink.sink.executors import Executors, NotCarriedOut
from epochsink.sink.letters import Chosen, Letter, Letters, Retried
from epochsink.sink.marks import Mark, verify_marks
from epochsink.sink.replay import write_all
from epochsink.sink.sql import json_text
from epochsink.sink.values import (
    COMMITTED,
    NOTHING_COUNTED,
    NOTHING_SPOOLED,
    Committable,
    Committables,
    Counts,
    Epoch,
    Finding,
    Identity,
    Keeping,
    LastDone,
    Members,
    Outcome,
    Recorded,
    Recorder,
    Remnant,
    RowCount,
    Spooled,
    SpoolFile,
    Task,
    Verdict,
    Written,
    one_by_one,
)

__all__ = [
    "COMMITTED",
    "NOTHING_COUNTED",
    "NOTHING_SPOOLED",
    "Ballot",
    "Ballots",
    "Chosen",
    "Committable",
    "Committables",
    "Compared",
    "Comparison",
    "Counts",
    "Epoch",
    "Executors",
    "Finding",
    "Identity",
    "Keeping",
    "LastDone",
    "Letter",
    "Letters",
    "Mark",
    "Marks",
    "Members",
    "NotCarriedOut",
    "Outcome",
    "Participant",
    "Parts",
    "Receipt",
    "Recorded",
    "Recorder",
    "Remnant",
    "Retried",
    "RowCount",
    "Rows",
    "Sink",
    "SinkWriter",
    "SpoolFile",
    "Spooled",
    "Task",
    "Verdict",
    "Written",
    "json_text",
    "one_by_one",
    "participants_of",
    "verify_marks",
    "write_all",
]
