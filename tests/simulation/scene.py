"""Directed worlds: one situation each, over the production's coordinator and committers, without a scheduler.

A scene is a function of a `Story`. It says what happens before, in place of or after the requests that it names, and
raises `AssertionError` if a reader does not get each row once, or if an error is not the one that tells what to do.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import FOLDER, Ledger
from epochsink.sink import Epoch, Keeping, Task, orphans
from simulation.determinism import determined
from simulation.driver import Written, offsets_file
from simulation.invariants import newest_rows
from simulation.readers import Row
from simulation.sinks import KINDS, participants
from simulation.storage import MemoryFiles, MemorySpool, spool_name
from simulation.world import Folders, Spooled, World, entry_of

QUERY: Final = "query-1"
NOTHING: Final = ((), ())
"""What is recorded if nothing is."""
MOST_STEPS: Final = 3000

Request = Callable[[], Any]
Event = Callable[[Request], Any]


class Died(BaseException):
    """A process was killed."""


def lost(request: Request) -> Any:
    """Carry a request out, and lose its answer."""
    request()
    raise OSError("no answer")


def unsent(_request: Request) -> Any:
    """Carry a request out never."""
    raise OSError("no answer")


def dies(request: Request) -> Any:
    """Carry a request out as the last one of its process."""
    request()
    raise Died


class Steps:
    """Makes each step at once, and what is planned around it."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._planned: list[list[Any]] = []
        self.names: list[str] = []

    def forget(self) -> None:
        """Plan nothing any more."""
        self._planned.clear()

    def at(self, name: str, event: Event, *, skip: int = 0, times: int = 1) -> None:
        """Let an event take the place of the next requests whose name ends so."""
        self._planned.append([name, event, skip, times])

    def before(self, name: str, act: Callable[[], object], *, skip: int = 0) -> None:
        """Let something happen just before a request."""

        def event(request: Request) -> Any:
            act()
            return request()

        self.at(name, event, skip=skip)

    def after(self, name: str, act: Callable[[], object], *, skip: int = 0) -> None:
        """Let something happen just after a request."""

        def event(request: Request) -> Any:
            answer = request()
            act()
            return answer

        self.at(name, event, skip=skip)

    def __call__(self, name: str, apply: Request, *, reads: bool = False) -> Any:
        """Make a step."""
        del reads
        self.names.append(name)
        self._story.steps += 1
        assert len(self.names) < MOST_STEPS, f"it asks for ever: {name}"
        for planned in self._planned:
            if not name.endswith(planned[0]) or not planned[3]:
                continue
            if planned[2]:
                planned[2] -= 1
                continue
            planned[3] -= 1
            return planned[1](apply)
        return apply()


class Story:
    """A world, the runs of a query on it, and what its readers have to see."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.world = World(letters)
        self.world.steps = lambda: self.steps
        self.steps = 0
        self.clock = 10**6
        """That of the next driver, by which its generation is numbered."""
        self.later = 0.0
        """The seconds that have passed in the targets since the story began."""

    def tick(self) -> int:
        """Look at the clock."""
        self.clock += 1000
        return self.clock

    def start(self, *, copy: tuple[Folders, Spooled] | None = None, **options: Any) -> Run:
        """Start a driver, on a copy of the checkpoint if one is given."""
        run = Run(self, *(copy or (self.world.files, self.world.spool)), **options)
        run.coordinator.recover()
        return run

    def copied(self) -> tuple[Folders, Spooled]:
        """Copy the checkpoint."""
        files = {folder: dict(content) for folder, content in self.world.files.items()}
        return files, Spooled({key: dict(kept) for key, kept in self.world.spool.items()})

    def expect(self, *sources: int) -> None:
        """Raise unless readers of each sink see exactly these source rows, once each."""
        if self.letters == "K":
            self.world.brokers.finish()
        for letter in self.letters:
            rows = Counter(row.source for row in newest_rows(self.world, letter))
            assert rows == Counter(sources), f"readers see {sorted(rows.elements())}, and not {sorted(sources)}"
        anomalies = self.world.readers.anomalies
        assert not anomalies, anomalies

    def replays(self) -> int:
        """Count what was prepared again."""
        return sum(entry_of(data)["entry"] == "replay" for data in self.world.files[FOLDER].values())


@contextmanager
def stops(*kinds: type[BaseException], words: str = "") -> Iterator[None]:
    """Raise unless what is done stops with one of these errors, with some words in it."""
    try:
        yield
    except kinds as stop:
        if words not in str(stop):
            raise
    else:
        raise AssertionError(f"no {' or '.join(kind.__name__ for kind in kinds)}")


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a class, a module or a dict another part for a while."""
    if isinstance(owner, dict):
        before = dict(owner)
        owner[name] = value
    else:
        before = getattr(owner, name)
        setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(owner, dict):
            owner.clear()
            owner.update(before)
        else:
            setattr(owner, name, before)


Sources = Sequence[int] | Sequence[Sequence[int]]
"""A task's rows; or in the bursts in which it sends them."""


class Run:
    """One run of the query."""

    def __init__(
        self,
        story: Story,
        files: Folders,
        spooled: Spooled,
        *,
        letters: str = "",
        kinds: Mapping[str, Any] = MappingProxyType({}),
        retains: bool = False,
        **options: Any,
    ) -> None:
        self.story, self.letters, self.steps = story, letters or story.letters, Steps(story)
        self.files = MemoryFiles(files, self.steps)
        self.spool = MemorySpool(story.world, self.steps, spooled)
        kinds = {**KINDS, **kinds}
        self.sinks = {letter: kinds[letter](story.world, self.steps, **options) for letter in self.letters}
        self.sink = self.sinks[self.letters[0]]
        self.pass_time(story.later)
        every = participants(self.sinks)
        self.participant = every[0]
        self.coordinator = Coordinator(
            query_id=QUERY,
            ledger=Ledger(self.files, uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,  # type: ignore[arg-type] # in memory
            participants=every,
            retain_seconds=1e9 if retains else 0.0,
        )

    def pass_time(self, seconds: float) -> None:
        """Let time pass, where the sink looks at a clock."""
        if self.letters == "K":
            self.sink._server.clock._now += seconds

    def begin(self, number: int) -> Epoch:
        """Begin an attempt at an epoch."""
        self.files.create(f"offsets/{number}", offsets_file(number, number + 1))
        assert self.coordinator.settle(number) is Plan.WRITE
        return self.coordinator.begin(number)

    def task(self, epoch: Epoch, sources: Sources, partition: int = 0, number: int = 0, letter: str = "") -> Any:
        """Begin a task attempt and write its rows. Attempts of one number share a transactional id."""
        identifier, letter = f"{uuid.uuid4().hex[1:]}{number:x}", letter or self.letters[0]
        task = Task(self.coordinator.identity(letter), epoch, partition, identifier)
        bursts: Any = sources if sources and not isinstance(sources[0], int) else [sources]
        writer = self.sinks[letter].begin(task)
        rows = [Row(QUERY, epoch.number, at, epoch.attempt) for burst in bursts for at in burst]
        for burst in bursts:
            writer.write([row for row in rows if row.source in burst])
            if len(bursts) > 1:
                writer._writer._producer.flush()
        return identifier, writer, rows

    def written(self, epoch: Epoch, *tasks: Sources) -> Written:
        """Write and prepare an epoch's tasks, one for each Spark partition."""
        written = Written()
        for letter, sink in self.sinks.items():
            for partition, sources in enumerate(tasks):
                identifier, writer, rows = self.task(epoch, sources, partition, letter=letter)
                kept = getattr(sink, "_contexts", {}).get(epoch.attempt)
                if kept is None or kept.keeping is not Keeping.IN_TARGET:
                    name = spool_name(letter, identifier)
                    written.files.setdefault(letter, {})[identifier] = self.spool.write(QUERY, epoch, name, rows)
                written.parts.setdefault(letter, []).append((identifier, writer.prepare()))
        return written

    def record(self, epoch: Epoch, written: Written) -> None:
        """Vote on an epoch and record it."""
        self.coordinator.record(epoch, written.parts, written.files)

    def prepare(self, number: int, *tasks: Sources) -> Epoch:
        """Write and record an epoch."""
        epoch = self.begin(number)
        self.record(epoch, self.written(epoch, *tasks))
        return epoch

    def decide(self, number: int) -> None:
        """Let Spark decide."""
        self.files.create(f"commits/{number}", b"v1")
        self.story.world.readers.decided.add((QUERY, number))

    def commit(self) -> None:
        """Commit what is decided."""
        assert self.coordinator.commit_decided()

    def epoch(self, number: int, *tasks: Sources) -> Epoch:
        """Write an epoch, decide it and commit it."""
        epoch = self.prepare(number, *tasks)
        self.decide(number)
        self.commit()
        return epoch

    def sweep(self) -> None:
        """End what is left, as the other thread does in between."""
        generation = self.coordinator.identity(self.letters[0]).generation
        left = orphans(self.participant.remnants(NOTHING), generation, NOTHING)
        self.participant.end(left)


Scene = Callable[[Story], None]
SCENES: Final[dict[str, list[tuple[str, Scene]]]] = {}
"""Each family's scenes, with the letters of the sinks."""


def scene(family: str, letters: str) -> Callable[[Scene], Scene]:
    """Add a scene to those of a family."""

    def added(play: Scene) -> Scene:
        SCENES.setdefault(family, []).append((letters, play))
        return play

    return added


def play(letters: str, one: Scene) -> str:
    """Play a scene; return what is wrong, or ""."""
    story = Story(letters)
    with determined(story.tick):
        try:
            one(story)
        except Exception as wrong:  # noqa: BLE001 - whatever is not expected is wrong
            return f"{type(wrong).__name__}: {wrong}"
        except Died:
            return "it died"
    return ""
