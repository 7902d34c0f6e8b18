"""The interface between the engine and the sinks: no I/O, no Spark.

An *epoch* is one micro-batch of one streaming query. For each sink it passes through

    written (by tasks)  ->  prepared (durable, invisible)  ->  recorded (in the ledger)
    ->  decided (Spark's checkpoint holds ``commits/N``)   ->  committed (visible)  ->  done

A sink consists of a configuration (`Sink`), which crosses to the executors, a `SinkWriter` for each
task attempt there, and a `Participant` in the driver, which it may share with other sinks. What they exchange are
*committables*: plain JSON values that name what was prepared, so that any later process can commit or abort it.
"""

from epochsink.sink.audit import Compared, Comparison, Receipt
from epochsink.sink.comparing import comparing, only_compares, would
from epochsink.sink.contract import (
    Ballot,
    Ballots,
    Participant,
    Parts,
    Rows,
    SimpleParticipant,
    Sink,
    SinkWriter,
    participants_of,
    write_all,
)
from epochsink.sink.letters import Chosen, Letter, Letters, Retried, over_limit
from epochsink.sink.marks import Mark, Marks, marks_left
from epochsink.sink.operator import Losses, Operator
from epochsink.sink.remnants import Remnant, RemnantState, orphans
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
    Joining,
    Keeping,
    LastDone,
    Members,
    Outcome,
    Recorded,
    RowCount,
    Spooled,
    SpoolFile,
    Task,
    Verdict,
    WriterContext,
    Written,
    identity_key,
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
    "Finding",
    "Identity",
    "Joining",
    "Keeping",
    "LastDone",
    "Letter",
    "Letters",
    "Losses",
    "Mark",
    "Marks",
    "Members",
    "Operator",
    "Outcome",
    "Participant",
    "Parts",
    "Receipt",
    "Recorded",
    "Remnant",
    "RemnantState",
    "Retried",
    "RowCount",
    "Rows",
    "SimpleParticipant",
    "Sink",
    "SinkWriter",
    "SpoolFile",
    "Spooled",
    "Task",
    "Verdict",
    "WriterContext",
    "Written",
    "comparing",
    "identity_key",
    "json_text",
    "marks_left",
    "one_by_one",
    "only_compares",
    "orphans",
    "over_limit",
    "participants_of",
    "would",
    "write_all",
]
