"""Scenes of Elasticsearch: what a cluster refuses, delays, drops and forgets while an epoch is applied."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.applied_epochs import EPOCHS, INDEX
from epochsink.errors import EpochsinkError, OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.identity import claim_document, marker_document
from epochsink.sink import Mark
from simulation import operators
from simulation.memory_elasticsearch import Cluster, refused
from simulation.readers import Row
from simulation.scene import QUERY, Died, Run, Story, dies, scene, stops, swapped, unsent
from simulation.search_sink import KEYED, KeyedSearchSink, SearchSink, SmallRequests
from simulation.search_target import SearchTarget, row_of, source_of
from simulation.world import STRANGER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.scene import Scene

OTHERS: Final = Row("~other", 0, 0, STRANGER)


def search(letters: str) -> Callable[[Scene], Scene]:
    return scene("elasticsearch", letters)


def sink_of(letter: str, *, large: bool = False, **given: Any) -> dict[str, type[SearchSink]]:
    """Return a kind of sink with other arguments; ``large`` requests have several documents."""
    keyed = {"key": "id", "order_by": "source"} if letter == KEYED else {}
    arguments = {"index": f"index-{letter.lower()}", **keyed, **given}
    if given.get("dead_letter_index"):
        arguments["on_rejected"] = "dead_letter"
    config = (Elasticsearch if large else SmallRequests)("http://memory:9200", **arguments)

    class Kind(KeyedSearchSink if letter == KEYED else SearchSink):  # type: ignore[misc] # one of two
        def __init__(self, world: Any, step: Any, **options: Any) -> None:
            super().__init__(world, step, **options)
            self._sink = config

    return {letter: Kind}


ASIDE: Final = {letter: sink_of(letter, dead_letter_index=f"letters-{letter.lower()}") for letter in "EF"}
LARGE: Final = {letter: sink_of(letter, large=True) for letter in "EF"}


def target(story: Story) -> SearchTarget:
    return story.world.search[story.letters[0]]


def letters(story: Story) -> list[int]:
    """Return the rows of the documents in the index of dead letters, whether or not a reader counts them."""
    stored = target(story).indices.get(target(story).aside, {}).values()
    return [row_of(json.loads(each.source)["source"]).source for each in stored if each.source]


def decided(story: Story, *tasks: Any, **options: Any) -> Run:
    run = story.start(**options)
    run.prepare(0, *tasks)
    run.decide(0)
    return run


def answering(answer: Callable[[str, Mapping[str, Any], str], Mapping[str, Any] | None]) -> Any:
    """Let the cluster answer an operation with something else, if there is such an answer to its index and source."""
    real = SearchTarget._carry_out

    def carry_out(self: SearchTarget, action: str, index: str, fields: Mapping[str, Any], source: str | None) -> Any:
        other = answer(index, fields, source or "")
        if other is None:
            return real(self, action, index, fields, source)
        return {"_index": index, "_id": fields["_id"], **other}

    return swapped(SearchTarget, "_carry_out", carry_out)


def fails(status: int, kind: str, *, source: int | None = None, times: int = 1) -> Any:
    """Let operations fail: those of a source row, or all on the sink's index."""
    left = [times]

    def answer(index: str, _fields: Mapping[str, Any], text: str) -> Mapping[str, Any] | None:
        checks = text == "{}"
        mine = index.startswith("index-") and (source is None or (not checks and f'"source": {source},' in text))
        if not mine or not left[0]:
            return None
        left[0] -= not checks
        return {"status": status, "error": {"type": kind, "reason": "it says so"}}

    return answering(answer)


def change(story: Story, index: str, name: str, *, version: int | None = None, source: str | None = "") -> None:
    """Change a document as another program does, or delete it (None)."""
    stored = target(story).indices[index][name]
    text = stored.source if source == "" else source
    target(story)._store(index, name, version or stored.version + 1, text)


# ---- whole epochs


def epochs(story: Story, **options: Any) -> None:
    for number in range(3):
        run = story.start(**options)
        run.epoch(number, [4 * number, 4 * number + 1], [4 * number + 2, 4 * number + 3])
    story.expect(*((10, 11) if KEYED in story.letters else range(12)))


@search("E")
def epochs_without_keys(story: Story) -> None:
    epochs(story)


@search("E")
def epochs_in_large_requests(story: Story) -> None:
    epochs(story, kinds=LARGE["E"])


@search("F")
def epochs_with_keys(story: Story) -> None:
    epochs(story)


@search("E")
def tasks_of_many_rows(story: Story) -> None:
    story.start().epoch(0, [*range(10)], [*range(10, 20)])
    story.expect(*range(20))


@search("F")
def the_newest_row_of_a_key_is_in_the_first_task(story: Story) -> None:
    story.start().epoch(0, [3, 2], [1, 0])
    story.expect(2, 3)


@search("E")
def a_request_is_too_large(story: Story) -> None:
    real = SearchTarget.bulk

    def bulk(self: SearchTarget, index: str | None, body: bytes, wanted: str, **options: Any) -> Any:
        if body.count(b"\n") > 4:
            return refused(413, "content_too_long", "too large")
        return real(self, index, body, wanted, **options)

    with swapped(SearchTarget, "bulk", bulk):
        story.start(kinds=LARGE["E"]).epoch(0, [*range(7)])
    story.expect(*range(7))


# ---- what a cluster answers


def answered(status: int, kind: str, *, aside: bool = False, source: int | None = None) -> Scene:
    """Return a scene in which operations fail, all of a request or that of a row, also when they are sent again."""
    # the first answer says only that some operation has failed
    times = 9 if source is None else 2

    def play(story: Story) -> None:
        run = decided(story, [0, 1], [2], kinds=(ASIDE if aside else LARGE)["E"])
        with fails(status, kind, source=source, times=times):
            run.commit()
        story.expect(0, 1, 2)
        assert not letters(story), "a row is set aside that the index takes"

    play.__name__ = f"an operation is answered {status} {kind}{', as any other' if source is None else ''}" + (
        ", where rows may be set aside" if aside else ""
    )
    return play


for given in (
    answered(503, "unavailable_shards_exception", source=1, aside=True),
    answered(503, "unavailable_shards_exception", source=1),
    answered(429, "es_rejected_execution_exception", source=1, aside=True),
    answered(429, "es_rejected_execution_exception", source=1),
    answered(429, "es_rejected_execution_exception"),
    answered(503, "unavailable_shards_exception"),
):
    search("E")(given)


def set_aside(status: int, kind: str) -> Scene:
    """Return a scene in which a row is refused for good, and becomes a letter."""

    def play(story: Story) -> None:
        run = decided(story, [0, 1], [2], kinds=ASIDE["E"])
        with fails(status, kind, source=1, times=99):
            run.commit()
        story.expect(0, 1, 2)
        assert len(target(story).documents) == 2

    play.__name__ = f"a row is refused with {status} {kind}"
    return play


search("E")(set_aside(400, "document_parsing_exception"))
search("E")(set_aside(500, "fail_processor_exception"))


@search("E")
def a_row_is_refused_for_a_reason_that_nobody_knows(story: Story) -> None:
    run = decided(story, [0, 1], [2], kinds=ASIDE["E"])
    real = SearchTarget._carry_out

    def carry_out(self: SearchTarget, action: str, index: str, fields: Mapping[str, Any], source: str | None) -> Any:
        if index == self.index and source and '"source": 1,' in source:
            error = {"type": "unheard_of_exception", "reason": "this row"}
            return {"_index": index, "_id": fields["_id"], "status": 403, "error": error}
        return real(self, action, index, fields, source)

    with swapped(SearchTarget, "_carry_out", carry_out):
        run.commit()
    story.expect(0, 1, 2)
    assert letters(story) == [1], letters(story)


@search("E")
def rows_that_stop_the_query_are_not_left_out(story: Story) -> None:
    run = decided(story, [0, 1], [2])
    with fails(400, "document_parsing_exception", source=1, times=99), stops(RowsRejected):
        run.commit()


@search("E")
def a_broken_server_refuses_everything(story: Story) -> None:
    run = decided(story, [0], [2], kinds=sink_of("E", dead_letter_index="letters-e", timeout=0.01))
    target(story).create_index(target(story).aside, None, None)
    with fails(500, "unheard_of_exception", times=10**9), stops(OutcomeUnknown):
        run.commit()
    run.commit()
    story.expect(0, 2)
    assert not target(story).indices.get(target(story).aside)


@search("E")
def an_answer_leaves_out_an_operation(story: Story) -> None:
    run = decided(story, [0, 1, 2], kinds=sink_of("E", large=True, dead_letter_index="letters-e"))
    target(story).refuses = True
    real = SearchTarget.bulk

    def bulk(self: SearchTarget, index: str | None, body: bytes, wanted: str, **options: Any) -> Any:
        answer = real(self, index, body, wanted, **options)
        if "items" in answer and len(answer["items"]) > 1:
            answer["items"] = [each for each in answer["items"] if "error" not in next(iter(each.values()))]
        return answer

    with swapped(SearchTarget, "bulk", bulk), stops(OutcomeUnknown):
        run.commit()


@search("E")
def more_rows_are_refused_than_the_limit_allows(story: Story) -> None:
    run = decided(story, [0, 1], [2], kinds=sink_of("E", dead_letter_index="letters-e", letters_limit=0.1))
    target(story).refuses = True
    with stops(RowsRejected):
        run.commit()


@search("E")
def a_pipeline_drops_a_document(story: Story) -> None:
    run, held = story.start(kinds=LARGE["E"]), target(story)
    held.pipelines["p"] = {}
    held.settings[held.index]["index.default_pipeline"] = "p"
    run.prepare(0, [0, 1, 2])
    run.decide(0)
    dropped = {"status": 200, "result": "noop"}
    with answering(lambda _i, _f, text: dropped if '"source": 1,' in text else None), stops(OutcomeUnknown):
        run.commit()


@search("E")
def a_pipeline_sends_a_document_elsewhere(story: Story) -> None:
    run, held = story.start(kinds=LARGE["E"]), target(story)
    held.pipelines["p"] = {}
    held.settings[held.index]["index.default_pipeline"] = "p"
    run.prepare(0, [0, 1, 2])
    run.decide(0)

    def elsewhere(_index: str, fields: Mapping[str, Any], text: str) -> Mapping[str, Any] | None:
        moved = {"_index": "other", "status": 201, "result": "created", "_version": fields.get("version")}
        return moved if '"source": 1,' in text else None

    with answering(elsewhere), stops(OutcomeUnknown):
        run.commit()


@search("E")
def a_pipeline_sends_a_document_to_an_index_that_has_it(story: Story) -> None:
    run, held = story.start(kinds=LARGE["E"]), target(story)
    held.pipelines["p"] = {}
    held.settings[held.index]["index.default_pipeline"] = "p"
    run.prepare(0, [0, 1, 2])
    run.decide(0)
    error = {"type": "version_conflict_engine_exception", "reason": "there"}
    conflict = {"_index": "other", "status": 409, "error": error}
    with answering(lambda _i, _f, text: conflict if '"source": 1,' in text else None), stops(OutcomeUnknown):
        run.commit()


# ---- an epoch that is applied again


def versions(story: Story) -> set[int]:
    return {stored.version % EPOCHS for stored in target(story).indices[target(story).index].values()}


def applied_again(story: Story) -> None:
    run = decided(story, [0, 1], [2])
    run.steps.at("bulk", dies, skip=1)
    with stops(Died):
        run.commit()
    story.start().commit()
    assert versions(story) == {0}, versions(story)


search("E")(applied_again)
search("F")(applied_again)


@search("F")
def a_request_of_an_earlier_epoch_comes_late(story: Story) -> None:
    run, late = story.start(), []

    def twice(request: Callable[[], Any]) -> Any:
        late.append(request)
        return request()

    run.steps.at("bulk", twice)
    run.epoch(0, [0, 1])
    run.epoch(1, [2, 3])
    late[0]()
    story.expect(2, 3)


@search("E")
def a_task_of_the_spool_is_damaged(story: Story) -> None:
    # so many rows that a request is sent before the last task is read
    run = decided(story, [0, 1, 2, 3, 4], [5])
    (folder,) = story.world.spool.values()
    name = list(folder)[-1]
    folder[name] = [row._replace(attempt="altered") for row in folder[name]]
    with stops(EpochsinkError):
        run.commit()
    assert not target(story).documents, "a part of the epoch is applied"


def spool_lacks_a_row(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    written = run.written(epoch, [0, 1, 2])
    written.files.clear()
    run.record(epoch, written)
    run.decide(0)
    (folder,) = story.world.spool.values()
    for name, rows in folder.items():
        folder[name] = rows[:2]
    with stops(OutcomeUnknown):
        run.commit()


search("E")(spool_lacks_a_row)


@search("F")
def the_spool_lacks_a_row_before_the_vote(story: Story) -> None:
    run = story.start()
    epoch = run.begin(0)
    written = run.written(epoch, [0, 1, 2])
    written.files.clear()
    (folder,) = story.world.spool.values()
    for name, rows in folder.items():
        folder[name] = rows[:2]
    with stops(PrepareFailed):
        run.record(epoch, written)


# ---- documents of others


@search("E")
def a_document_without_a_key_is_changed_before_its_epoch_is_applied_again(story: Story) -> None:
    run = decided(story, [0], [2])
    run.steps.at("bulk", dies)
    with stops(Died):
        run.commit()
    held = target(story)
    (name,) = held.indices[held.index]
    changed = source_of(held.documents[name][1]._replace(attempt=STRANGER))
    change(story, held.index, name, source=changed)
    story.start().commit()
    assert held.indices[held.index][name].source == changed, "the change is lost"


@search("F")
def somebody_changes_documents(story: Story) -> None:
    run = story.start()
    run.epoch(0, [0, 1])
    target(story).change_documents()
    run.epoch(1, [2, 3])
    story.expect(2, 3)


@search("F")
def a_document_of_another_sink(story: Story) -> None:
    run = story.start()
    run.epoch(0, [0, 1])
    held = target(story)
    change(story, held.index, "key-0", version=2**62, source=source_of(OTHERS))
    run.prepare(1, [2, 3])
    run.decide(1)
    with stops(RowsRejected):
        run.commit()
    assert held.documents["key-0"][1] == OTHERS, "a document of another sink is overwritten"


# ---- markers and claims


@search("E")
def a_second_copy_votes_on_an_applied_epoch(story: Story) -> None:
    first = story.start()
    second = story.start(copy=story.copied())
    epoch = second.begin(0)
    written = second.written(epoch, [0, 1])
    first.epoch(0, [0, 1])
    with stops(WentBack):
        second.record(epoch, written)


@search("E")
def another_attempt_has_claimed_the_epoch(story: Story) -> None:
    first = story.start()
    second = story.start(copy=story.copied())
    first.prepare(0, [0, 1])
    second.prepare(0, [0, 1])
    first.decide(0)
    second.decide(0)
    first.steps.at("bulk", dies)
    with stops(Died):
        first.commit()
    with stops(WentBack):
        second.commit()


@search("E")
def another_copy_has_claimed_an_epoch_that_has_no_rows_here(story: Story) -> None:
    first = story.start()
    second = story.start(copy=story.copied())
    first.prepare(0, [0, 1])
    first.decide(0)
    first.steps.at("bulk", dies)
    with stops(Died):
        first.commit()
    second.prepare(0)
    second.decide(0)
    second.coordinator.commit_decided()
    second.prepare(1, [0, 1])
    second.decide(1)
    with stops(WentBack):
        second.commit()


def marker_of_a_stranger(by: int) -> Scene:
    def play(story: Story) -> None:
        run = story.start()
        run.epoch(0, [0])
        run.prepare(1, [1])
        run.decide(1)
        run.steps.before("E write", lambda: target(story).alter_marker(Mark(by, STRANGER)), skip=1)
        with stops(OutcomeUnknown, WentBack):
            run.commit()

    play.__name__ = f"a marker of {by} epochs later appears while an epoch is applied"
    return play


for later in (0, 1, 2):
    search("E")(marker_of_a_stranger(later))


@search("E")
def another_copy_finishes_an_epoch_whose_claim_an_operator_has_deleted(story: Story) -> None:
    first = story.start()
    second = story.start(copy=story.copied())
    first.prepare(0, [0, 1])
    first.decide(0)
    second.prepare(0)
    second.decide(0)
    second.coordinator.commit_decided()
    second.prepare(1, [0, 1])
    second.decide(1)
    first.steps.after("E bulk", lambda: forget(story, claim_document("")))
    # after the comparison of the marker, before it is read again
    second.steps.after("E read", first.commit)
    with suppress(EpochsinkError):
        second.commit()
    story.expect(0, 1)


def forget(story: Story, *beginnings: str) -> None:
    """Delete documents of the index of markers."""
    held = target(story).indices[INDEX]
    for name in [name for name in held if name.startswith(beginnings)]:
        del held[name]


def marker_of_a_successor(moment: str, skip: int) -> Scene:
    def play(story: Story) -> None:
        first = decided(story, [0])

        def successor() -> None:
            second = story.start()
            second.commit()
            second.epoch(1, [1])

        first.steps.before(moment, successor, skip=skip)
        with stops(EpochsinkError):
            first.commit()
        story.start().epoch(2, [2])
        story.expect(0, 1, 2)

    play.__name__ = f"a slow driver's successor has written its markers before the driver's {moment}"
    return play


search("E")(marker_of_a_successor("E write", 1))
search("E")(marker_of_a_successor("E describe", 1))


@search("F")
def the_markers_are_restored_while_a_slow_driver_meets_newer_documents(story: Story) -> None:
    first, held = decided(story, [0], [1]), target(story)

    def successor() -> None:
        second = story.start()
        second.commit()
        second.epoch(1, [2], [3])
        forget(story, marker_document(""), claim_document(""))

    first.steps.before("F bulk", successor)
    with suppress(EpochsinkError):
        first.commit()
    left = sorted(row.source for _, row in held.documents.values())
    assert left == [2, 3], f"{left}: the newest rows are overwritten"


@search("F")
def an_epoch_is_applied_and_deleted_after_its_marker_is_compared(story: Story) -> None:
    first, held = decided(story, [0], [1]), target(story)

    def successor() -> None:
        second = Run(story, story.world.files, story.world.spool)
        second.steps.at("spool drop 0", dies_before)
        with stops(Died):
            second.coordinator.recover()
        held.indices[held.index].clear()
        held.searchable.clear()

    first.steps.after("F read", successor)
    with suppress(EpochsinkError):
        first.commit()
    left = [row.source for _, row in held.documents.values()]
    assert not left, f"{left} came back"


def slow_driver(*, epochs_later: int, asleep: bool, look_fails: bool = False) -> Scene:
    """Return a scene in which a driver goes on after its successor's documents were deleted and forgotten."""

    def play(story: Story) -> None:
        first = decided(story, [0], [1])
        held = target(story)

        def successor() -> None:
            second = story.start()
            second.commit()
            for number in range(1, 1 + epochs_later):
                second.epoch(number, [2 * number], [2 * number + 1])
            held.indices[held.index].clear()
            held.searchable.clear()
            if asleep:
                story.world.apart += 100.0
            else:
                story.steps += 10**6
            if look_fails:
                first.steps.at("F read", unsent)

        first.steps.after("F bulk", successor)
        with suppress(EpochsinkError):
            first.commit()
        left = [row.source for _, row in held.documents.values()]
        assert not left, f"{left} came back"

    play.__name__ = f"a driver {'sleeps' if asleep else 'waits'} while its successor applies {epochs_later} more" + (
        ", and its first look fails" if look_fails else ""
    )
    return play


@search("E")
def the_index_is_made_anew(story: Story) -> None:
    story.start().epoch(0, [0])
    made_anew(story)
    with stops(WentBack):
        story.start()


def made_anew(story: Story) -> None:
    held = target(story)
    del held.indices[held.index], held.settings[held.index]
    held.create_index(held.index, None, None)


@search("E")
def the_index_is_made_anew_while_its_first_epoch_is_applied(story: Story) -> None:
    run = decided(story, [0], [2])
    run.steps.before("E bulk", lambda: made_anew(story), skip=1)
    run.commit()
    story.expect(0, 2)


@search("E")
def an_index_acknowledges_what_is_not_on_disk(story: Story) -> None:
    run = story.start()
    target(story).durable = False
    with stops(PrepareFailed):
        run.prepare(0, [0])


@search("F")
def an_index_soon_forgets_what_is_deleted(story: Story) -> None:
    run = story.start(kinds=sink_of("F", delete_when="source < 0"))
    target(story).settings[target(story).index]["index.gc_deletes"] = "1s"
    with stops(PrepareFailed):
        run.prepare(0, [0])


@search("F")
def documents_are_placed_by_another_column(story: Story) -> None:
    story.start().epoch(0, [0, 1])
    with stops(WentBack):
        run = story.start(kinds=sink_of("F", routing="source"))
        run.prepare(1, [2, 3])


# ---- dead letters


def retried(story: Story, run: Run, letter: str) -> Any:
    target(story).refuses = False
    return operators.retry_letters(story.world, ASIDE[letter][letter], run.coordinator.identity(letter))


@search("E")
def an_operator_accepts_an_index_that_was_made_anew(story: Story) -> None:
    run = story.start(kinds=ASIDE["E"])
    target(story).refuses = True
    run.epoch(0, [0, 1])
    made_anew(story)
    with stops(WentBack):
        retried(story, run, "E")
    operators.accept_target(story.world, QUERY, "E", 0)
    retried(story, run, "E")
    story.expect(1)


@search("F")
def an_operator_copies_a_letter_beside_a_newer_one_of_its_key(story: Story) -> None:
    run, held = story.start(kinds=ASIDE["F"]), target(story)
    held.refuses = True
    run.epoch(0, [1])
    run.epoch(1, [11])
    (older, _) = held.indices[held.aside].values()
    copied = {**json.loads(older.source or ""), "epoch": 1}
    held._store(held.aside, "~copy", 1, json.dumps(copied))
    retried(story, run, "F")
    story.expect(11)
    assert not letters(story), letters(story)


@search("E")
def the_epoch_of_an_interrupted_run_with_letters_is_discarded(story: Story) -> None:
    run, held = story.start(kinds=ASIDE["E"]), target(story)
    held.refuses = True
    run.epoch(0, [0, 1])
    run.prepare(1, [5, 6])
    run.decide(1)
    run.steps.at("E write", dies_before, skip=1)
    with stops(Died):
        run.commit()
    operators.discard(story.world, QUERY, "E", 1)
    run = story.start(kinds=ASIDE["E"])
    run.epoch(2, [10])
    retried(story, run, "E")
    # 5 was sent before the operator gave the epoch up
    story.expect(0, 1, 5, 10)


@search("E")
def a_pipeline_drops_the_document_of_a_letter(story: Story) -> None:
    run, held = story.start(kinds=ASIDE["E"]), target(story)
    held.refuses = True
    run.epoch(0, [0, 1])

    def dropped(index: str, _fields: Mapping[str, Any], text: str) -> Mapping[str, Any] | None:
        if index != held.index or '"source": 1,' not in text:
            return None
        held.pipelines["p"] = {}
        held.settings[held.index]["index.default_pipeline"] = "p"
        return {"status": 200, "result": "noop"}

    with answering(dropped), stops(PrepareFailed):
        retried(story, run, "E")
    retried(story, run, "E")
    story.expect(0, 1)


@search("F")
def a_letter_is_older_than_a_document(story: Story) -> None:
    run = story.start(kinds=ASIDE["F"])
    target(story).refuses = True
    run.epoch(0, [0, 1])
    run.epoch(1, [2, 3])
    found = retried(story, run, "F")
    assert (found.written, found.superseded) == (0, 1), found
    story.expect(2, 3)


@search("F")
def a_retry_is_killed_and_typed_again(story: Story) -> None:
    run = story.start(kinds=ASIDE["F"])
    target(story).refuses = True
    run.epoch(0, [0, 1])
    real, left = SearchTarget._carry_out, [1]

    def carry_out(self: SearchTarget, action: str, *given: Any) -> Any:
        if action == "delete":
            left[0] -= 1
            if left[0] == 0:
                raise Died
        return real(self, action, *given)

    with swapped(SearchTarget, "_carry_out", carry_out), stops(Died):
        retried(story, run, "F")
    found = retried(story, run, "F")
    assert (found.written, found.superseded) == (1, 0), found
    story.expect(0, 1)


def changed_by_others(*, deleted: bool) -> Scene:
    def play(story: Story) -> None:
        run, held = story.start(kinds=ASIDE["F"]), target(story)
        run.epoch(0, [3])
        held.refuses = True
        run.epoch(1, [11])
        change(story, held.index, "key-1", version=2**62, source=None if deleted else source_of(OTHERS))
        found = retried(story, run, "F")
        assert found.superseded == 0, found
        assert any(each.source for each in held.indices[held.aside].values()), "the letter is deleted"

    play.__name__ = f"another program has {'deleted' if deleted else 'changed'} a letter's document"
    return play


search("F")(changed_by_others(deleted=True))
search("F")(changed_by_others(deleted=False))


@search("E")
def an_interrupted_run_leaves_a_letter_that_somebody_changes(story: Story) -> None:
    run, held = decided(story, [0, 1], kinds=ASIDE["E"]), target(story)
    held.refuses = True
    run.steps.at("E write", dies_before, skip=1)
    with stops(Died):
        run.commit()
    (name,) = held.indices[held.aside]
    change(story, held.aside, name, version=2**62)
    with stops(OutcomeUnknown, PrepareFailed):
        story.start(kinds=ASIDE["E"]).commit()


def dies_before(_request: Callable[[], Any]) -> Any:
    raise Died


@search("E")
def an_interrupted_run_leaves_letters(story: Story) -> None:
    run, held = decided(story, [0, 1], kinds=ASIDE["E"]), target(story)
    held.refuses = True
    run.steps.at("E write", dies_before, skip=1)
    with stops(Died):
        run.commit()
    held.refuses = False
    story.start(kinds=ASIDE["E"]).commit()
    story.expect(0, 1)


@search("E")
def a_run_is_broken_off_and_the_same_driver_tries_again(story: Story) -> None:
    run, held = story.start(kinds=sink_of("E", dead_letter_index="letters-e", timeout=0.5)), target(story)
    held.refuses = True
    run.epoch(0, [0, 1])
    run.prepare(1, [5, 6])
    run.decide(1)
    run.steps.at("E write", unsent, skip=1, times=10**9)
    with stops(OutcomeUnknown):
        run.commit()
    run.steps.forget()
    held.refuses = False
    run.commit()
    held.refuses = True
    run.epoch(2, [10, 11])
    story.expect(0, 1, 5, 6, 10, 11)


def another_pipeline(*, also_then: bool) -> Scene:
    """Return a scene in which an epoch is sent twice, and only the first time, or ``also_then``, a row is refused."""

    def play(story: Story) -> None:
        run, held = decided(story, [0, 1], [6], kinds=ASIDE["E"]), target(story)
        held.refuses = True

        def corrected() -> None:
            held.refuses = False
            held.pipelines["p"] = {}
            held.settings[held.index]["index.default_pipeline"] = "p"

        run.steps.before("E describe", corrected, skip=1)
        with fails(400, "document_parsing_exception", source=6, times=99 if also_then else 0):
            run.commit()
        story.expect(0, 1, 6)
        assert letters(story) == [6] * also_then, f"{letters(story)} are among the letters"

    play.__name__ = f"an index gets a pipeline while rows are set aside, {'one' if also_then else 'none'} of them again"
    return play


search("E")(another_pipeline(also_then=False))
search("E")(another_pipeline(also_then=True))


@search("E")
def a_shard_is_left_out_of_a_refresh(story: Story) -> None:
    run, held = story.start(kinds=ASIDE["E"]), target(story)
    held.refuses = True
    run.epoch(0, [0, 1])
    held.settings[held.aside]["index.number_of_shards"] = "2"
    held.searchable.clear()
    real, left = Cluster.refresh, [1]

    def refresh(self: Cluster, index: str) -> tuple[int, int]:
        left[0] -= 1
        return (1, 0) if left[0] >= 0 else real(self, index)

    with swapped(Cluster, "refresh", refresh), stops(PrepareFailed):
        retried(story, run, "E")
    found = retried(story, run, "E")
    assert found.written == 1, found
    story.expect(0, 1)


@search("E")
def a_version_base_is_claimed_before_the_shard_is_there(story: Story) -> None:
    real, left = Cluster.refresh, [1]

    def refresh(self: Cluster, index: str) -> tuple[int, int]:
        left[0] -= 1
        return (0, 0) if left[0] >= 0 else real(self, index)

    held = target(story)
    held.create_index(INDEX, None, None)
    held.write(INDEX, "epochsink-base-9999999999", json.dumps({"claimed": 9999999999}), None)
    with swapped(Cluster, "refresh", refresh):
        run = story.start()
    assert run.coordinator.identity("E").origin["base"] > 9999999999 * EPOCHS


for given in (
    slow_driver(epochs_later=0, asleep=True),
    slow_driver(epochs_later=0, asleep=False),
    slow_driver(epochs_later=1, asleep=True),
    slow_driver(epochs_later=0, asleep=True, look_fails=True),
):
    search("F")(given)
