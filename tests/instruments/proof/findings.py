"""What the runs have found, each anomaly with its cause. An anomaly that no finding explains is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LIBRARY, SIMULATION, CHECKER, LIMIT, UNEXPLAINED = (
    "of epochsink",
    "of the simulation",
    "of a checker or a run",
    "a limit",
    "not explained",
)
CLASSES: Final = {
    LIBRARY: "a fault of epochsink; mended",
    SIMULATION: "what was played was wrong; corrected",
    CHECKER: "what judged or drove the run was wrong; corrected",
    LIMIT: "it stays so; nothing is lost or doubled in silence",
    UNEXPLAINED: "no row was lost or doubled; seen once, and what the query waited for is not known",
}
"""The classes, as the page lists them."""


@dataclass(frozen=True)
class Finding:
    """The cause of anomalies of one run: those that hold one of the texts ``shown``, all if there is none."""

    what: str
    commit: str
    of: str
    cause: str
    shown: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    def explains(self, record: Mapping[str, Any], anomaly: str) -> bool:
        """Return whether an anomaly of a run has this cause."""
        ours = (record["what"], record["commit"]) == (self.what, self.commit)
        return ours and (not self.shown or any(text in anomaly for text in self.shown))


FINDINGS: Final = (
    Finding(
        "simulation",
        "c8e005875fb6",
        SIMULATION,
        "Commits and ledger were those of an older copy, and offsets were not: Spark passed over an epoch, and the "
        "user's function left out the next one. The error named both; the simulated operator accepted them, and the "
        "simulation counted the second alone as missing.",
        tests=(
            (
                "tests/simulation/test_outside.py::"
                "test_epochs_that_spark_has_passed_over_are_not_accepted_with_one_that_was_left_out"
            ),
        ),
    ),
    Finding(
        "simulation",
        "51d58263e1e4",
        SIMULATION,
        "The simulated operator accepted epochs whose rows were lost, although the message said to restore the "
        "newer copy of the ledger first.",
        tests=(
            "tests/simulation/test_outside.py::test_an_older_ledger_is_not_accepted_because_an_error_was_swallowed_too",
        ),
    ),
    Finding(
        "simulation",
        "dacc1a1f0398",
        LIBRARY,
        "**A row was lost in silence.** Commits and offsets were those of an older copy, the ledger was not, and "
        "then the user's function did not call the object for an epoch. The ledger knew an epoch of the same "
        "number, with other input. The first call of a run now compares the input of the epoch before it too.",
        ("restore+skip",),
        (
            (
                "tests/unit/test_consistency.py::"
                "test_an_epoch_decided_without_us_is_not_the_one_of_its_number_that_the_ledger_knows"
            ),
        ),
    ),
    Finding(
        "simulation",
        "dacc1a1f0398",
        SIMULATION,
        "The query stopped with the right error, and the simulation looked for the rows in its sinks, where the "
        "user's function had kept them from coming. The source has them.",
        ("swallow+restore",),
    ),
    Finding(
        "simulation",
        "dacc1a1f0398",
        SIMULATION,
        "The simulated Kafka forgot where it had put rows that it had acknowledged.",
        ("failover+back", "failover+failover"),
    ),
    Finding(
        "simulation",
        "dacc1a1f0398",
        LIMIT,
        "The ledger was lost before anything was decided, the next driver's clock was behind, and a prepared "
        "transaction of the first driver arrived later. The next driver takes it for the work of a newer one and "
        "leaves it: to end what may be another driver's would be worse. `epochsink orphans` ends it.",
        ("ORPHAN T",),
    ),
    Finding(
        "simulation",
        "741fbd5dca1e",
        SIMULATION,
        "An administrator rolled back each of four preparations of an epoch. The query stopped with an error that "
        "says that nothing is lost and that the next start asks again, which the simulation did not expect.",
        ("prepared again 4 times",),
        (
            (
                "tests/simulation/test_outside.py::"
                "test_what_is_rolled_back_as_often_as_it_is_prepared_again_stops_the_query_and_is_not_lost"
            ),
        ),
    ),
    Finding(
        "simulation",
        "741fbd5dca1e",
        SIMULATION,
        "Somebody deleted the markers, and the ledger was an older copy. The committer that was written for the "
        "simulation wrote the rows twice; the production's misses the row that a query leaves as it joins, and "
        "stops.",
        ("unmark+ledger",),
        (
            (
                "tests/simulation/test_outside.py::"
                "test_an_older_ledger_and_deleted_markers_are_noticed_by_the_row_of_joining"
            ),
        ),
    ),
    Finding(
        "simulation",
        "741fbd5dca1e",
        LIBRARY,
        "**An older row replaced a newer one in silence.** An index with `key=` was set back with its markers. A "
        "driver that had slept since the first epoch met a newer document of its successor, took it for a change "
        "by another program, and wrote over it. Before that, a driver now reads the ledger, and stops if another "
        "one has taken over.",
        ("back+pause",),
        (
            (
                "tests/simulation/test_faults.py::"
                "test_a_driver_that_slept_while_an_index_was_restored_does_not_write_over_newer_documents"
            ),
            (
                "tests/integration/test_elasticsearch_commit.py::"
                "test_a_driver_that_was_superseded_does_not_write_over_its_successors_document_after_a_restore"
            ),
        ),
    ),
    Finding(
        "simulation",
        "c1b75ebcb8ef",
        LIBRARY,
        "**Rows were lost in silence.** An older copy of commits and offsets was restored, Spark gave an epoch "
        "that the ledger knew other input, and the user's function caught the error that said so. The next error "
        "named only the epochs behind that one. The error now names the epoch with other input, and `epochsink "
        "accept` refuses the epochs behind it.",
        ("swallow+restore",),
        (
            (
                "tests/unit/test_consistency.py::"
                "test_epochs_decided_without_us_are_not_all_that_is_lacking_behind_one_with_other_input"
            ),
        ),
    ),
    Finding(
        "simulation",
        "c1b75ebcb8ef",
        LIMIT,
        "Brokers lost acknowledged writes of a coordinator and of a partition, and gave another attempt at the "
        "same task the same producer and epoch. Its rows, which come of the same input, were committed in place of"
        " the task's ([limits](../reference/limits.md)).",
        ("failover+loser",),
        (
            (
                "tests/simulation/test_outside.py::"
                "test_brokers_that_lose_acknowledged_writes_may_commit_a_tasks_twin_instead_and_its_rows_once"
            ),
        ),
    ),
    Finding(
        "simulation",
        "0ee0ed69021f",
        SIMULATION,
        "The user's function caught the errors of two faults, each of which failed an epoch, before the query "
        "ended with the error that names them; the simulation expected one. A process looked for the input of an "
        "epoch that an older copy lacks.",
        tests=(
            (
                "tests/simulation/test_outside.py::"
                "test_each_error_that_is_swallowed_may_leave_an_epoch_out_before_the_query_ends"
            ),
        ),
    ),
    Finding(
        "simulation",
        "86f25c0fac3a",
        LIBRARY,
        "**Rows were written twice** to Kafka below transaction.version 2 if the request that had added their "
        "partitions was delivered once more after the commit, and the driver had crashed before it recorded that "
        "commit. The transaction was open again without rows, and that passed for one that was never committed. A "
        "duplicate of the marker's request, mended hours before, had the same effect.",
        ("DUPLICATE K",),
        (
            (
                "tests/simulation/test_faults.py::"
                "test_a_request_with_rows_comes_again_after_the_commit_and_the_driver_crashes"
            ),
            (
                "tests/integration/test_kafka_set_back.py::"
                "test_a_request_that_comes_before_a_commit_is_known_does_not_make_its_rows_be_written_again"
            ),
        ),
    ),
    Finding(
        "simulation",
        "a520248a0b9c",
        LIMIT,
        "A cluster was set back twice, the second time between the look of a sweep and its abort: a transaction of a "
        "done epoch, which the cluster had lost, was open again and aborted. The query stopped with `WentBack`.",
        ("failover+back",),
    ),
    Finding(
        "simulation",
        "a520248a0b9c",
        SIMULATION,
        "No answer came to any of the three attempts that stand for `timeout=` there, and the query stopped with "
        "`OutcomeUnknown`, as it has to; the simulation did not expect it of plans with so many faults.",
        ("LOUD OutcomeUnknown",),
        ("tests/simulation/test_faults.py::test_a_server_that_answers_no_attempt_at_a_commit_stops_the_query",),
    ),
    Finding(
        "simulation",
        "a520248a0b9c",
        SIMULATION,
        "The late duplicate of a request opened the transaction of a done epoch again, without rows, and a sweep ended "
        "it; the simulation took it for one with rows.",
        ("ROLLED BACK K",),
        ("tests/simulation/test_faults.py::test_what_a_late_request_has_opened_again_holds_no_rows_of_a_done_epoch",),
    ),
    Finding(
        "simulation",
        "d10246fdee68",
        LIBRARY,
        "Needless stops, an hour after what caused them was written: where the end of a commit is left out "
        "(KAFKA-20734), a later abort of its producer takes the rows, and every such abort was taken for that. It "
        "is also there if a transaction timed out and its rows were prepared again, which an older ledger does not "
        "know.",
        ("had aborted epochsink",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
    Finding(
        "simulation",
        "d10246fdee68",
        SIMULATION,
        "A paused driver met a transaction that a late request had opened again, and said so; the simulation expected "
        "that of drivers that go on, and not of those that were superseded.",
        ("ZOMBIE CONCLUDES WentBack",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
    Finding(
        "simulation",
        "d10246fdee68",
        SIMULATION,
        "A request reached a database after it had been restored, over a connection that the restore had ended.",
        ("LOST S",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
    Finding(
        "simulation",
        "d10246fdee68",
        LIMIT,
        "Kafka's coordinator had left out the end of a commit, the driver wrote it, and the brokers lost it again, "
        "though they had acknowledged it. Later epochs warn of the transaction that is open before their rows.",
        ("LOST K",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
    Finding(
        "simulation",
        "d10246fdee68",
        LIMIT,
        "As on a520248a: a cluster was set back between the look of a sweep and its abort, and a transaction of a done "
        "epoch was open again and aborted. The query had stopped with `WentBack` before, for another sink.",
        ("ROLLED BACK K",),
    ),
    Finding(
        "request faults",
        "f098c899852a",
        CHECKER,
        "A transaction was committed while the plan kept the rows that it was about to delete. It kept them once more, "
        "as it has to, and read the first ones as duplicates.",
        ("request 9 of «FindCoordinator»",),
        ("tests/unit/test_request_fault_targets.py::test_rows_that_are_kept_twice_are_read_once",),
    ),
    Finding(
        "request fault pairs",
        "51d58263e1e4",
        CHECKER,
        "Two drivers did not end within 60 s, at a load of 7 to 40 on two cores. The proxy waited 30 s of these "
        "for a reply to a login whose driver was dead. The limit now rises with the load, and a driver that does "
        "not end says where its threads are. That this was the whole cause is likely, and not shown.",
        ("what is decided is lost",),
        (
            (
                "tests/unit/test_request_fault_framings.py::"
                "test_a_login_that_was_held_ends_with_the_question_that_a_dead_driver_does_not_answer"
            ),
        ),
    ),
    Finding(
        "request fault pairs",
        "51d58263e1e4",
        CHECKER,
        "The plan refused writes to an index that did not exist yet.",
        ("a new query",),
        ("tests/failure/test_request_faults.py::test_writes_to_an_index_that_is_not_made_yet_are_refused_by_nobody",),
    ),
    Finding(
        "request faults",
        "03ad74f327e9",
        CHECKER,
        "The played Spark gave both tasks of an epoch the number of the first partition, so the marker of one part"
        " spoke for the other. Spark numbers its tasks apart; a vote now refuses two parts of one partition.",
        tests=(
            (
                "tests/integration/test_kafka_commit.py::"
                "test_two_parts_of_one_slot_are_refused_before_anything_is_recorded"
            ),
        ),
    ),
    Finding(
        "request faults",
        "db9421a92a2f",
        LIBRARY,
        "Nothing was lost: the topic was deleted and created again while the driver copied a lost transaction's "
        "rows within it, and the driver died with a `KeyError`; its next start said which topic is another one. "
        "The error now names the topic at once.",
        tests=(
            (
                "tests/integration/test_kafka_log_redo.py::"
                "test_a_topic_that_is_created_anew_while_rows_are_copied_within_it_is_named"
            ),
        ),
    ),
    Finding(
        "request faults",
        "a2aa6e06e44a",
        LIBRARY,
        "**Rows that an operator had deleted counted as done** if the deletion came between the last look at the "
        "partitions and the commit, some milliseconds: no reader had seen them. A commit whose rows are gone from "
        "before it is now an `OutcomeUnknown`, at each start.",
        ("request 2 of «EndTxn»: rows are deleted", "request 1 of «EndTxn»: rows are deleted"),
        (
            "tests/unit/test_kafka_witness.py::test_rows_that_were_deleted_before_their_end_are_a_loss",
            (
                "tests/integration/test_kafka_witness.py::"
                "test_rows_that_are_lost_between_the_look_and_the_commit_stop_the_query_before_the_epoch_is_done"
            ),
        ),
    ),
    Finding(
        "request faults",
        "a2aa6e06e44a",
        LIBRARY,
        "Nothing was lost: rows were deleted before the vote, which did not ask where the log begins, and the commit "
        "stopped with `LogIncomplete`. The vote asks now, and Spark runs the epoch again.",
        ("«FindCoordinator»: rows are deleted", "«Produce»: rows are deleted"),
        (
            (
                "tests/integration/test_kafka_witness.py::"
                "test_rows_that_partitions_have_lost_before_the_vote_are_written_again_by_the_vote"
            ),
        ),
    ),
    Finding(
        "request faults",
        "a2aa6e06e44a",
        CHECKER,
        "A transaction was aborted at its partitions just before its commit. The query stopped with `OutcomeUnknown`, "
        "as it has to, when it had committed the epoch's other transactions; the judge took these for a flaw.",
        ("transactions are aborted at their partitions",),
        (
            (
                "tests/integration/test_kafka_witness.py::"
                "test_rows_that_are_lost_between_the_look_and_the_commit_stop_the_query_before_the_epoch_is_done"
            ),
        ),
    ),
    Finding(
        "request faults",
        "4d1e2bbc9fb0",
        CHECKER,
        "The one who deletes rows had kept for the readers what they could read, and the epoch was committed and read "
        "before the deletion, which took half a second at a load of 10. Now it is kept once more if readers see more.",
        ("request 16 of «FindCoordinator»: rows are deleted",),
    ),
    Finding(
        "request faults",
        "4d1e2bbc9fb0",
        CHECKER,
        "The coordinator ended a transaction while somebody aborted it at its partitions, and the broker refused the "
        "abort; the plan did not expect that. The query stopped with `OutcomeUnknown`, as it has to.",
        ("transactions are aborted at their partitions",),
    ),
    Finding(
        "soak",
        "51d58263e1e4",
        CHECKER,
        "The checker ordered drivers by their start. One was paused before it took the ledger, and took it after "
        "its successor. The history now holds the generation with which each driver took the ledger.",
        ("unknown writer",),
        ("tests/unit/test_checker.py::test_a_driver_that_took_the_ledger_after_its_successor_is_no_unknown_writer",),
    ),
    Finding(
        "soak",
        "51d58263e1e4",
        UNEXPLAINED,
        "Twice no epoch came within 120 s of a healing, once with two drivers that started at the same time, at a "
        "load of 40 on two cores. The run went on and lost nothing. Records now say what a query waits for; no "
        "soak since has shown it.",
        ("stuck",),
    ),
    Finding(
        "soak",
        "452cec9e0dc8",
        CHECKER,
        "The run broke off after 92 faults: it read PostgreSQL's password as the old primary's folder was replaced.",
        tests=(
            "tests/unit/test_nemesis_services.py::test_the_password_is_known_while_a_server_becomes_a_copy_of_another",
        ),
    ),
    Finding(
        "soak",
        "8c3c416535ec",
        CHECKER,
        "After 5 (and 6) of 47 kills the readers of Elasticsearch did not look before the next driver recovered: a"
        " reader rested for four times as long as its last read had taken.",
        tests=("tests/unit/test_sampling.py",),
    ),
    Finding(
        "soak", "95a6e3d6ce26", CHECKER, "The readers began after the first epoch, and the first driver was a canary."
    ),
    Finding(
        "soak",
        "51eda9a65667",
        CHECKER,
        "The run broke off after 147 faults: a Kafka broker that was killed gave up while it started again, and "
        "nobody started it once more.",
        tests=("tests/unit/test_nemesis_faults.py::test_a_server_that_ends_while_it_starts_is_started_again",),
    ),
    Finding(
        "soak",
        "6ad2d6fa0b77",
        CHECKER,
        "The run broke off after 215 faults: it waited for a standby of PostgreSQL before it started a broker again "
        "that was killed at the same time. The standby was not ready because of an epoch that was prepared, and the "
        "query needed the broker to commit that; see the next run.",
        tests=("tests/unit/test_nemesis_faults.py::test_another_server_is_there_again_before_a_standby_is_waited_for",),
    ),
    Finding(
        "soak",
        "ce7be976e0cd",
        LIBRARY,
        "A standby of PostgreSQL was not ready within 120 s, with an epoch prepared and no query that could commit it: "
        "a standby that starts takes no connections while a transaction with more than 64 savepoints is prepared. The "
        "sink had found rejected rows under savepoints in what it prepared. Now that has none. No row was affected.",
        ("postgres was not ready",),
        (
            (
                "tests/integration/test_postgres_letters.py::"
                "test_what_is_prepared_has_no_savepoints_although_the_refused_rows_are_found_under_some"
            ),
        ),
    ),
    Finding(
        "soak",
        "ce7be976e0cd",
        CHECKER,
        "The run broke off after 40 faults: a server of PostgreSQL was killed and its disk filled at the same time, "
        "and it was to start before the disk was free.",
        ("postgres ended with status 1",),
        ("tests/unit/test_nemesis_faults.py::test_after_any_two_faults_every_server_runs",),
    ),
    Finding(
        "soak",
        "f26f606a72bc",
        LIBRARY,
        "The rows were in the topic, and no read_committed reader saw them: Kafka had left out the end of an aborted "
        "transaction while a partition of two replicas had no leader (KAFKA-20734). The query named the partition and "
        "the producer five times, with the command that ends it, which the soak did not type. The driver writes such "
        "ends itself now.",
        ("lost in part_topic",),
        ("tests/integration/test_kafka_left_open.py::test_the_left_out_end_of_an_abort_does_not_hold_readers_back",),
    ),
    Finding(
        "mutants",
        "613ef7a302e6",
        CHECKER,
        "The guard that the mutant takes away had become superfluous: since 28 November, a vote reads the first rows "
        "of a part again that an earlier vote has seen, whatever that vote found. The guard is gone.",
        ("old='        if not seen.missing:",),
        (
            "tests/integration/test_kafka_witness.py::test_an_attempt_whose_first_rows_are_lost_is_refused_however_often_it_is_voted_on",
        ),
    ),
    Finding(
        "soak",
        "69e9b87e8d31",
        CHECKER,
        "PostgreSQL was set back with an epoch pending, and `epochsink repair` applied three done epochs again. The "
        "specification has no operator's commands, and the command's entries were held for those of a driver. The "
        "ledger's entries after it were not replayed; all rows were compared.",
        ("the specification does not allow the ledger",),
        ("tests/model/test_recorded.py::test_an_operators_command_ends_a_history_also_when_an_epoch_is_pending",),
    ),
    Finding(
        "simulation",
        "9503ca3b89ff",
        SIMULATION,
        "The query stopped for an older or lost ledger. Another program had changed all documents of an index before, "
        "and what it had changed was counted as lost by us.",
        ("UNRECOVERABLE F",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
    Finding(
        "simulation",
        "9503ca3b89ff",
        SIMULATION,
        "The user's function called twice in an epoch and caught the error, which says that rows of the second call "
        "may be in no sink. An error of the checkpoint's store ended the query before the first one could do it, and "
        "the rows were counted as lost in silence.",
        ("LOST T",),
        ("tests/simulation/test_faults.py::test_what_random_plans_have_found",),
    ),
)
"""In the order of the runs."""


def finding_of(record: Mapping[str, Any], anomaly: str) -> Finding | None:
    """Return the cause of an anomaly; None if it is open."""
    return next((one for one in FINDINGS if one.explains(record, anomaly)), None)
