"""Plays plans: a driver's life with a fault at one of its requests or two, the lives after it, and the checker.

A `Story` sets the scene: what earlier lives left, and which life the fault strikes. The first play of a story, without
a fault, lists its requests.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from waiting import wait_until

from epochsink.failpoints import POINTS
from epochsink_devkit.history.checker import check
from epochsink_devkit.history.history import HistoryLog
from model.recorded import RecordedCheckpoint
from nemesis.recovery import patience
from request_faults.families import ABORTED, DELETED, LOSSES, LOST, MAY_STOP, SET_BACK
from request_faults.life import RUN, TELL_STACKS, Life, live, source_of, stacks_file
from request_faults.wire import Fate, Strike, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path
    from random import Random

    from request_faults.families import Place
    from request_faults.wire import Framing, Seen

_POINT: Final = "failpoint "
LIFE_SECONDS: Final = 60.0
REST_SECONDS: Final = 20.0
SAME_LIFE: Final = 0.5
"""Of the pairs whose first fault lets the driver live, the share that strikes one life."""
RESTARTS: Final = 4
"""How often a supervisor starts the query again before the plan is called stuck."""
_STOPPED: Final = frozenset({"lost", "stuck"})
"""What a query shows that has stopped with an epoch decided: its rows are in the spool, and not in the target."""
_SET_BACK_SHOWS: Final = frozenset({"gap", "torn", "flicker", "false ack", "divergence"})
"""What a target that was set back shows by itself."""
_PART_SHOWS: Final = frozenset({"torn"})
"""What a topic shows if rows of one of an epoch's transactions are gone, and the others are committed."""


def is_answer_to(deeds: Iterable[str], answer: tuple[str, str, str]) -> bool:
    """Return whether a driver's end is the error that one of the deeds of others has to be answered with."""
    kind, name, text = answer
    expected = [MAY_STOP[deed] for deed in deeds if deed in MAY_STOP]
    return kind == "refused" and any(re.search(each, f"{name}: {text}") for each in expected)


class Side(Protocol):
    """A server with what is needed to make fresh targets on it."""

    port: int
    """Where the proxy connects to."""
    proxy: int
    """The port that the proxy must have; 0 for any."""

    @property
    def framing(self) -> Callable[[], Framing]:
        """What tells the server's requests apart."""

    def fresh(self, port: int) -> Place:
        """Make targets whose sinks go through a port."""


@dataclass(frozen=True)
class Story:
    """What is there when the life begins that a fault strikes.

    Earlier lives run up to an epoch and die at a failpoint; then ``loses`` names what somebody does to the target.
    """

    name: str
    before: tuple[tuple[int, str], ...] = ()
    loses: str = ""
    epochs: int = 2


STORIES: Final = (
    Story("a new query"),
    Story("an epoch is decided and not committed", ((2, "coordinator.commit.before:2"),), epochs=3),
    Story("an attempt is prepared and not recorded", ((2, "coordinator.record.before:2"),)),
)
REPLAY: Final = Story("what is decided is lost", ((2, "coordinator.commit.before:2"),), LOST, 3)


@dataclass(frozen=True)
class Hit:
    """One fault at the n-th request of a label: a fate, or what others do just before it."""

    label: str
    nth: int
    fate: Fate | None = None
    deed: str = ""

    def __str__(self) -> str:
        what = self.deed or (self.fate.value if self.fate else "")
        return f"request {self.nth} of «{self.label}»: {what}"

    @property
    def point(self) -> str:
        """The failpoint where it strikes; empty if it strikes a request."""
        return self.label.removeprefix(_POINT) if self.label.startswith(_POINT) else ""

    @property
    def lets_live(self) -> bool:
        """Whether the driver lives on, so that a second fault may strike the same life."""
        return not self.point and self.fate not in _DEADLY


_DEADLY: Final = frozenset({Fate.DIES_BEFORE, Fate.DIES_AFTER, Fate.HELD, Fate.SURVIVES, Fate.PAUSED, Fate.FORGETS})


@dataclass(frozen=True)
class Plan:
    """A story and its faults: none, one, or two, the second one in the next life or ``together`` with the first."""

    story: Story
    hits: tuple[Hit, ...] = ()
    together: bool = False

    def __str__(self) -> str:
        between = "; in the same life " if self.together else "; in the next life "
        return f"{self.story.name}; {between.join(map(str, self.hits))}"


@dataclass
class Verdict:
    """What a plan has shown. ``struck``: its faults have found their requests.

    ``requests`` are those of the life that the first fault strikes, ``deeds`` what others can do to the target,
    ``entries`` how many the ledger has, which is replayed against the specification.
    """

    plan: Plan
    struck: bool
    flaws: list[str]
    answers: list[tuple[str, str, str]]
    requests: list[Seen]
    deeds: tuple[str, ...]
    entries: int
    seconds: float = 0.0

    def __str__(self) -> str:
        told = "\n  ".join(f"{what} {kind} {text}"[:2000] for what, kind, text in self.answers)
        return "\n".join([str(self.plan), *self.flaws, "  " + told])


class Runner:
    """Plays plans on one server, one after another, below a folder."""

    def __init__(self, side: Side, folder: Path) -> None:
        self.side = side
        self._folder = folder
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["request_faults.life"])
        self._wire = Wire(side.port, side.framing, side.proxy)

    def __enter__(self) -> Self:
        self._wire.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._wire.__exit__(*error)

    def plans(self, story: Story) -> Iterator[Plan]:
        """Yield a plan for each fault at each request of a story."""
        return (Plan(story, (hit,)) for hit in self.hits(story))

    def pairs(self, story: Story, chance: Random) -> Iterator[Plan]:
        """Yield plans with two faults of a story for ever, each kind of fault as likely as any other."""
        of_kind: dict[str, list[Hit]] = {}
        for hit in self.hits(story):
            of_kind.setdefault(hit.deed or str(hit.fate), []).append(hit)
        while True:
            first, second = (chance.choice(of_kind[chance.choice(sorted(of_kind))]) for _ in range(2))
            apart = (first.label, first.nth) != (second.label, second.nth)
            yield Plan(story, (first, second), first.lets_live and apart and chance.random() < SAME_LIFE)

    def hits(self, story: Story) -> Iterator[Hit]:
        """Play a story without a fault, and yield each fault at each of its requests."""
        played = self.play(Plan(story))
        assert not played.flaws, str(played)
        for point in POINTS:
            # its machine loses power at each step of the driver and of a task, twice
            if point.startswith(("coordinator.", "task.")):
                yield from (Hit(f"{_POINT}{point}:{nth}", 0, Fate.FORGETS) for nth in (1, 2))
        for request in played.requests:
            for fate in request.fates:
                yield Hit(request.label, request.nth, fate)
            # before a read, sessions that end are like a connection that breaks, and a new form is seen later as well
            for deed in (deed for deed in played.deeds if deed in LOSSES or not request.reads):
                yield Hit(request.label, request.nth, deed=deed)

    def play(self, plan: Plan) -> Verdict:
        """Play one plan to its end, and judge it."""
        began = time.monotonic()
        folder = self._folder / uuid.uuid4().hex[:12]
        place = self.side.fresh(self._wire.port)
        played = _Play(self._context, self._wire, place, folder, plan)
        try:
            verdict = played.run()
        finally:
            self._wire.let_go()
            played.end()
            for reader in place.readers.values():
                reader.close()
            place.remove()
        verdict.seconds = time.monotonic() - began
        return verdict


def _life_seconds() -> float:
    """Return how long a life may take on the machine as it is now: others may use it too."""
    return patience(LIFE_SECONDS, os.getloadavg()[0], os.cpu_count() or 1)


class _Play:
    """One plan: its targets, its history, and the processes of its drivers."""

    def __init__(self, context: Any, wire: Wire, place: Place, folder: Path, plan: Plan) -> None:
        self._context = context
        self._wire = wire
        self._place = place
        self._folder = folder
        self._plan = plan
        self._query = str(uuid.uuid4())
        checkpoint = folder / "checkpoint"
        for name in ("offsets", "commits"):
            (checkpoint / name).mkdir(parents=True)
        self._log = HistoryLog(folder / "history")
        for target in place.targets.values():
            self._log.write("target", **asdict(target))
        self._watch = RecordedCheckpoint(checkpoint, RUN, self._log)
        self._processes: list[BaseProcess] = []
        self._answers: list[tuple[str, str, str]] = []
        self._flaws: list[str] = []
        self._strikes: list[tuple[Hit, Strike]] = []

    def run(self) -> Verdict:
        plan, story = self._plan, self._plan.story
        for epochs, dies_at in story.before:
            self._wait(*self._start(epochs, dies_at))
        if story.loses:
            self._place.deeds[story.loses]()
        self._strikes = [
            (hit, Strike(hit.label, hit.nth, hit.fate, self._place.deeds[hit.deed] if hit.deed else None))
            for hit in plan.hits or (Hit("", 0),)
        ]
        # of each life that is struck: its faults, of which only the last one may end it
        lives = [self._strikes] if plan.together else [[one] for one in self._strikes]
        requests: list[Seen] = []
        for more, faults in enumerate(lives):
            self._wire.arm(*(strike for _, strike in faults))
            self._meet(*faults[-1], story.epochs + more)
            requests = requests or list(self._wire.log)
            if self._is_loud():
                break
        self._wire.arm()
        self._log.write("healed")
        epochs = story.epochs + len(lives)
        well = False
        for _ in range(RESTARTS):
            well = self._wait(*self._start(epochs))
            if well or self._answers[-1][0] == "broke" or self._is_loud():
                break
        if well:
            self._log.write("drained")
        flaws = self._judge(epochs, well=well)
        strikes = [strike for _, strike in self._strikes]
        flaws += [f"the deed failed: {strike.failure!r}" for strike in strikes if strike.failure is not None]
        struck = all(strike.struck.is_set() for strike in strikes)
        entries = len(self._watch.recorded.entries)
        return Verdict(plan, struck, flaws, self._answers, requests, tuple(self._place.deeds), entries)

    def _meet(self, hit: Hit, strike: Strike, epochs: int) -> None:
        """Live the life that a fault strikes, and what has to come before the strike has run its course."""
        process, told, driver = self._start(epochs, hit.point)
        assert process.pid is not None
        pid = process.pid
        strike.kill = lambda: self._kill(pid, driver)
        strike.pause = lambda: os.kill(pid, signal.SIGSTOP)
        strike.resume = lambda: os.kill(pid, signal.SIGCONT)
        if hit.fate is Fate.PAUSED:
            wait_until(lambda: strike.struck.is_set() or not process.is_alive(), "the pause", LIFE_SECONDS)
            if strike.struck.is_set():
                self._wait(*self._start(epochs))
            strike.release.set()
            self._wait(process, told, driver)
        else:
            self._wait(process, told, driver)
            if hit.fate is Fate.HELD and strike.struck.is_set():
                self._wait(*self._start(epochs), strike.release.set)
                strike.release.set()
                assert strike.delivered.wait(LIFE_SECONDS), "what was held is not delivered"
            elif hit.fate is Fate.FORGETS and (strike.struck.is_set() or hit.point):
                if self._answers[-1][0] == "died":
                    strike.struck.set()
                    self._forget()
            elif hit.fate is Fate.SURVIVES and strike.struck.is_set():
                self._wait(*self._start(epochs))

    def _forget(self) -> None:
        """Let the machine forget what was not synced, and the target lose what is prepared: the spool has it."""
        self._life(0).disk.forget()
        for name, reader in self._place.readers.items():
            decided = {int(path.name) for path in (self._folder / "checkpoint" / "commits").glob("[0-9]*")}
            visible = set(reader.read().column("epoch").to_pylist())
            if visible - decided:
                self._flaws.append(
                    f"early: {name} shows epochs {visible - decided}, whose commits/ the disk has forgotten"
                )
        if LOST in self._place.deeds:
            self._place.deeds[LOST]()

    def _life(self, epochs: int, dies_at: str = "") -> Life:
        return Life(str(self._folder), self._query, self._place.kinds, self._place.options, epochs, dies_at)

    def _start(self, epochs: int, dies_at: str = "") -> tuple[BaseProcess, Connection, str]:
        driver = uuid.uuid4().hex
        life = self._life(epochs, dies_at)
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=live, args=(life, driver, theirs))
        self._log.write("started", run=RUN, driver=driver, armed=dies_at)
        process.start()
        theirs.close()
        self._processes.append(process)
        return process, ours, driver

    def _wait(
        self, process: BaseProcess, told: Connection, driver: str, recovered: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait for a driver's end; return whether it ended well."""
        seconds = _life_seconds()
        deadline = time.monotonic() + seconds
        answer = ("died", "", "")
        while True:
            if told.poll(0.01):
                try:
                    said = told.recv()
                except EOFError:
                    break
                if said[0] == "recovered":
                    recovered()
                else:
                    answer = said
            self._watch.look()
            if time.monotonic() > deadline:
                where = self._stacks(process)
                answer = ("broke", "", f"the driver does not end within {seconds:.0f} s:\n{where}")
                process.kill()
                break
        process.join(LIFE_SECONDS)
        told.close()
        self._answers.append(answer)
        self._log.write("ended", driver=driver, code=0 if answer[0] == "ended" else 1)
        self._read()
        return answer[0] == "ended"

    def _stacks(self, process: BaseProcess) -> str:
        """Return where the threads of a driver are."""
        assert process.pid is not None
        os.kill(process.pid, TELL_STACKS)
        time.sleep(1)  # a driver that hangs in C code tells nothing
        return stacks_file(self._folder).read_text()

    def _kill(self, pid: int, driver: str) -> None:
        self._log.write("killed", what=f"driver {driver}", pid=pid)
        os.kill(pid, signal.SIGKILL)

    def _read(self, *, final: bool = False) -> None:
        for name, reader in self._place.readers.items():
            self._watch.look()
            began = time.monotonic()
            fixed: list[float] = []

            def look(fixed: list[float] = fixed) -> None:
                fixed.append(time.monotonic())
                self._watch.look()

            rows = reader.read(look)
            self._log.write_read(name, began, fixed[-1], self._log.keep(rows), final=final)

    def _done_by_others(self) -> set[str]:
        return {hit.deed for hit, strike in self._strikes if strike.struck.is_set()}

    def _is_loud(self) -> bool:
        """Whether the query has stopped because of what somebody else did, as it should."""
        return is_answer_to(self._done_by_others(), self._answers[-1])

    def _judge(self, epochs: int, *, well: bool) -> list[str]:
        flaws = self._flaws + [text for what, _, text in self._answers if what == "broke"]
        loud = self._is_loud()
        if not well and not loud:
            flaws.append("the query does not run again")
        if well or loud:
            for name, reader in self._place.readers.items():
                found = reader.leftovers() if well else []
                deadline = time.monotonic() + REST_SECONDS
                while found and time.monotonic() < deadline:
                    time.sleep(0.05)
                    found = reader.leftovers()
                for kind, what in found:
                    self._log.write("leftover", target=name, kind=kind, what=what)
        if well:
            for left in (self._folder / "checkpoint" / "epochsink" / "spool").glob("*/*"):
                self._log.write("leftover", target="spool", kind="orphan", what=left.name)
        self._read(final=True)
        self._log.write_input(RUN, source_of(epochs))
        report = check(self._log.folder, progress_within=_life_seconds())
        flaws += self._watch.recorded.refusals()
        pardoned = frozenset[str]()
        if loud:
            deeds = self._done_by_others()
            pardoned |= _STOPPED
            pardoned |= _SET_BACK_SHOWS if SET_BACK in deeds else frozenset()
            pardoned |= _PART_SHOWS if deeds & {ABORTED, DELETED} else frozenset()
        return flaws + [str(one) for one in report.anomalies if one.name not in pardoned]

    def end(self) -> None:
        """End every process that is left."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(LIFE_SECONDS)
            process.close()
