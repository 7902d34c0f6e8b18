"""What a simulated history shows, as observations of `model.traces`.

    PYTHONPATH=tests:tests/support python -m model.simulated --minutes 10

The specification has one target with transactions and one of documents. A history with more is replayed once for each
of its targets with transactions. Of one that commits an epoch in several transactions, the first task's is followed.
A fault that the specification does not have ends what is replayed of a history, and `Watch.ends_at` names it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from epochsink.errors import EpochsinkError
from epochsink.protocol.ledger import FOLDER
from epochsink.sink import Outcome, Participant
from model.state import ACCEPTED, Generation, Ledger, Part
from model.traces import Event, Refused, Traces
from simulation import plans
from simulation.driver import PASSING, PRODUCTION, Driver, Variant
from simulation.explorer import Case, quiet, steps_of
from simulation.plans import Fault, Plan
from simulation.simulation import Simulation
from simulation.threads import Operation, Thread
from simulation.world import Folders, Spooled, entry_of, home

DOCUMENTS: Final = "EF"
SHARERS: Final = "BD"
"""Sinks that share the transactions of the one before."""
OF_STEPS: Final = {"err", "lost", "delay", "twice"}
CRASHES: Final = {"before", "after", "pause", "stall", "options"}
"""Faults that only end a process, or make it wait."""
TIME_OUTS: Final = {"timeout": "K", "rollback": "PTAC"}
"""Faults after which a target holds nothing prepared, and the targets."""
SET_BACK: Final = {"back", "failover"}
BY_TASK: Final = "KT"
"""Sinks of which each task has a transaction of its own."""
FINISHERS: Final = "PTA"
"""Sinks that repeat a commit which the target has lost, if what it had committed is prepared there again."""
STORED: Final = {
    "ledger_is",
    "offsets_are",
    "commits_are",
    "times_out",
    "restored",
    "begins_anew",
    "transactions_are_set_back",
    "documents_are_set_back",
}
"""What may come from a process that is dead."""


class Watch:
    """Follows one target with transactions, or none, and one of documents, or none."""

    def __init__(self, simulation: Watched, transactions: str, documents: str) -> None:
        self.simulation = simulation
        self.transactions = transactions
        self.documents = documents
        self.events: list[Event] = []
        self.ends_at = ""
        self._inputs: dict[int, list[bytes]] = {}
        self._ledger = Ledger()
        self._newest: dict[tuple[int, Generation], tuple[Part, Any]] = {}
        """What the ledger has named last of each attempt, and how the target knows it."""
        self._dead: set[int] = set()
        self._is_set_back = False

    def add(self, *event: Any) -> None:
        """Take an observation down, after the deaths since the last one."""
        if self.ends_at:
            return
        for driver in self.simulation.processes:
            if driver.dead and driver.number not in self._dead:
                self._dead.add(driver.number)
                self.events.append(("dies", driver.number))
        # what a killed process does as it is taken apart is not observed; what it had asked for is
        if event[0] in STORED or event[1] not in self._dead:
            self.events.append(event)

    # ---- what is stored

    def looked(self, number: int) -> None:
        """See whether the ledger has a new entry."""
        ledger = self.ledger()
        if ledger != self._ledger:
            self._ledger = ledger
            self.add("ledger_is", number, ledger)

    def parts(self) -> list[tuple[Part, Any]]:
        """Return what the ledger names of each epoch, and how the target knows it."""
        return self._read()[1]

    def ledger(self) -> Ledger:
        """Return the ledger, summed up."""
        return self._read()[0]

    def _read(self) -> tuple[Ledger, list[tuple[Part, Any]]]:
        owner, done, parts = Generation(0), 0, list[tuple[Part, Any]]()
        for _, data in sorted(self.simulation.world.files.get(FOLDER, {}).items()):
            entry = entry_of(data)
            kind = entry["entry"]
            if kind == "take":
                owner = self.simulation.generation_of(entry["generation"])
                # a driver reads from the last take on, and believes its summary
                done, parts = self._summed_up(entry["summary"])
            elif kind == "prepared":
                epoch = entry["epoch"]
                writer = self.simulation.writers[entry["attempt"]]
                rows = self.rows(epoch, self.simulation.inputs[entry["attempt"]])
                name = entry["shares"].get(self.transactions, {}).get("parts", [None])[0]
                parts[epoch:] = [(Part(epoch, writer, writer, ACCEPTED, rows), name)]
            elif kind == "replay" and self.transactions in entry["sinks"]:
                part, name = parts[entry["epoch"]]
                if entry["parts"][0] != name:
                    copy = 1 + (part.generation == owner and part.copy)
                    parts[entry["epoch"]] = part._replace(generation=owner, copy=copy), entry["parts"][0]
            elif kind == "done":
                done = entry["epoch"] + 1
            elif kind != "replay":
                self.ends_at = self.ends_at or f"an entry '{kind}'"
            self._newest |= {part[:2]: (part, name) for part, name in parts}
        return Ledger(owner, tuple(part for part, _ in parts), done), parts

    def _summed_up(self, summary: Mapping[str, Any]) -> tuple[int, list[tuple[Part, Any]]]:
        """Return how many epochs a summary calls done, and what it names of each epoch."""
        named = [(number, attempt) for number, attempt, _ in summary["done"]]
        named += [(each["epoch"], each["attempt"]) for each in summary["pending"]]
        return len(summary["done"]), [
            self._newest[number, self.simulation.writers[attempt]] for number, attempt in named
        ]

    def rows(self, epoch: int, offsets: bytes) -> str:
        """Return the letter of an epoch's input: each one that it ever had gets another."""
        known = self._inputs.setdefault(epoch, [])
        if offsets not in known:
            known.append(offsets)
        return "abcdef"[known.index(offsets)]

    def offsets(self) -> tuple[str, ...]:
        """Return the input of each planned epoch."""
        planned = self.simulation.world.files.get("offsets", {})
        return tuple(self.rows(epoch, planned[str(epoch)]) for epoch in range(len(planned)))

    # ---- calls

    def watch(self, number: int, participant: Participant) -> None:
        """Observe what a driver asks of a target."""
        if self.documents in participant.members:
            self._wrap(participant, "commit", partial(self._writes, number))
        if self.transactions in participant.members:
            self._wrap(participant, "commit", partial(self._commits, number))
            self._wrap(participant, "replay", partial(self._replays, number))
            self._wrap(participant, "marks", partial(self._compares, number))
            for name, does in (("end", "sweep"), ("fence", "sweep"), ("visible", "unblock")):
                self._wrap(participant, name, partial(self._sweeps, number, does))

    def _wrap(self, participant: Participant, name: str, around: Callable[..., Any]) -> None:
        setattr(participant, name, partial(around, getattr(participant, name)))

    @contextmanager
    def _within(self, number: int, call: str) -> Iterator[None]:
        self.add("enters", number, call)
        try:
            yield
        finally:
            self.add("leaves", number, call)

    def _sweeps(self, number: int, does: str, call: Callable[..., Any], *args: Any) -> Any:
        with self._within(number, does):
            return call(*args)

    def _compares(self, number: int, call: Callable[..., Any], *args: Any) -> Any:
        if not self._is_set_back:
            return call(*args)
        with self._within(number, "compare"):
            return call(*args)

    def _commits(self, number: int, call: Callable[..., Any], epoch: Any, ballots: Mapping[str, Any]) -> Any:
        part, name = self.parts()[epoch.number]
        if name not in ballots[self.transactions].parts:
            return call(epoch, ballots)
        with self._within(number, "commit transactions"):
            answers = call(epoch, ballots)
        verdict = answers[self.transactions][list(ballots[self.transactions].parts).index(name)]
        if verdict.outcome is Outcome.COMMITTED:
            self.add("committed", number, epoch.number, part.attempt)
        elif verdict.outcome is Outcome.ABORTED:
            self.add("gone", number, epoch.number)
        return answers

    def _replays(self, number: int, call: Callable[..., Any], at: Any, part: Any, *args: Any) -> Any:
        if part != self.parts()[at.number][1]:
            return call(at, part, *args)
        with self._within(number, "prepare again"):
            return call(at, part, *args)

    def _writes(self, number: int, call: Callable[..., Any], epoch: Any, ballots: Mapping[str, Any]) -> Any:
        part, _ = self.parts()[epoch.number]
        with self._within(number, "commit documents"):
            answers = call(epoch, ballots)
        if all(verdict.outcome is Outcome.COMMITTED for verdict in answers[self.documents]):
            self.add("written", number, epoch.number, part.attempt)
        return answers

    # ---- faults

    def struck(self, process: Driver, fault: Fault) -> None:
        """Take down a fault that strikes."""
        kind = fault[0]
        if kind in TIME_OUTS:
            if self.transactions and self.transactions in TIME_OUTS[kind]:
                self.add("times_out")
        elif kind in SET_BACK:
            if fault[1] == self.documents:
                self.add("documents_are_set_back")
            elif self.transactions and fault[1] == home(self.transactions):
                self._is_set_back = True
                self.add("transactions_are_set_back", 1 + (self.transactions in BY_TASK))
        elif kind == "newck":
            self._inputs, self._ledger = {}, Ledger()
            self.add("begins_anew")
        elif kind == "loser":
            self.add("loses_a_task", process.number)
        elif kind in ("restore", "ledger"):
            self._ledger = self.ledger()
            commits = len(self.simulation.world.files.get("commits", {}))
            self.add("restored", self.offsets(), commits, self._ledger)
        elif kind not in OF_STEPS | CRASHES:
            self.ends_at = self.ends_at or kind


class Watched(Simulation):
    """A simulated history that is watched."""

    def __init__(self, plan: Plan, sinks: str, schedule: int = 0, variant: Variant = PRODUCTION) -> None:
        super().__init__(plan, sinks, schedule, variant)
        documents = next((sink for sink in sinks if sink in DOCUMENTS), "")
        transactions = [sink for sink in sinks if sink not in DOCUMENTS + SHARERS] or [""]
        self.watches = [Watch(self, sink, documents) for sink in transactions]
        self.writers: dict[str, Generation] = {}
        """The generation of the driver that has begun each attempt, and the input that it had."""
        self.inputs: dict[str, bytes] = {}
        self._generations: list[int] = []

    def generation_of(self, generation: int) -> Generation:
        """Return the specification's number of a generation: how many there were before it."""
        if generation not in self._generations:
            self._generations.append(generation)
        return Generation(1 + self._generations.index(generation))

    def see(self, *event: Any) -> None:
        """Take an observation down that concerns every target."""
        for watch in self.watches:
            watch.add(*event)

    def _new_driver(self, files: Folders, spool: Spooled) -> Driver:
        driver = super()._new_driver(files, spool)
        number, coordinator = driver.number, driver.coordinator
        self.see("starts", number)
        for participant in coordinator._run.participants:
            for watch in self.watches:
                watch.watch(number, participant)
        self._watch_files(driver)
        read, begin, record = driver._read_logs, coordinator.begin, coordinator.record
        abandon, fail = coordinator.abandon, coordinator.fail

        def reads() -> Any:
            logs = read()
            self.see("reads", number, logs[0])
            return logs

        def begins(epoch: int) -> Any:
            attempt = begin(epoch)
            self.writers[attempt.attempt] = self.generation_of(coordinator.identity(self.sinks[0]).generation)
            self.inputs[attempt.attempt] = files["offsets"][str(epoch)]
            self.see("enters", number, "write")
            return attempt

        def records(*args: Any) -> None:
            try:
                record(*args)
            finally:
                self.see("leaves", number, "write")

        def abandons(epoch: Any) -> None:
            self.see("abandons", number)
            abandon(epoch)

        def fails(failure: BaseException) -> None:
            self._ended(number, "commits_fail", failure)
            fail(failure)

        for owner, name, watched in (
            (driver, "_read_logs", reads),
            (coordinator, "begin", begins),
            (coordinator, "record", records),
            (coordinator, "abandon", abandons),
            (coordinator, "fail", fails),
        ):
            setattr(owner, name, watched)
        stream = driver.threads[0]
        ended = stream._ended

        def stream_ended(failure: BaseException | None) -> None:
            self._ended(number, "stream_ends", failure)
            ended(failure)

        stream._ended = stream_ended
        return driver

    def _ended(self, number: int, how: str, failure: BaseException | None) -> None:
        if isinstance(failure, EpochsinkError) and not isinstance(failure, PASSING):
            self.see("stops", number)
        else:
            self.see(how, number)

    def _watch_files(self, driver: Driver) -> None:
        step = driver.files.step

        def stepping(name: str, apply: Callable[[], Any], *, reads: bool = False) -> Any:
            def observed() -> Any:
                created = apply()
                if created:
                    self._created(driver.number, name.removeprefix("create "))
                return created

            return step(name, observed if name.startswith("create ") else apply, reads=reads)

        driver.files.step = stepping

    def _created(self, number: int, name: str) -> None:
        for watch in self.watches:
            if name.startswith(FOLDER):
                watch.looked(number)
            elif name.startswith("offsets"):
                watch.add("offsets_are", number, watch.offsets())

    def decided(self, number: int, files: Folders) -> None:
        """Take note of a commits file."""
        super().decided(number, files)
        self.see("commits_are", number + 1)

    def strike(self, process: Driver, fault: Fault) -> bool:
        """Apply a fault."""
        struck = super().strike(process, fault)
        for watch in self.watches if struck else ():
            watch.struck(process, fault)
        return struck

    def _strike_step(self, process: Any, thread: Thread, operation: Operation, fault: Fault) -> None:
        for watch in self.watches:
            if fault[0] in OF_STEPS and not operation.reads:
                watch.add("unanswered", process.number)
            watch.struck(process, fault)
        super()._strike_step(process, thread, operation, fault)


@dataclass
class Replays:
    """Plays plans and replays what they show: ``refused`` are those that the specification does not allow.

    ``ends`` counts the histories that were replayed up to a fault which the specification does not have, by the fault.
    """

    traces: Traces = field(default_factory=Traces)
    ends: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[Case, str]] = field(default_factory=list)

    def play(self, case: Case, variant: Variant = PRODUCTION) -> bool:
        """Play one; return whether the specification allows it."""
        history = Watched(case.plan, case.sinks, case.schedule, variant)
        with quiet():
            history.play()
        refusals = [refused for watch in history.watches if (refused := self._refusal(watch))]
        # a stop is for one of the targets, and another one need not allow it
        is_allowed = len(refusals) < len(history.watches) and all(each.event[0] == "stops" for each in refusals)
        if not is_allowed:
            self.refused.append((case, str(refusals[0])))
            return False
        self.ends.update(filter(None, [history.watches[0].ends_at]))
        return True

    def _refusal(self, watch: Watch) -> Refused | None:
        try:
            self.traces.replay(
                watch.events,
                transactions=watch.transactions != "",
                documents=watch.documents != "",
                finishes=watch.transactions in FINISHERS,
            )
        except Refused as refused:
            return refused
        return None

    def report(self) -> str:
        """Return the counts, and the first refusal."""
        ends = ", ".join(f"{count:,} end at '{fault}'" for fault, count in self.ends.most_common())
        first = [f"{case}\n{why}" for case, why in self.refused[:1]]
        return "\n".join([f"{self.traces}; {ends or 'none ends early'}; {len(self.refused)} refused", *first])


def main() -> int:
    """Replay plans with two faults at random, in any set of sinks, until the time is over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    chosen = parser.parse_args()
    deadline, all_replays = time.monotonic() + 60 * chosen.minutes, Replays()
    turns = list(itertools.product(plans.SINKS, (0, 1, 2)))
    for turn in itertools.count():
        sinks, schedule = turns[turn % len(turns)]
        if turn % len(turns) == 0:
            # what was kept of the histories before takes memory
            all_replays.traces.forget()
        two = plans.at_random(chosen.seed + turn, steps_of(sinks, schedule) + 25, 2, plans.MEDIUM)
        for plan in itertools.islice(two, 100):
            if time.monotonic() > deadline:
                sys.stdout.write(f"seed {chosen.seed}: {all_replays.report()}\n")
                return bool(all_replays.refused)
            all_replays.play(Case(plan, sinks, schedule))
    return 0


if __name__ == "__main__":
    sys.exit(main())
