"""Scenes of PostgreSQL: prepared transactions, staged rows and marker rows that somebody else or a failover changes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from epochsink.cli.repair import Repair
from epochsink.errors import OutcomeUnknown, PrepareFailed, WentBack
from simulation import operators
from simulation.postgres_server import PostgresServer, PreparedRows
from simulation.postgres_sink import OtherSharedSink, PostgresSink, SharedSink
from simulation.scene import QUERY, Died, Run, Steps, Story, lost, scene, stops
from simulation.world import STRANGER, Spooled

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.scene import Scene
    from simulation.world import Folders

WHOLE: Final = "all"


class Apart(SharedSink):
    """The first sink of a database, which commits by itself."""

    group: str | None = None


class OtherApart(OtherSharedSink):
    """The second one."""

    group: str | None = None


APART: Final = {"A": Apart, "B": OtherApart}


def postgres(letters: str) -> Callable[[Scene], Scene]:
    return scene("postgres", letters)


def server(story: Story) -> PostgresServer:
    return story.world.postgres[story.letters[0]]


def decided(story: Story, *tasks: Any, **options: Any) -> Run:
    run = story.start(**options)
    run.prepare(0, *tasks)
    run.decide(0)
    return run


def two_checkpoints() -> list[tuple[Folders, Spooled]]:
    return [({}, Spooled()), ({}, Spooled())]


def state(story: Story) -> dict[str, Any]:
    held = server(story)
    visible = {name: dict(rows) for name, rows in story.world.readers.visible.items()}
    return {"markers": dict(held.markers), "prepared": dict(held.prepared), "visible": visible}


def set_back(story: Story, to: dict[str, Any]) -> None:
    server(story).markers = dict(to["markers"])
    server(story).prepared = dict(to["prepared"])
    story.world.readers.visible = {name: dict(rows) for name, rows in to["visible"].items()}


def seal(story: Story) -> str:
    """Return the gid of the seal among the prepared transactions of one epoch."""
    return seal_in(server(story).prepared)


# ---- the vote


@postgres("T")
def a_task_is_rolled_back_before_the_vote(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    written = run.written(epoch, [0], [1])
    server(story).prepared.popitem()
    with stops(PrepareFailed):
        run.record(epoch, written)


@postgres("P")
def a_query_starts_again(story: Story) -> None:
    for number in range(3):
        story.start().epoch(number, [2 * number, 2 * number + 1])
    story.expect(*range(6))


def two_copies(story: Story) -> None:
    first = story.start()
    second = story.start(copy=story.copied())
    epoch = second.begin(0)
    written = second.written(epoch, [0], [1])
    first.epoch(0, [0], [1])
    with stops(WentBack, PrepareFailed):
        second.record(epoch, written)
    story.expect(0, 1)


def two_copies_record(story: Story) -> None:
    first, second = story.start(), None
    second = story.start(copy=story.copied())
    epochs = [(run, run.begin(0)) for run in (first, second)]
    voted = 0
    for run, epoch in epochs:
        try:
            run.record(epoch, run.written(epoch, [0], [1]))
        except (PrepareFailed, WentBack):
            continue
        run.decide(0)
        run.commit()
        voted += 1
    assert voted == 1, f"{voted} drivers record one epoch"
    story.expect(0, 1)


def set_back_before_the_vote(story: Story) -> None:
    run = story.start()
    before = state(story)
    run.epoch(0, [0], [1])
    epoch = run.begin(1)
    written = run.written(epoch, [2], [3])
    set_back(story, {**before, "prepared": server(story).prepared})
    with stops(WentBack):
        run.record(epoch, written)


for letter in "PST":
    for each in (two_copies, two_copies_record, set_back_before_the_vote):
        if (letter, each) != ("S", two_copies_record):
            postgres(letter)(each)


@postgres("P")
def a_trigger_swallows_markers(story: Story) -> None:
    run = story.start()
    server(story).swallows = True
    with stops(PrepareFailed):
        run.prepare(0, [0])


# ---- the commit


@postgres("P")
def what_is_prepared_is_rolled_back(story: Story) -> None:
    run = decided(story, [0], [1])
    server(story).roll_back_all()
    run.commit()
    story.expect(0, 1)


@postgres("P")
def another_attempt_is_applied_just_before_the_commit(story: Story) -> None:
    run = decided(story, [0], [1])

    def applied() -> None:
        ((_, prepared),) = server(story).prepared.items()
        server(story).prepared.clear()
        server(story).markers |= {key: row._replace(attempt=STRANGER) for key, row in prepared.markers.items()}

    run.steps.before("P commit", applied)
    with stops(OutcomeUnknown, WentBack):
        run.commit()


@postgres("S")
def the_answer_to_a_merge_is_lost(story: Story) -> None:
    run = decided(story, [0], [1])
    run.steps.at("S merge", lost)
    run.commit()
    story.expect(0, 1)


@postgres("S")
def the_table_is_set_back_between_the_comparison_and_the_merge(story: Story) -> None:
    run = story.start()
    before = state(story)
    run.epoch(0, [0])
    run.prepare(1, [1])
    run.decide(1)
    run.steps.before("S applied", lambda: set_back(story, before), skip=1)
    with stops(WentBack):
        run.commit()


@postgres("P")
def each_commit_is_watched(story: Story) -> None:
    run = decided(story, [0])

    def watched() -> None:
        assert server(story).watched, "a server that freezes now is waited for without an end"

    run.steps.before("P commit", watched)
    run.commit()


@postgres("P")
def the_answer_to_a_commit_is_lost_and_so_is_the_question_about_it(story: Story) -> None:
    run = decided(story, [0], [1])
    run.steps.at("P commit", lost, times=9)
    run.steps.at("P marker", lost, times=9)
    with stops(OutcomeUnknown):
        run.commit()
    story.expect(0, 1)


# ---- the seal of tasks that prepare


@postgres("T")
def a_seal_is_rolled_back(story: Story) -> None:
    run = decided(story, [0], [1])
    del server(story).prepared[seal(story)]

    def sealed() -> None:
        keys = server(story).markers.keys()
        parts = {part for _, number, part in keys if number == 0}
        assert not parts or WHOLE in parts, "rows of a task are there without the seal of their epoch"

    for skip in range(6):
        run.steps.after("T commit", sealed, skip=skip)
    run.commit()
    story.expect(0, 1)


@postgres("T")
def another_attempts_seal_is_applied_just_before_the_commit(story: Story) -> None:
    run = decided(story, [0], [1])

    def applied() -> None:
        gid = seal(story)
        ((key, row),) = server(story).prepared.pop(gid).markers.items()
        server(story).markers[key] = row._replace(attempt=STRANGER)

    run.steps.before("T commit", applied)
    with stops(OutcomeUnknown, WentBack):
        run.commit()
    story.expect()


@postgres("T")
def a_failover_makes_a_part_of_a_done_epoch_prepared_again(story: Story) -> None:
    run = story.start()
    run.prepare(0, [0], [1])
    before = state(story)
    run.decide(0)
    run.commit()
    before["prepared"].pop(next(gid for gid in before["prepared"] if gid != seal_in(before["prepared"])))
    set_back(story, before)
    with stops(WentBack):
        story.start()
    story.expect()


def seal_in(prepared: dict[str, PreparedRows]) -> str:
    return next(gid for gid, each in prepared.items() if any(part == WHOLE for *_, part in each.markers))


@postgres("T")
def a_failover_makes_all_of_a_done_epoch_prepared_again(story: Story) -> None:
    run = story.start()
    run.prepare(0, [0], [1])
    before = state(story)
    run.decide(0)
    run.commit()
    set_back(story, before)
    story.start().epoch(1, [2], [3])
    story.expect(0, 1, 2, 3)


@postgres("T")
def a_failover_loses_the_seal_between_the_commits_of_an_epoch(story: Story) -> None:
    run = story.start()
    run.epoch(0, [0], [1])
    run.prepare(1, [2], [3])
    gid = seal(story)
    run.decide(1)

    def loses() -> None:
        for key in [key for key in server(story).markers if key[1:] == (1, WHOLE)]:
            del server(story).markers[key]
        server(story).prepared.pop(gid, None)
        raise Died

    run.steps.after("T commit", loses, skip=1)
    with stops(Died):
        run.commit()
    story.start().commit()
    story.expect(0, 1, 2, 3)


@postgres("P")
def a_second_failover_under_a_repair(story: Story) -> None:
    run = story.start(retains=True)
    run.epoch(0, [0])
    before = state(story)
    run.epoch(1, [1])
    run.epoch(2, [2])
    set_back(story, before)
    steps = Steps(story)
    steps.after("P prepare", lambda: set_back(story, {**before, "prepared": server(story).prepared}), skip=1)
    place = operators.place_of(story.world, QUERY)
    repair = Repair(place, operators.configured({"P": PostgresSink(story.world, steps)}))
    repair.plan()
    with stops(WentBack):
        repair.carry_out()


# ---- what is left


@postgres("P")
def what_is_recorded_and_kept_nowhere_else_stays_prepared(story: Story) -> None:
    run = decided(story, [0])
    story.world.spool.clear()
    del run
    story.start().commit()
    story.expect(0)


@postgres("S")
def what_is_recorded_and_kept_nowhere_else_stays_staged(story: Story) -> None:
    run = decided(story, [0])
    story.world.spool.clear()
    del run
    story.start().commit()
    story.expect(0)


@postgres("P")
def old_markers_are_forgotten_and_new_ones_are_not(story: Story) -> None:
    run = story.start()
    for number in range(2):
        run.epoch(number, [number])
    story.start().epoch(2, [2])
    story.expect(0, 1, 2)


@postgres("P")
def a_done_epoch_that_is_not_the_newest_is_prepared_again(story: Story) -> None:
    run = story.start()
    run.prepare(0, [0])
    before = state(story)
    run.decide(0)
    run.commit()
    run.epoch(1, [1])
    server(story).prepared |= before["prepared"]
    with suppress(WentBack):
        story.start()
    assert server(story).prepared, "a done epoch is rolled back"


@postgres("AB")
def a_sweep_spares_what_another_sink_of_the_database_has_recorded(story: Story) -> None:
    story.world.options = 1
    files = two_checkpoints()
    first = story.start(letters="A", kinds=APART, copy=files[0])
    first.prepare(0, [0])
    files[0][1].clear()
    second = story.start(letters="B", kinds=APART, copy=files[1])
    epoch = second.begin(0)
    second.record(epoch, second.written(epoch, [0]))
    files[1][1].clear()
    story.clock += 10**6
    story.start(letters="B", kinds=APART, copy=files[1])
    story.start(letters="A", kinds=APART, copy=files[0])
    assert len(server(story).prepared) == 2, "a recorded epoch of another sink is rolled back"


@postgres("AB")
def a_sweep_spares_the_staging_tables_and_locks_of_another_sink(story: Story) -> None:
    story.world.options = 1
    files = two_checkpoints()
    first = story.start(letters="A", kinds=APART, copy=files[0])
    first.prepare(0, [0])
    second = story.start(letters="B", kinds=APART, copy=files[1])
    epoch = second.begin(0)
    written = second.written(epoch, [0])
    second.steps.at("B prepare", dies_before)
    with stops(Died):
        second.record(epoch, written)
    story.start(letters="B", kinds=APART, copy=files[1])
    assert len(server(story).prepared) == 1, "a recorded epoch of another sink is rolled back"


def dies_before(_request: Callable[[], Any]) -> Any:
    raise Died


@postgres("AB")
def a_start_ends_no_session_of_another_sink(story: Story) -> None:
    files = two_checkpoints()
    first = story.start(letters="A", kinds=APART, copy=files[0])
    epoch = first.begin(0)
    written = first.written(epoch, [0])

    def refused(_request: Callable[[], Any]) -> Any:
        raise AssertionError("a session of another sink is ended")

    def other() -> None:
        second = Run(story, *files[1], letters="B", kinds=APART)
        second.steps.at("terminate", refused)
        second.coordinator.recover()

    first.steps.before("A prepare", other)
    first.record(epoch, written)


@postgres("AB")
def sinks_of_one_transaction_are_set_apart_before_its_commit(story: Story) -> None:
    run = decided(story, [0])
    server(story).roll_back_all()
    del run
    again = story.start(kinds=APART)
    again.commit()
    rows = [row for sink in "AB" for row in story.world.readers.visible[sink]]
    assert len(rows) == 2, rows
    assert story.world.readers.anomalies in ([], ["TORN: one table of a database is ahead of the other"])


# ---- options


@postgres("P")
def an_epoch_is_prepared_again_with_the_options_that_it_was_written_with(story: Story) -> None:
    for options in (2, 0):
        for later in (0, 1, 2, 3):
            number = 4 * (options == 0) + later
            story.world.options = options
            run = story.start()
            run.prepare(number, [number])
            run.decide(number)
            server(story).roll_back_all()
            story.world.options = later
            story.start().commit()
    story.expect(*range(8))


# ---- another server, another table


@postgres("P")
def a_database_restored_from_a_dump(story: Story) -> None:
    story.start().epoch(0, [0])
    server(story).place = replace(server(story).place, oid=2)
    with stops(WentBack):
        story.start()


@postgres("P")
def another_cluster(story: Story) -> None:
    story.start().epoch(0, [0])
    server(story).place = replace(server(story).place, cluster="2")
    with stops(WentBack):
        story.start()


@postgres("P")
def the_old_primary_after_a_failover(story: Story) -> None:
    run = story.start()
    server(story).place = replace(server(story).place, timeline=2)
    run.epoch(0, [0])
    server(story).place = replace(server(story).place, timeline=1)
    with stops(WentBack):
        story.start()


@postgres("P")
def the_old_primary_whose_successor_has_the_pending_epoch(story: Story) -> None:
    run = story.start()
    run.epoch(0, [0])
    server(story).place = replace(server(story).place, timeline=2)
    run.prepare(1, [1])
    server(story).place = replace(server(story).place, timeline=1)
    with stops(WentBack):
        story.start()


@postgres("P")
def the_old_primary_has_prepared_what_its_successor_has_committed(story: Story) -> None:
    run = story.start()
    server(story).place = replace(server(story).place, timeline=2)
    run.prepare(0, [0])
    before = state(story)
    run.decide(0)
    run.commit()
    set_back(story, before)
    server(story).place = replace(server(story).place, timeline=1)
    with stops(WentBack):
        story.start()
    assert server(story).prepared, "a done epoch is committed on the old primary"


@postgres("P")
def a_table_that_was_made_anew(story: Story) -> None:
    story.start().epoch(0, [0])
    server(story).table = "2"
    with stops(WentBack):
        story.start()


@postgres("P")
def a_table_named_without_its_schema_as_another_comes_before_it(story: Story) -> None:
    run = story.start()
    server(story).path = "elsewhere"
    run.epoch(0, [0])
    story.expect(0)
