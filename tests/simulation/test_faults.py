"""The production coordinator under fault plans: nothing lost, doubled, early, mixed or left over, whatever strikes."""

from __future__ import annotations

import itertools

import pytest
from shares import SHARE

from simulation import plans
from simulation.driver import WAITING, Variant
from simulation.explorer import Case, Findings, explore, steps_of
from simulation.invariants import verdict
from simulation.mutants import LOGGED
from simulation.simulation import play
from simulation.storage import StepwiseLedger, TrimmingLedger

pytestmark = pytest.mark.plans
PURGING = Variant(purges=True)
STEPWISE = Variant(ledger=StepwiseLedger)
TRIMMING = Variant(ledger=TrimmingLedger)


def expect_none(findings: Findings, at_least: int) -> None:
    """Fail with the first case of each violation; fail, too, if the faults of hardly any plan struck."""
    assert not findings.violations, findings.report()
    assert findings.struck >= SHARE.fewest(at_least), f"every fault struck in only {findings.struck} plans"


@pytest.mark.parametrize("sinks", [sinks for sinks in plans.SINKS if sinks != "CD"])
def test_every_plan_with_one_fault(sinks: str) -> None:
    """Every fault at every step, the threads in turn; those of C and D, which are like A and B, by `explore`."""
    expect_none(explore(plans.one_fault(steps_of(sinks, 0), plans.QUICK), sinks, 0), 2000)


@pytest.mark.parametrize("schedule", [1, 2])
@pytest.mark.parametrize("sinks", plans.SINKS)
def test_one_fault_with_a_thread_that_goes_first(sinks: str, schedule: int) -> None:
    """An eighth of the faults, with the stream or the commit thread always ahead of the other."""
    some = itertools.islice(plans.one_fault(steps_of(sinks, schedule), plans.QUICK), schedule, None, 8)
    expect_none(explore(some, sinks, schedule), 250)


@pytest.mark.parametrize("sinks", plans.SINKS)
def test_two_faults_at_random(sinks: str) -> None:
    """A seeded share of all plans with two faults."""
    seed = 1_000 + plans.SINKS.index(sinks)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    random = plans.at_random(seed, steps_of(sinks, 0) + 25, 2, plans.MEDIUM)
    expect_none(explore(random, sinks, 0, most=400), 50)


@pytest.mark.parametrize("sinks", ["KPE", "KSE"])
@pytest.mark.parametrize(("depth", "at_least"), [(3, 20), (4, 10), (5, 2)])
def test_deeper_plans_at_random(sinks: str, depth: int, at_least: int) -> None:
    """A few plans with more faults; in most, not every one finds something to strike."""
    seed = 2_000 + depth
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    random = plans.at_random(seed, steps_of(sinks, 0) + 50, depth, plans.MEDIUM)
    expect_none(explore(random, sinks, 0, most=200), at_least)


def test_two_drivers_that_take_a_new_ledger_at_once_and_remove_each_others_entry() -> None:
    """What the sinks fixed when they joined goes along with whichever take stands in the end."""
    plan: plans.Plan = ((6, ("pause", 4, 2)), (57, ("twice", 8)), (60, ("before",)), (145, ("before",)))
    assert Case(plan, "KSE", 0).violations() == []


def test_a_marker_s_request_comes_again_after_the_commit_and_the_driver_crashes() -> None:
    """The transaction is open again, and holds no rows: they are not written a second time."""
    for step in range(170, 195):
        plan: plans.Plan = ((114, ("twice", 64)), (step, ("before",)))
        assert Case(plan, "KPE", 0).violations() == [], plan
    restored: plans.Plan = (
        (114, ("twice", 64)),
        (131, ("stall", 5)),
        (193, ("restore", 1, 1, 1)),
        (243, ("stall", 20)),
    )
    assert Case(restored, "KPE", 0).violations() == []


@pytest.mark.parametrize(
    ("sinks", "plan", "schedule"),
    [
        ("AB", ((118, ("lost",)), (124, ("lost",)), (126, ("delay", 64)), (153, ("rollback",))), 0),
        (
            "CD",
            ((99, ("ledger", 1)), (111, ("twice", 128)), (130, ("delay", 64)), (145, ("delay", 4)), (151, ("lost",))),
            1,
        ),
    ],
)
def test_a_server_that_answers_no_attempt_at_a_commit_stops_the_query(
    sinks: str, plan: plans.Plan, schedule: int
) -> None:
    simulation = play(plan, sinks, schedule, WAITING)
    assert "whether sink" in str(simulation.loud)
    assert verdict(simulation, plan) == []


@pytest.mark.parametrize(
    ("sinks", "schedule", "plan"),
    [
        # an older ledger names a transaction that timed out, and its rows were prepared again
        ("KE", 1, ((69, ("timeout",)), (116, ("restore", 0, 1, 1)))),
        # a paused driver meets a transaction that a late request has opened again
        ("KSE", 2, ((136, ("twice", 64)), (147, ("pause", 7, 8)))),
        # a request that is under way to a database ends with its connection, as the database is restored
        ("S", 1, ((30, ("back", "S", 3)), (109, ("delay", 64)))),
        # a broker loses the end that was written in its coordinator's place
        ("KP", 1, ((50, ("leaderless",)), (129, ("failover", "K", 1)), (133, ("leaderless",)))),
        # a transaction of a done epoch is open again between a look and the abort of what it has shown
        ("K", 0, ((66, ("failover", "K", 3)), (125, ("back", "K", 3)))),
        # the caller catches the refusal of a second call, and another error ends the query before it is said again
        ("T", 1, ((52, ("swallow",)), (57, ("double",)), (121, ("swallow",)))),
        # another program changes documents, and the query stops before it writes their keys again
        ("F", 0, ((36, ("outside", "F")), (66, ("restore", 0, 0, 1)))),
        ("F", 2, ((85, ("outside", "F")), (88, ("ledger", -1)))),
    ],
    ids=[
        "prepared again",
        "opened again",
        "cut off",
        "an end is lost",
        "set back before an abort",
        "a refusal is caught",
        "documents of an older copy are changed",
        "documents are changed and the ledger is lost",
    ],
)
def test_what_random_plans_have_found(sinks: str, schedule: int, plan: plans.Plan) -> None:
    simulation = play(plan, sinks, schedule, WAITING)
    assert simulation.faults == {kind for _, (kind, *_) in plan}
    assert verdict(simulation, plan) == []


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        (((51, ("stall", 10)), (66, ("twice", 64)), (106, ("after",)), (118, ("timeout",))), 2),
        (((33, ("twice", 128)), (42, ("lost",)), (92, ("twice", 2)), (114, ("before",))), 1),
        (((4, ("before",)), (29, ("delay", 32)), (50, ("err",)), (61, ("twice", 128)), (87, ("before",))), 2),
        (((29, ("after",)), (37, ("err",)), (68, ("twice", 128)), (104, ("lost",)), (111, ("after",))), 1),
    ],
)
def test_what_a_late_request_has_opened_again_holds_no_rows_of_a_done_epoch(plan: plans.Plan, schedule: int) -> None:
    simulation = play(plan, "K", schedule, WAITING)
    assert simulation.struck == len(plan)
    assert verdict(simulation, plan) == []


def test_a_request_with_rows_comes_again_after_the_commit_and_the_driver_crashes() -> None:
    """The transaction is open again and lists the rows' partition, which holds no rows of it."""
    for step in range(86, 100):
        plan: plans.Plan = ((57, ("twice", 64)), (step, ("before",)))
        assert Case(plan, "KPE", 2).violations() == [], plan


def test_a_driver_that_slept_while_an_index_was_restored_does_not_write_over_newer_documents() -> None:
    """The restore has taken the marker away, by which it would know of later epochs: the ledger shows its successor."""
    plan: plans.Plan = ((38, ("pause", 999, 4)), (96, ("back", "F", 1)))
    assert Case(plan, "F", 0).violations() == []


def test_a_failover_that_loses_the_claim_of_a_version_base_leaves_the_next_checkpoint_one_above_it() -> None:
    """The next base is above all versions by the clock, too."""
    plan: plans.Plan = ((50, ("failover", "F", 3)), (92, ("newck",)))
    assert Case(plan, "F", 0).violations() == []


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E"])
def test_entries_are_removed_by_hand(sinks: str) -> None:
    """The newest take names what was applied: no epoch is written a second time."""
    removed = (
        ((start, ("options",)), (start + gap, ("restore", 0, 1, 2)))
        for start in range(85, 130, 5)
        for gap in (5, 8, 11)
    )
    expect_none(explore(removed, sinks, 2), 2)


@pytest.mark.parametrize("sinks", ["K", "P", "T"])
def test_prepared_part_lost_while_its_driver_is_paused(sinks: str) -> None:
    """Sweep on purpose: time-out or rollback, then a pause with a second driver, then the first goes on."""
    loss = ("timeout",) if sinks == "K" else ("rollback",)
    sweep = (
        ((first, loss), (first + gap, ("pause", pause, alone)))
        for first in range(24, 60, 2)
        for gap in range(1, 14, 2)
        for pause in (9, 24, 40)
        for alone in (3, 999)
    )
    expect_none(explore(sweep, sinks, 0), 200)


@pytest.mark.parametrize("sinks", ["K", "S"])
def test_reply_lost_around_a_losing_task(sinks: str) -> None:
    """Sweep on purpose: a reply is lost, and a losing task attempt prepares before or after."""
    sweep = (
        tuple(sorted([(lost, ("lost",)), (loser, fault)]))
        for lost in range(44, 84)
        for loser in range(lost - 9, lost + 18, 2)
        for fault in (("loser", 0, 0), ("loser", 0, 1), ("loser", 1, 0))
    )
    expect_none(explore(sweep, sinks, 0), 150)


def test_faults_where_kafkas_log_keeps_the_rows() -> None:
    """Nothing is spooled: a share of the plans with one fault, and of those with two."""
    steps = steps_of("K", 0, LOGGED)
    some = itertools.islice(plans.one_fault(steps, plans.QUICK), 0, None, 10)
    expect_none(explore(some, "K", 0, variant=LOGGED), 200)
    seed = 5_000
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    expect_none(explore(plans.at_random(seed, steps + 25, 2, plans.MEDIUM), "K", 0, variant=LOGGED, most=300), 40)


@pytest.mark.parametrize("sinks", ["K", "S"])
def test_two_threads_within_one_reading_of_the_ledger(sinks: str) -> None:
    """With each file that the ledger reads a step of its own, a share of the faults."""
    steps = steps_of(sinks, 0, STEPWISE)
    for schedule in (0, 1, 2):
        some = itertools.islice(plans.one_fault(steps, plans.QUICK), schedule, None, 10)
        expect_none(explore(some, sinks, schedule, variant=STEPWISE), 200)


@pytest.mark.parametrize("sinks", ["E", "F"])
def test_a_driver_is_paused_anywhere_while_the_ledger_is_trimmed(sinks: str) -> None:
    """A pause of every length: its commit thread may sum the ledger up while its stream thread records an epoch."""
    every = [((1, fault),) for fault in plans.FULL if fault[0] == "pause"]
    expect_none(explore(iter(every), sinks, 0, variant=TRIMMING), 400)


@pytest.mark.parametrize("sinks", ["K", "S"])
def test_faults_while_the_ledger_is_trimmed(sinks: str) -> None:
    """With a ledger that trims at every epoch, a driver paused across the trim among the faults."""
    steps = steps_of(sinks, 0, TRIMMING)
    some = itertools.islice(plans.one_fault(steps, plans.QUICK), 0, None, 4)
    # an older copy is not recognised once its epochs are trimmed, so no copies are restored here
    without_copies = (plan for plan in some if plan[0][1][0] != "restore")
    expect_none(explore(without_copies, sinks, 0, variant=TRIMMING), 500)


@pytest.mark.parametrize("sinks", ["K", "S"])
def test_faults_while_spark_purges_its_commits(sinks: str) -> None:
    """With a checkpoint that keeps only the last two commits, a share of the faults."""
    some = itertools.islice(plans.one_fault(steps_of(sinks, 0, PURGING), plans.QUICK), 0, None, 5)
    expect_none(explore(some, sinks, 0, variant=PURGING), 400)


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "F", "T", "AB", "CD", "KPE"])
def test_a_target_is_set_back_or_loses_its_markers_at_every_step(sinks: str) -> None:
    """A restore, by one to three commits, or a failover, by one to eight requests: exact, or a stop that says so."""
    every = plans.one_fault(steps_of(sinks, 0) + 10, plans.backwards(sinks))
    some = every if len(sinks) < 3 else itertools.islice(every, 0, None, 4)
    expect_none(explore(some, sinks, 0), 250)


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "T"])
def test_a_target_is_set_back_and_something_else_happens(sinks: str) -> None:
    """A seeded share of the plans with a restore and one other fault."""
    seed = 3_000 + "KPSET".index(sinks)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    without_copies = [fault for fault in plans.MEDIUM if fault[0] not in ("restore", "ledger", "newck")]
    random = plans.another_too(seed, steps_of(sinks, 0) + 10, plans.backwards(sinks), without_copies)
    expect_none(explore(random, sinks, 0, most=600), 60)


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "F"])
@pytest.mark.parametrize("schedule", [0, 1])
def test_a_late_request_or_a_paused_driver_meets_a_target_that_was_set_back(sinks: str, schedule: int) -> None:
    """What it still writes there hides no loss: the next comparison finds the epochs that are missing."""
    seed = 4_000 + "KPSEF".index(sinks)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    random = plans.late_and_backwards(seed, steps_of(sinks, schedule) + 15, sinks)
    expect_none(explore(random, sinks, schedule, most=500), 40)
