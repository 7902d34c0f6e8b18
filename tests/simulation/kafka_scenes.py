"""Scenes of Kafka: what brokers lose, delay, forget and answer around an epoch's transactions."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import (
    EpochsinkError,
    Fenced,
    LogIncomplete,
    OutcomeUnknown,
    PrepareFailed,
    SpoolMissing,
    WentBack,
)
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.server import GroupOffset, GroupOffsets
from epochsink.sink import Ballot, Mark
from simulation import kafka_server
from simulation.driver import Written
from simulation.kafka_brokers import CONCURRENT, OK, TOPIC, UNSTABLE, Brokers, parsed_id
from simulation.kafka_server import BROKER, SETTINGS, MemoryKafka
from simulation.kafka_sink import KafkaLogSink
from simulation.scene import NOTHING, Died, Run, Story, dies, lost, scene, stops, swapped, unsent
from simulation.world import STRANGER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AT: Final = (TOPIC, 0)
DAY: Final = 86_400.0
ALWAYS: Final = 1000
LATER: Final = 10**9
LOGGED: Final = {"K": KafkaLogSink}


def kafka(play: Callable[[Story], None]) -> Callable[[Story], None]:
    return scene("kafka", "K")(play)


@contextmanager
def held(requests: int, *, partitions_too: bool) -> Iterator[None]:
    """Keep brokers from writing the ends of decided transactions, for as many requests; or those to groups alone."""
    left, write = [requests], Brokers.write_ends

    def write_ends(self: Brokers, most: int = 1) -> None:
        left[0] -= 1
        to_partitions = any(isinstance(each.left[0], tuple) for each in self.ids.values() if each.left)
        if left[0] < 0 or (to_partitions and not partitions_too):
            write(self, most)

    with swapped(Brokers, "write_ends", write_ends):
        yield


def decided(story: Story, *tasks: Any, **options: Any) -> Run:
    run = story.start(**options)
    run.prepare(0, *tasks)
    run.decide(0)
    return run


# ---- what a partition loses


@kafka
def a_partition_loses_the_last_batch_of_two(story: Story) -> None:
    run = decided(story, [[0, 1], [2, 3]])
    story.world.brokers.lose_at_partition("lost")
    run.commit()
    story.expect(0, 1, 2, 3)


@kafka
def one_of_many_transactions_has_lost_rows(story: Story) -> None:
    run = decided(story, *([at] for at in range(8)))
    story.world.brokers.lose_at_partition("aborted")
    run.commit()
    story.expect(*range(8))


@kafka
def an_unclean_election_between_the_look_and_the_commit(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.before("K commit", lambda: story.world.brokers.lose_at_partition("lost"))
    with stops(OutcomeUnknown):
        run.commit()


@kafka
def an_operator_aborts_between_the_look_and_the_commit(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.before("K commit", lambda: story.world.brokers.lose_at_partition("aborted"))
    with stops(OutcomeUnknown, words="aborted"):
        run.commit()


@kafka
def an_operator_deletes_rows_between_the_look_and_the_commit(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.before("K commit", lambda: story.world.brokers.lose_records("gone"))
    with stops(OutcomeUnknown, words="were deleted"):
        run.commit()
    with stops(OutcomeUnknown, words="were deleted"):
        story.start()


@kafka
def an_end_is_left_out_of_a_partition_without_a_leader(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.before("K commit", lambda: setattr(story.world.brokers, "leaves_out", True))
    run.commit()
    story.expect(0, 1)


@kafka
def an_end_is_left_out_that_the_user_may_not_write(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    brokers.may_alter = False
    run.steps.before("K commit", lambda: setattr(brokers, "leaves_out", True))
    with stops(OutcomeUnknown, words="operation Alter"):
        run.commit()
    story.expect(1)
    brokers.may_alter = True
    story.start().commit()
    story.expect(0, 1)


@kafka
def a_marker_is_left_out_that_the_user_may_not_write(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    brokers.may_alter = False

    def leave_out_the_group() -> None:
        while any(isinstance(at, tuple) for each in brokers.ids.values() for at in each.left):
            brokers.write_ends()
        brokers.leaves_out = True

    run.steps.after("K commit", leave_out_the_group)
    with stops(OutcomeUnknown, words="operation Alter"):
        run.commit()
    brokers.may_alter = True
    story.start().commit()
    story.expect(0, 1)


def left_by_a_dead_driver(story: Story) -> Brokers:
    """Let a driver die with an open transaction, and a partition miss the end of its abort."""
    brokers = story.world.brokers
    run = story.start()
    run.epoch(0, [0, 1])
    run.written(run.begin(1), [2])
    brokers.leaves_out = True
    brokers.time_out()
    assert pinning(brokers)
    return brokers


def pinning(brokers: Brokers) -> list[int]:
    """Return the producers that have a transaction open in the partition."""
    return [each.producer_id for each in brokers.producers[AT].values() if each.start >= 0]


@kafka
def the_end_of_an_abort_is_left_out_before_committed_rows(story: Story) -> None:
    brokers = left_by_a_dead_driver(story)
    story.start().epoch(1, [2, 3])
    assert not pinning(brokers)
    story.expect(0, 1, 2, 3)


@kafka
def the_end_of_an_abort_is_left_out_that_the_user_may_not_write(story: Story) -> None:
    brokers = left_by_a_dead_driver(story)
    brokers.may_alter = False
    story.start().epoch(1, [2, 3])
    assert pinning(brokers)
    brokers.may_alter = True
    story.start().epoch(2, [4, 5])
    assert not pinning(brokers)
    story.expect(0, 1, 2, 3, 4, 5)


@kafka
def another_driver_has_the_fence_while_the_end_of_an_abort_is_missing(story: Story) -> None:
    brokers = left_by_a_dead_driver(story)
    run = story.start()
    run.prepare(1, [2, 3])
    run.decide(1)
    fence = next(name for name in brokers.ids if name.endswith(".fence"))
    run.steps.before("leaders Producers", lambda: brokers.initialise(fence), skip=1)
    run.commit()
    assert pinning(brokers)


@kafka
def the_end_of_a_newer_drivers_abort_is_left_out(story: Story) -> None:
    brokers = left_by_a_dead_driver(story)
    [name] = [name for name, each in brokers.ids.items() if each.producer_id in pinning(brokers)]
    parsed = parsed_id(name)
    assert parsed is not None
    brokers.ids[str(replace(parsed, generation=parsed.generation + LATER))] = brokers.ids.pop(name)
    story.start().epoch(1, [2, 3])
    assert pinning(brokers)


def lost_again(story: Story, run: Run) -> str:
    """Let brokers lose the end of a commit that they have acknowledged; return the transactional id."""
    brokers = story.world.brokers
    run.epoch(0, [1], [0])
    brokers.finish()
    [(producer, state)] = brokers.producers[AT].items()
    brokers.producers[AT][producer] = state._replace(start=0)
    return next(name for name, each in brokers.ids.items() if each.producer_id == producer)


@kafka
def an_end_that_brokers_have_lost_is_not_written_as_an_abort(story: Story) -> None:
    """Keep to it where the ledger does not name its epoch any more."""
    run = story.start()
    lost_again(story, run)
    sink = type(run.participant)
    visible = sink.visible

    def visible_later(self: Any, epoch: Any, ballots: Any, _: Any) -> list[str]:
        lines: list[str] = visible(self, epoch, ballots, lambda: NOTHING)
        return lines

    with swapped(sink, "visible", visible_later):
        run.epoch(1, [2, 3])
    assert pinning(story.world.brokers)


@kafka
def nor_if_its_id_was_aborted_since(story: Story) -> None:
    run, brokers = story.start(), story.world.brokers
    name = lost_again(story, run)
    _, producer, epoch = brokers.initialise(name)
    brokers.add(name, producer, epoch, [(TOPIC, 1)])
    brokers.end(name, producer, epoch, commit=False)
    brokers.finish()
    run.epoch(1, [2, 3])
    assert pinning(brokers)


@kafka
def aborted_rows_whose_end_was_left_out_are_before_the_producers_next_rows(story: Story) -> None:
    """Show that they stay aborted: they are a part of that transaction, and its commit would show them."""
    run = decided(story, [0, 1])
    run.commit()
    second = run.begin(1)
    run.written(second, [2, 3])
    story.world.brokers.leaves_out = True
    story.world.brokers.time_out()
    run.prepare(1, [2, 3])
    run.decide(1)
    run.commit()
    story.expect(0, 1, 2, 3)


@kafka
def an_operator_deletes_rows_after_the_commit(story: Story) -> None:
    run = decided(story, [0, 1])

    def delete() -> None:
        story.world.brokers.finish()
        story.world.brokers.lose_records("gone")

    run.steps.after("K commit", delete)
    run.commit()
    story.expect(0, 1)


@kafka
def an_operator_deletes_the_first_row_before_the_vote(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    parts = run.written(epoch, [[0, 1], [2, 3]])
    story.world.brokers.lose_records("cut")
    story.world.brokers.deleted.clear()
    run.record(epoch, parts)
    run.decide(0)
    run.commit()
    story.expect(0, 1, 2, 3)


@kafka
def an_operator_aborts_before_the_commit_and_its_ends_come_late(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.before("K commit", lambda: story.world.brokers.lose_at_partition("aborted"))
    with held(12, partitions_too=True), stops(OutcomeUnknown, words="aborted"):
        run.commit()


@kafka
def a_partition_loses_the_first_batch_while_its_task_writes(story: Story) -> None:
    run = story.start()
    run.steps.before("K send", lambda: story.world.brokers.lose_at_partition("lost"), skip=1)
    run.epoch(0, [[0, 4], [2, 5]])
    story.expect(0, 2, 4, 5)


@kafka
def likewise_in_a_later_epoch(story: Story) -> None:
    run = story.start()
    run.epoch(0, [0, 1])
    run.steps.before("K send", lambda: story.world.brokers.lose_at_partition("lost"), skip=1)
    run.epoch(1, [[2, 3], [5, 4]])
    story.expect(0, 1, 2, 3, 4, 5)


@kafka
def rows_that_one_vote_has_missed_are_missed_by_the_next(story: Story) -> None:
    run = story.start(spool=False)
    epoch = run.begin(0)
    run.steps.before("K send", lambda: story.world.brokers.lose_at_partition("lost"), skip=1)
    ((_, part),) = run.written(epoch, [[0], [2]]).parts["K"]
    for _ in range(2):
        with stops(PrepareFailed):
            run.participant.vote(epoch, {"K": Ballot([part], None)})  # type: ignore[arg-type] # no row is read


@kafka
def a_transaction_is_aborted_and_written_to_again_in_one_partition(story: Story) -> None:
    run, brokers = decided(story, [[0], [2]]), story.world.brokers
    ((producer, state),) = brokers.producers[AT].items()
    ((name, _),) = brokers.open_ids()
    second = brokers.logs[AT].batches[-1]
    brokers._end_at(AT, producer, state.producer_epoch, commits=False)
    del brokers.producers[AT][producer]
    brokers.append(AT, name, second)
    run.commit()
    story.expect(0, 2)


@kafka
def retention_takes_the_first_rows_of_an_open_transaction(story: Story) -> None:
    run = decided(story, [[0, 1], [2, 3]])
    story.world.brokers.lose_records("cut")
    story.world.brokers.deleted.clear()
    run.commit()
    story.expect(0, 1, 2, 3)


@kafka
def what_was_prepared_again_is_cut_off_beside_what_was_not(story: Story) -> None:
    run = decided(story, [0], [2])
    story.world.brokers.lose_at_partition("lost")
    run.steps.before("K commit", lambda: story.world.brokers.lose_at_partition("lost"), skip=1)
    with stops(OutcomeUnknown):
        run.commit()


@kafka
def another_attempt_takes_the_transactional_id(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    parts = run.written(epoch, [0, 1])
    run.task(epoch, [0, 1])[1].prepare()
    run.record(epoch, parts)
    run.decide(0)
    run.commit()
    story.expect(0, 1)


# ---- what a coordinator answers


@kafka
def the_coordinator_times_out(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.at("K commit", lambda _: 7)
    run.commit()
    story.expect(0, 1)


@kafka
def the_coordinator_is_busy(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.at("K commit", lambda _: CONCURRENT)
    run.commit()
    story.expect(0, 1)


@kafka
def a_commit_whose_answers_are_lost_has_not_reached_the_markers(story: Story) -> None:
    run = decided(story, [0, 1])
    run.steps.at("K commit", lost, times=ALWAYS)
    with held(ALWAYS, partitions_too=True), stops(OutcomeUnknown):
        run.commit()
    run.steps.at("K commit", unsent, times=0)
    with held(16, partitions_too=False):
        run.commit()
    story.expect(0, 1)


@kafka
def another_one_has_committed_under_the_id_of_a_lost_epoch(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    ((name, _),) = brokers.open_ids()
    brokers.time_out()
    _, producer, epoch = brokers.initialise(name)
    brokers.add(name, producer, epoch, [AT])
    brokers.end(name, producer, epoch, commit=True)
    brokers.finish()
    with stops(OutcomeUnknown):
        run.commit()


@kafka
def a_marker_has_expired(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    run.steps.at("K commit", lost, times=ALWAYS)
    with held(ALWAYS, partitions_too=True), stops(OutcomeUnknown):
        run.commit()
    brokers.finish()
    brokers.ids.clear()
    brokers.markers.clear()
    story.later = 8 * DAY
    with stops(OutcomeUnknown):
        story.start().commit()
    story.expect(0, 1)


@kafka
def a_marker_expires_as_soon_as_it_is_committed(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    run.pass_time(8 * DAY)

    def expire() -> None:
        brokers.finish()
        brokers.markers.clear()

    run.steps.after("K commit", lambda: run.steps.before("K markers", expire))
    run.commit()
    story.expect(0, 1)


@kafka
def a_marker_is_replaced_while_an_epoch_is_committed(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers

    def replace() -> None:
        brokers.finish()
        brokers.alter_marker(Mark(0, STRANGER))

    run.steps.after("K commit", lambda: run.steps.before("K markers", replace))
    with stops(WentBack):
        run.commit()


@kafka
def a_marker_expires_where_nobody_may_ask_for_how_long_it_stays(story: Story) -> None:
    def ask(_self: MemoryKafka, name: str) -> str | None:
        return None if "offsets" in name else BROKER[name]

    with swapped(MemoryKafka, "ask_broker_setting", ask):
        story.start().epoch(0, [0, 1])
        story.world.brokers.finish()
        story.world.brokers.markers.clear()
        story.later = 2 * DAY
        story.start().epoch(1, [2, 3])
    story.expect(0, 1, 2, 3)


@kafka
def one_marker_has_expired_and_another_is_set_back(story: Story) -> None:
    run, brokers = story.start(), story.world.brokers
    run.epoch(0, [0], [4])
    brokers.finish()
    before = {group: dict(kept) for group, kept in brokers.markers.items()}
    run.epoch(1, [1], [5])
    run.epoch(2, [2], [6])
    brokers.finish()
    first, second = sorted(before)
    brokers.markers |= {second: before[second]}
    del brokers.markers[first]
    story.later = 8 * DAY
    with stops(WentBack):
        story.start()


@kafka
def a_marker_cannot_be_read_for_a_while(story: Story) -> None:
    story.start().epoch(0, [0, 1])
    story.world.brokers.finish()
    left, told = [7], Brokers.offsets

    def offsets(self: Brokers, group: str, topics: Any, *, stable: bool) -> GroupOffsets:
        left[0] -= 1
        return GroupOffsets(group, 15, {}) if left[0] >= 0 else told(self, group, topics, stable=stable)

    with swapped(Brokers, "offsets", offsets):
        story.start().epoch(1, [2, 3])
    story.expect(0, 1, 2, 3)


@kafka
def an_older_marker_stands_under_another_topic(story: Story) -> None:
    run, brokers = story.start(), story.world.brokers
    for number in range(3):
        run.epoch(number, [number])
    brokers.finish()
    for group, kept in brokers.markers.items():
        brokers.markers[group] = {"former": GroupOffset(0, STRANGER, OK), **kept}
    run.epoch(3, [3])
    story.start().epoch(4, [4])
    story.expect(0, 1, 2, 3, 4)


@kafka
def a_broker_shows_the_first_marker_late(story: Story) -> None:
    run, brokers = decided(story, [0, 1]), story.world.brokers
    ((name, _),) = brokers.open_ids()
    run.steps.at("K commit", lost, times=ALWAYS)
    with held(ALWAYS, partitions_too=True), stops(OutcomeUnknown):
        run.commit()
    brokers.finish()
    brokers.initialise(name)
    told, left = Brokers.offsets, [2]

    def offsets(self: Brokers, group: str, topics: Any, *, stable: bool) -> GroupOffsets:
        if left[0] <= 0:
            return told(self, group, topics, stable=stable)
        if topics is None:
            return GroupOffsets(group, OK, {})
        left[0] -= stable
        return GroupOffsets(group, OK, {topic: [GroupOffset(-1, "", UNSTABLE if stable else OK)] for topic in topics})

    with swapped(Brokers, "offsets", offsets):
        story.start().commit()
    story.expect(0, 1)


@kafka
def an_answer_leaves_out_a_partition(story: Story) -> None:
    ask, left = MemoryKafka.ask_leaders, [0]

    def leave_out(self: MemoryKafka, requests: Any) -> Any:
        answers = ask(self, requests)
        left[0] -= 1
        if left[0] == -1 and answers:
            answers[0] = {at: told for at, told in answers[0].items() if at != AT}
        return answers

    run = story.start()
    with swapped(MemoryKafka, "ask_leaders", leave_out):
        for number in range(8):
            left[0] = number
            run.epoch(number, [2 * number, 2 * number + 1])
    story.expect(*range(16))
    assert not story.replays()


@kafka
def an_answer_leaves_out_a_group(story: Story) -> None:
    asked = MemoryKafka.group_offsets
    story.start().epoch(0, [0, 1])
    left = [4]

    def leave_out(self: MemoryKafka, groups: Any, topics: Any, *, stable: bool) -> Any:
        left[0] -= 1
        found = asked(self, groups, topics, stable=stable)
        return found[1:] if left[0] >= 0 else found

    with swapped(MemoryKafka, "group_offsets", leave_out):
        story.start().epoch(1, [2, 3])
    story.expect(0, 1, 2, 3)


# ---- other drivers


@kafka
def another_driver_is_committing_as_the_markers_are_read(story: Story) -> None:
    first = story.start()
    copy = story.copied()
    first.prepare(0, [0, 1])
    first.decide(0)
    first.steps.at("K commit", dies)
    with held(10, partitions_too=True):
        with stops(Died):
            first.commit()
        with stops(WentBack):
            story.start(copy=copy)
    story.expect(0, 1)


@kafka
def a_broken_broker_never_ends_what_another_driver_has_committed(story: Story) -> None:
    first = decided(story, [0, 1])
    first.steps.at("K commit", dies)
    with held(10**9, partitions_too=True):
        with stops(Died):
            first.commit()
        with stops(EpochsinkError, OSError):
            story.start()


@kafka
def an_older_copy_starts_beside_a_newer_driver(story: Story) -> None:
    story.start()
    copy, before = story.copied(), story.clock
    story.clock += 10**6
    newer = story.start()
    epoch = newer.begin(0)
    parts = newer.written(epoch, [0, 1])
    story.clock = before
    with stops(WentBack):
        story.start(copy=copy)
    newer.record(epoch, parts)
    newer.decide(0)
    newer.commit()
    story.expect(0, 1)


@kafka
def a_driver_on_a_copy_has_taken_the_fence(story: Story) -> None:
    first = story.start()
    story.start(copy=story.copied())
    with stops(Fenced):
        first.prepare(0, [0, 1])


@kafka
def likewise_after_the_brokers_have_forgotten_it(story: Story) -> None:
    first = story.start()
    story.world.brokers.ids.clear()
    story.start(copy=story.copied())
    with stops(Fenced):
        first.prepare(0, [0, 1])


@kafka
def a_fenced_driver_sweeps(story: Story) -> None:
    first = story.start(spool=False)
    second = story.start(copy=story.copied(), spool=False)
    epoch = second.begin(0)
    written = second.written(epoch, [0, 1])
    first.participant.end(first.participant.remnants(NOTHING))
    second.record(epoch, written)


# ---- sweeps


@kafka
def a_sweep_comes_between_what_is_prepared_again_and_its_record(story: Story) -> None:
    run = decided(story, [0, 1])
    story.world.brokers.time_out()
    run.steps.after("K mark", run.sweep, skip=0)
    run.commit()
    story.expect(0, 1)


@kafka
def a_living_task_writes_after_its_transaction_was_swept(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    _, writer, rows = run.task(epoch, [[0], [2]], number=1)
    run.sweep()
    story.world.brokers.finish()
    with stops(NativeError, EpochsinkError):
        writer.write(rows)
        writer._writer._producer.flush()
    assert not story.world.brokers.open_ids(), "an open transaction"


@kafka
def a_task_is_adding_a_partition_as_it_is_swept(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    run.task(epoch, [[0], [2]], number=1)
    real, left = Brokers.initialise, [1]

    def initialise(self: Brokers, *arguments: Any, **settings: Any) -> tuple[int, int, int]:
        left[0] -= 1
        return (CONCURRENT, -1, -1) if left[0] >= 0 else real(self, *arguments, **settings)

    with swapped(Brokers, "initialise", initialise):
        run.sweep()
    story.world.brokers.finish()
    assert not story.world.brokers.open_ids(), "an open transaction"


@kafka
def what_is_copied_comes_late(story: Story) -> None:
    run, late = decided(story, [0, 1], kinds=LOGGED), []
    story.world.brokers.time_out()

    def keep(request: Callable[[], Any]) -> Any:
        late.append(request)
        raise OSError("no answer")

    run.steps.at("K add partitions", keep, times=ALWAYS)
    with stops(EpochsinkError, OSError):
        run.commit()
    story.world.brokers.finish()
    late[0]()
    assert not story.world.brokers.open_ids(), "an open transaction"


# ---- where rows are kept


def keeps_no_rows(setting: str, value: str | None) -> Callable[[Story], None]:
    """Return a scene with a topic that may lose what was aborted, so that the spool has to keep it."""

    def play(story: Story) -> None:
        with swapped(SETTINGS, setting, value):
            run = decided(story, [0, 1], kinds=LOGGED)
            story.world.brokers.time_out()
            story.world.brokers.lose_records("gone")
            story.world.brokers.deleted.clear()
            run.commit()
        story.expect(0, 1)

    play.__name__ = f"rows_are_spooled_where_{setting}_is_{value}"
    return play


for given in (
    ("cleanup.policy", "compact"),
    ("cleanup.policy", "compact,delete"),
    ("unclean.leader.election.enable", "true"),
    ("retention.bytes", "1000"),
):
    kafka(keeps_no_rows(*given))


@kafka
def rows_are_spooled_where_nobody_may_ask_for_how_long_the_topic_keeps_them(story: Story) -> None:
    with swapped(kafka_server, "SETTINGS", {name: told for name, told in SETTINGS.items() if name != "retention.ms"}):
        keeps_no_rows("cleanup.policy", "delete")(story)


@kafka
def a_topic_begins_to_delete_while_an_epoch_is_written(story: Story) -> None:
    run = story.start(kinds=LOGGED)
    epoch = run.begin(0)
    parts = run.written(epoch, [0, 1])
    with swapped(kafka_server.SETTINGS, "retention.ms", "1000"), stops(PrepareFailed):
        run.record(epoch, parts)


@kafka
def rows_are_prepared_again_from_the_log(story: Story) -> None:
    run = story.start(kinds=LOGGED)
    epoch = run.begin(0)
    # an attempt that lost, under the same id
    run.task(epoch, [[0], [2]])[1].prepare()
    written = run.written(epoch, [[0, 1], [2, 3]])
    story.world.brokers.time_out()
    run.record(epoch, written)
    run.decide(0)
    story.world.brokers.time_out()
    run.commit()
    story.expect(0, 1, 2, 3)


@kafka
def retention_has_taken_rows_that_the_log_alone_kept(story: Story) -> None:
    run = decided(story, [[0, 1], [2, 3]], kinds=LOGGED)
    story.world.brokers.time_out()
    story.world.brokers.lose_records("gone")
    with stops(LogIncomplete):
        run.commit()
    story.expect()


@kafka
def the_log_holds_a_batch_twice_and_lacks_another(story: Story) -> None:
    run, brokers = decided(story, [[0], [2]], kinds=LOGGED), story.world.brokers
    brokers.time_out()
    log = brokers.logs[AT]
    first, second, *others = log.batches
    brokers.logs[AT] = log._replace(batches=(first, second._replace(sequence=0, rows=first.rows), *others))
    with stops(LogIncomplete):
        run.commit()
    story.expect()


@kafka
def the_spool_lacks_a_row(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    written = run.written(epoch, [0, 1, 2])
    written.files.clear()
    run.record(epoch, written)
    run.decide(0)
    story.world.brokers.time_out()
    (folder,) = story.world.spool.values()
    for name, rows in folder.items():
        folder[name] = rows[:2]
    with stops(SpoolMissing):
        run.commit()
    story.expect()


@kafka
def two_parts_of_an_epoch_share_a_marker(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    both = [run.task(epoch, [at], 0, number) for number, at in enumerate((0, 1))]
    with stops(PrepareFailed):
        run.record(epoch, Written({"K": [(identifier, writer.prepare()) for identifier, writer, _ in both]}))
