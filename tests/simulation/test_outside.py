"""What users, operators, other programs and a second copy do: exact, or a stop that names it; the way on is exact."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from shares import SHARE

from epochsink.errors import WentBack
from simulation import plans
from simulation.driver import WAITING, Variant
from simulation.explorer import Findings, explore, steps_of
from simulation.invariants import newest_rows, verdict
from simulation.mutants import LOGGED
from simulation.search_sink import RejectedRowsSink
from simulation.simulation import play

if TYPE_CHECKING:
    from simulation.plans import Fault

pytestmark = pytest.mark.plans

EACH = ("K", "P", "S", "E", "F")
REJECTED = Variant(kinds={"E": RejectedRowsSink})


def every_step(sinks: str, *faults: Fault) -> Findings:
    """Play each fault at every step; fail with the first case of each violation, and if hardly any has struck."""
    findings = explore(plans.one_fault(steps_of(sinks, 0) + 10, faults), sinks, 0)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(30 * len(faults)), findings.report()
    return findings


@pytest.mark.parametrize("sinks", [*EACH, "T", "AB", "KPE"])
def test_a_copy_of_the_checkpoint_runs_beside_the_original(sinks: str) -> None:
    """Each row once; or one of the two queries stops, and says that another one writes."""
    every_step(sinks, ("copy",))


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "F", "T", "KPE"])
def test_two_copies_of_a_checkpoint_meet_in_every_instant(sinks: str) -> None:
    """One of them stalls anywhere: no row is committed by both, whatever lies between a comparison and a commit."""
    seed = 6_000 + len(sinks) + ord(sinks[0])
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    findings = explore(plans.copied_and_stalled(seed, steps_of(sinks, 0)), sinks, 0, most=200)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(80), findings.report()


@pytest.mark.parametrize("sinks", EACH)
def test_the_users_function_swallows_our_errors(sinks: str) -> None:
    """An epoch that Spark decides without us is named; once accepted, all others are exact."""
    every_step(sinks, ("swallow",))


def test_each_error_that_is_swallowed_may_leave_an_epoch_out_before_the_query_ends() -> None:
    plan: plans.Plan = ((23, ("swallow",)), (31, ("err",)))
    simulation = play(plan, "E", 0, WAITING)
    assert verdict(simulation, plan) == []
    assert "decided without ExactlyOnce" in str(simulation.said[0])


def test_an_older_ledger_is_not_accepted_because_an_error_was_swallowed_too() -> None:
    """Of an epoch that nobody left out, the error says to restore the newer copy, which has its rows."""
    plan: plans.Plan = ((49, ("swallow",)), (61, ("ledger", 0)))
    simulation = play(plan, "E")
    assert verdict(simulation, plan) == []
    assert isinstance(simulation.loud, WentBack)


def test_epochs_that_spark_has_passed_over_are_not_accepted_with_one_that_was_left_out() -> None:
    """Commits and ledger are those of an older copy, and offsets are not: Spark runs the newest epoch alone."""
    plan: plans.Plan = ((145, ("restore", 0, 0, 1)), (145, ("skip",)))
    simulation = play(plan, "KSE", 0, WAITING)
    assert verdict(simulation, plan) == []
    assert "epochs 1 to 2 were decided without ExactlyOnce" in str(simulation.loud)


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        (((92, ("restore", 0, 1, 0)), (103, ("skip",))), 2),
        (((84, ("swallow",)), (85, ("restore", 0, 1, 0))), 1),
    ],
)
def test_an_epoch_of_a_restored_checkpoint_that_is_left_out_is_not_the_one_that_the_ledger_knows(
    plan: plans.Plan, schedule: int
) -> None:
    """It has the same number, and other input."""
    simulation = play(plan, "T", schedule)
    assert verdict(simulation, plan) == []
    assert isinstance(simulation.loud, WentBack)
    assert "recorded with other offsets" in str(simulation.loud)


def test_epochs_left_out_behind_one_of_a_restored_checkpoint_do_not_hide_that_it_has_other_input() -> None:
    plan: plans.Plan = ((89, ("swallow",)), (102, ("restore", 0, 1, 0)))
    simulation = play(plan, "PE", 1, WAITING)
    assert verdict(simulation, plan) == []
    assert "epoch 1 is recorded with other offsets" in str(simulation.loud)


def test_brokers_that_lose_acknowledged_writes_may_commit_a_tasks_twin_instead_and_its_rows_once() -> None:
    """A limit: they give both attempts the same id, producer and epoch; the rows are those of one input."""
    plan: plans.Plan = ((138, ("failover", "K", 2)), (138, ("loser", 0, 0)))
    simulation = play(plan, "KP", 0, WAITING)
    assert "ABORTED READ K" in simulation.anomalies
    assert verdict(simulation, plan) == []


def test_what_comes_late_from_a_driver_whose_ledger_is_lost_stays_if_its_clock_was_ahead() -> None:
    """It has a later generation than the next driver, which therefore does not end it; no row is lost or doubled."""
    plan: plans.Plan = ((32, ("clock",)), (37, ("delay", 63)), (39, ("ledger", -1)), (131, ("pause", 4, 9)))
    simulation = play(plan, "T", 1)
    assert verdict(simulation, plan) == []
    assert simulation.world.postgres["T"].prepared


@pytest.mark.parametrize(("sinks", "kind"), [("S", "staging"), ("P", "prepared"), ("T", "prepared")])
def test_an_older_copy_of_the_ledger_leaves_nothing_of_the_drivers_that_it_does_not_know(sinks: str, kind: str) -> None:
    """Three drivers took the ledger since, and one of them has prepared an epoch: the next one ends it."""
    plan: plans.Plan = ((36, ("after",)), (53, ("after",)), (56, ("lost",)), (60, ("restore", 0, 0, 1)))
    simulation = play(plan, sinks, 1, WAITING)
    assert verdict(simulation, plan) == []
    assert simulation.struck == len(plan)
    assert not getattr(simulation.world.postgres[sinks], kind)


def test_a_failover_after_a_replay_has_sent_its_rows_and_before_it_is_recorded() -> None:
    """What is recorded then is lost, and is prepared once more."""
    plan: plans.Plan = ((66, ("failover", "K", 3)), (95, ("back", "K", 2)))
    assert verdict(play(plan, "K", 2), plan) == []


def test_what_is_rolled_back_as_often_as_it_is_prepared_again_stops_the_query_and_is_not_lost() -> None:
    plan: plans.Plan = (
        (26, ("rollback",)),
        (32, ("delay", 128)),
        (49, ("rollback",)),
        (71, ("rollback",)),
        (73, ("rollback",)),
    )
    simulation = play(plan, "P", 2, WAITING)
    assert verdict(simulation, plan) == []
    assert "prepared again 4 times, and lost each time" in str(simulation.loud)


def test_an_older_ledger_and_deleted_markers_are_noticed_by_the_row_of_joining() -> None:
    """Nothing else shows that an epoch is done which that ledger takes for pending."""
    plan: plans.Plan = ((38, ("unmark", "A")), (81, ("ledger", 0)))
    simulation = play(plan, "AB", 0, WAITING)
    assert simulation.struck == len(plan)
    assert verdict(simulation, plan) == []
    assert "the ledger says that it had joined" in str(simulation.loud)


def test_an_epoch_left_out_before_the_ledger_is_lost_and_joined_anew_is_all_that_is_missing() -> None:
    """A limit, of two mistakes about the same epoch: nothing is left that knows of it."""
    plan: plans.Plan = ((12, ("rejoin",)), (25, ("skip",)))
    simulation = play(plan, "S", 0, WAITING)
    assert simulation.struck == len(plan)
    assert verdict(simulation, plan) == []
    assert sorted(row.source for row in newest_rows(simulation.world, "S")) == list(range(2, simulation.source_rows))


@pytest.mark.parametrize(
    ("sinks", "plan"),
    [("AB", ((11, ("swallow",)), (19, ("ledger", 0)))), ("P", ((8, ("swallow",)), (18, ("ledger", 1))))],
)
def test_a_ledger_of_before_the_first_one_was_written_is_none(sinks: str, plan: plans.Plan) -> None:
    """The first epochs failed before a driver took the ledger, and the user's function caught the error."""
    simulation = play(plan, sinks, 1, WAITING)
    assert simulation.struck == len(plan)
    assert verdict(simulation, plan) == []


def test_a_retry_of_the_markers_read_is_made_in_a_new_session() -> None:
    """The first session is lost with the read, and the outcome of a decided epoch must not stay unknown for that."""
    plan: plans.Plan = ((190, ("err",)),)
    simulation = play(plan, "AB", 2)
    assert simulation.struck == 1
    assert verdict(simulation, plan) == []


@pytest.mark.parametrize("sinks", EACH)
def test_the_users_function_skips_an_epoch(sinks: str) -> None:
    """Likewise."""
    every_step(sinks, ("skip",))


@pytest.mark.parametrize("sinks", EACH)
def test_the_users_function_calls_twice_in_an_epoch(sinks: str) -> None:
    """The second call is refused, also by the next driver, which finds the first call's rows recorded."""
    every_step(sinks, ("double",))


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E"])
def test_a_second_call_and_another_fault_around_its_refusal(sinks: str) -> None:
    """Its record is disputed, withdrawn at the next start, and the epoch is written whole, whatever comes between."""
    seed = 7_000 + ord(sinks[0])
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    findings = explore(plans.doubled_and_more(seed, steps_of(sinks, 0)), sinks, 0, most=400)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(50), findings.report()


@pytest.mark.parametrize("sinks", [*EACH, "T", "AB", "CD", "KSE"])
def test_options_change_under_a_pending_epoch(sinks: str) -> None:
    """It is applied with the options that it was prepared with."""
    every_step(sinks, ("options",))


def test_kafkas_log_loses_what_it_keeps() -> None:
    """Likewise, where the topic is the only place that keeps the rows; what is open in it is committed all the same."""
    seed = 5_000
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    steps = steps_of("K", 0, LOGGED) + 10
    # what is gone is missed only once the transaction is gone too
    both = plans.another_too(seed, steps, plans.LOG, [("timeout",)])
    for some in (plans.one_fault(steps, plans.LOG), both):
        findings = explore(some, "K", 0, variant=LOGGED, most=300)
        assert not findings.violations, findings.report()
        assert findings.struck >= SHARE.fewest(60), findings.report()


@pytest.mark.parametrize("sinks", ["K", "KPE"])
def test_a_partition_loses_or_aborts_what_its_coordinator_calls_open(sinks: str) -> None:
    """It is written again before anything of it is committed; what is lost in the moment of the commit is named."""
    every_step(sinks, *plans.HOLDER)
    seed = 8_000 + len(sinks)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    steps = steps_of(sinks, 0) + 10
    findings = explore(plans.another_too(seed, steps, plans.HOLDER, plans.MEDIUM), sinks, 0, most=300)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(60), findings.report()


def test_a_partition_loses_or_aborts_what_is_kept_nowhere_else() -> None:
    """What was aborted is still in the log; what was lost stops the query, and none of it is applied."""
    findings = explore(plans.one_fault(steps_of("K", 0, LOGGED) + 10, plans.HOLDER), "K", 0, variant=LOGGED)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(60), findings.report()


@pytest.mark.parametrize("sinks", ["K", "KPE"])
def test_a_coordinator_leaves_out_ends_of_decided_transactions(sinks: str) -> None:
    """The next look writes those of commits; aborted rows do not become visible with later ones of their producer."""
    every_step(sinks, *plans.LEADERLESS)
    seed = 8_500 + len(sinks)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    findings = explore(plans.another_too(seed, steps_of(sinks, 0), plans.LEADERLESS, plans.MEDIUM), sinks, 0, most=400)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(150), findings.report()


@pytest.mark.parametrize("sinks", [*EACH, "KPE", "AB", "T"])
def test_an_operator_abandons_the_checkpoint_while_the_query_runs(sinks: str) -> None:
    """What is decided is committed, all else is ended; by the query itself, what it prepares after that."""
    every_step(sinks, ("abandon",))


@pytest.mark.parametrize("sinks", EACH)
def test_the_spool_is_altered(sinks: str) -> None:
    """No row of it is applied; what is prepared in the target is committed all the same."""
    every_step(sinks, *plans.SPOOL)


@pytest.mark.parametrize("sinks", [*EACH, "T", "AB"])
def test_a_marker_is_altered(sinks: str) -> None:
    """Found before anything is concluded from it."""
    every_step(sinks, *(("remark", sinks[0], how) for how in ("newer", "other")))


@pytest.mark.parametrize("sinks", ["P", "S"])
def test_a_table_is_altered(sinks: str) -> None:
    """Rows that are staged for other columns are never merged: the epoch is run again, or staged again."""
    every_step(sinks, ("alter", sinks))


def test_somebody_else_writes_to_the_index() -> None:
    """The next epoch's rows are written over it, whatever its version is."""
    every_step("F", ("outside", "F"))


@pytest.mark.parametrize("sinks", ["E", "F", "KPE"])
def test_an_index_is_made_to_acknowledge_what_is_not_on_disk_and_its_node_crashes(sinks: str) -> None:
    """The query stops before it relies on such an index; what it has written to it is written again."""
    every_step(sinks, *(("async", "F" if sinks == "F" else "E", steps) for steps in (1, 5, 20, 60, 200)))


def test_an_index_refuses_rows_whose_letters_are_retried_or_is_overloaded() -> None:
    """Each row is a document or a dead letter that counts, never both, whatever strikes."""
    faults = (("retry", "E"), ("busy", "E", 1), ("busy", "E", 3), *plans.outside("E"), *plans.backwards("E"))
    steps = steps_of("E", 0, REJECTED)
    some = itertools.islice(plans.one_fault(steps, (*faults, *plans.QUICK)), 0, None, 8)
    findings = explore(some, "E", 0, variant=REJECTED)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(400), findings.report()


@pytest.mark.parametrize("sinks", [*EACH, "KPE"])
def test_join_running_is_left_in_the_code_and_the_ledger_is_lost(sinks: str) -> None:
    """Joining is refused wherever a target holds anything of the query."""
    every_step(sinks, ("rejoin",))


@pytest.mark.parametrize("sinks", [*EACH, "AB", "KPE"])
def test_three_of_these(sinks: str) -> None:
    """Each at a step where it meets something."""
    seed = 8_000 + len(sinks) + ord(sinks[0])
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    findings = explore(plans.of_others(seed, steps_of(sinks, 0), sinks), sinks, 0, variant=WAITING, most=300)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(50), findings.report()


@pytest.mark.parametrize(
    ("plan", "sinks", "schedule"),
    [
        (((57, ("options",)), (80, ("options",)), (93, ("back", "A", 3))), "AB", 0),
        (((76, ("options",)), (85, ("failover", "P", 5)), (177, ("back", "P", 2)), (231, ("options",))), "KPE", 1),
    ],
)
def test_a_target_set_back_by_epochs_of_earlier_runs_keeps_what_it_holds_prepared(
    plan: plans.Plan, sinks: str, schedule: int
) -> None:
    """Of those no driver knows any more what they had prepared: no sweep ends it, whoever sweeps."""
    simulation = play(plan, sinks, schedule, WAITING)
    assert verdict(simulation, plan) == []
    assert simulation.struck == len(plan)
    assert isinstance(simulation.loud, WentBack)


@pytest.mark.parametrize("sinks", [*EACH, "KPE"])
def test_two_of_these_or_one_and_another_fault(sinks: str) -> None:
    """A seeded share of the pairs."""
    seed = 5_000 + len(sinks) + ord(sinks[0])
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    some = (*plans.outside(sinks), *plans.backwards(sinks))
    random = plans.another_too(seed, steps_of(sinks, 0) + 10, some, plans.MEDIUM)
    findings = explore(random, sinks, 0, most=600)
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(100), findings.report()
