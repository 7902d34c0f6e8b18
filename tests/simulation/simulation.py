"""One simulated history: a world, its drivers, a fault plan, then a healthy run, then the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError, EpochsinkError, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import FOLDER
from simulation import invariants, operators
from simulation.determinism import determined
from simulation.driver import EPOCHS, PRODUCTION, Driver, Variant, parse_offsets
from simulation.scheduler import Scheduler
from simulation.steps import at_once
from simulation.storage import MemoryFiles, altered
from simulation.threads import Operation
from simulation.world import ROLLED_BACK, Spooled, World, entry_of, home

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.plans import Fault, Plan
    from simulation.world import Folders

HEALTHY_FROM = 10**6
TICK = 1000
OF_PROCESS: dict[str, Callable[..., bool]] = {"loser": Driver.lose_a_task, "skip": Driver.skip_next}
"""The faults of the process whose turn it is; all others are those of the world."""


@dataclass(slots=True)
class Twin:
    """The query on a copy of the checkpoint, beside the one on the original; ``loud`` is what stopped it."""

    driver: Driver | None = None
    files: Folders = field(default_factory=dict)
    spool: Spooled = field(default_factory=Spooled)
    loud: BaseException | None = None
    starts: int = 2

    @property
    def is_whole(self) -> bool:
        """Whether it has written everything, and nothing has stopped it."""
        return self.driver is not None and self.driver.dead == "done" and self.driver.recovered


class Simulation(Scheduler):
    """A query of three epochs over some sinks, run under a plan."""

    def __init__(self, plan: Plan, sinks: str, schedule: int = 0, variant: Variant = PRODUCTION) -> None:
        super().__init__(plan, schedule, faults_wait=variant.faults_wait)
        self.sinks = sinks
        self.variant = variant
        self.world = World(sinks + (variant.later_sinks or ""))
        self.world.keeps_copies = self._may_set_back
        self.world.steps = lambda: self.now
        self.query = "query-1"
        self.source_rows = EPOCHS * variant.rows
        self.catching_up = 0
        self.attempts = 0
        self.commits_made = 0
        self.blames_zombies = True
        self.steps_before_healing = 0
        self.copies: dict[int, Folders] = {}
        self.faults: set[str] = set()
        """The kinds of fault that have struck."""
        self.swallows = 0
        """How many errors the plan has raised for the user's function to catch, which from then on catches all."""
        self.doubling = False
        """Whether the user's function calls us twice, each time with a part of the rows."""
        self.refused: set[int] = set()
        """The epochs of which a second call was refused."""
        self.said: list[BaseException] = []
        """The errors after which an operator has taken the way on that they name."""
        self.abandoned_at: int | None = None
        """The first source row that a successor reads, once an operator has abandoned the checkpoint."""
        self.joins = False
        """Whether ``join_running=True`` was left in the code."""
        self.omitted: dict[int, list[int]] = {}
        """Source rows of epochs that the user's function has kept from us."""
        self.repaired = 0
        """How many epochs `epochsink repair` has applied again."""
        self.twin = Twin()
        self.zombies: list[BaseException] = []
        """What superseded drivers have concluded, in place of noticing that they were superseded."""
        self._restored_to = HEALTHY_FROM
        self._clock, self._tick = HEALTHY_FROM, TICK
        # made once: a fault that waits is tried at each step
        self._strikes: dict[str, Callable[..., bool]] = {
            "timeout": self._time_out,
            "leaderless": self._leave_out,
            "rollback": self._roll_back,
            "back": self._set_back,
            "unmark": self._forget_markers,
            "newck": self._new_checkpoint,
            "ledger": self._restore_ledger,
            "restore": self._restore,
            "failover": self._fail_over,
            "remark": self._alter_marker,
            "outside": self.world.write_from_outside,
            "async": self._acknowledge_early,
            "spool": self._damage_spool,
            "log": self._lose_records,
            "holder": self._lose_at_partition,
            "copy": self._copy_checkpoint,
            "options": self._change_options,
            "rejoin": self._join_again,
            "abandon": self._abandon,
            "double": self._call_twice,
            "alter": self.world.alter_table,
            "clock": self._set_clock_back,
            "busy": self._overload,
            "retry": self._retry_letters,
        }

    @property
    def anomalies(self) -> list[str]:
        """Return every violation found."""
        return self.world.readers.anomalies

    def flag(self, anomaly: str) -> None:
        """Remember a violation."""
        self.world.readers.flag(anomaly)

    def stuck(self, why: str) -> None:
        """Remember that nothing moved any more."""
        self.flag(f"STUCK {why}")

    def start_driver(self) -> None:
        """Start a fresh process."""
        if "async" in self.faults and isinstance(self.active.failure, (OutcomeUnknown, PrepareFailed)):
            self.note("        the operator sets the index' settings back")
            for index in self.world.search.values():
                index.durable = True
        self.active = self._new_driver(self.world.files, self.world.spool)

    def start_others(self) -> bool:
        """Start the driver on the copied checkpoint again if it has died; return whether it had."""
        twin = self.twin
        if twin.driver is None or twin.driver.dead not in ("crash", "error") or self.healthy or not twin.starts:
            return False
        # two that are started again and again in step would go on ending each other's attempts
        twin.starts -= 1
        twin.driver = self._new_driver(twin.files, twin.spool)
        return True

    def _new_driver(self, files: Folders, spool: Spooled) -> Driver:
        self.note(f"        --- driver {len(self.processes)} starts")
        driver = Driver(self, len(self.processes), files, spool)
        self.add(driver)
        return driver

    def leads(self, driver: Driver) -> bool:
        """Whether a driver is the newest one on its copy of the checkpoint."""
        return driver is self.active or driver is self.twin.driver

    def stopped(self, driver: Driver, why: BaseException) -> None:
        """Take note that a query has stopped for its operator."""
        if driver is self.active:
            self.loud = why
        else:
            self.twin.loud = why

    def decided(self, number: int, files: Folders) -> None:
        """Take note of a commits file: readers may see the epoch from now on."""
        self.commits_made += 1
        self.world.readers.decided.add((self.query, number))
        if files is self.world.files:
            self.copies[number] = copied(files)

    def left_out(self, number: int, source: list[int]) -> None:
        """Take note of rows that the user's function keeps from us, or whose error it swallows."""
        self.omitted[number] = source

    def excepted_rows(self) -> set[tuple[str, int]]:
        """Return the rows that need not be visible: the user's function has kept them back, and we have said so."""
        if not self.omitted:
            return set()
        recorded = recorded_epochs(self.world.files)
        # whoever has caught the refusal of the second call has let Spark decide the epoch as it is recorded
        stands = {"double", "swallow"} <= self.faults
        kept_back = {
            number
            for number in self.omitted
            if number not in recorded or stands or (self.loud and has_other_input(self.world.files, number))
        }
        # with a ledger that is lost, and joined anew, went what knew of them
        if not (self.said or self.loud or self.joins):
            # the error of a second call was caught, and another one has ended the query before it said so again
            kept_back &= self.refused if stands else set()
        return {(self.query, at) for number in kept_back for at in self.omitted[number]}

    def undocumented(self, files: Folders) -> set[int]:
        """Return the epochs that Spark has decided and the ledger does not know, if nobody has accepted that."""
        # asked at each batch, and the answer takes the whole ledger
        if not self.omitted:
            return set()
        decided = set(map(int, files.get("commits", {})))
        return set() if self.said else decided & self.omitted.keys() - recorded_epochs(files)

    def decided_rows(self) -> int:
        """Return how many source rows the checkpoint's newest decided epoch reaches to."""
        files = self.world.files
        newest = max(map(int, files.get("commits", {})), default=-1)
        return parse_offsets(files["offsets"][str(newest)])[1] if newest >= 0 else 0

    # ---- faults

    def _may_set_back(self) -> bool:
        """Whether the plan still has a fault that sets a target back."""
        left = () if self.healthy else self.plan.values()
        return any(fault[0] in ("back", "failover") for faults in left for fault in faults)

    def strike_step(self, kind: str) -> None:
        """Take note of a fault that strikes one step."""
        self.faults.add(kind)
        if kind == "swallow":
            self.swallows += 1

    def strike(self, process: Driver, fault: Fault) -> bool:
        """Apply a fault."""
        kind, *numbers = fault
        struck = OF_PROCESS[kind](process, *numbers) if kind in OF_PROCESS else self._strikes[kind](*numbers)
        if struck:
            self.faults.add(kind)
        if self.trace is not None:
            self.note(f"        {fault}: {'strikes' if struck else 'has no effect'}")
        return struck

    def look_at_clock(self) -> int:
        """Return the time of the drivers' machine, in milliseconds."""
        self._clock += self._tick
        return self._clock

    def _set_clock_back(self) -> bool:
        struck, self._tick = self._tick > 0, -TICK
        return struck

    def _time_out(self) -> bool:
        return self.world.brokers.time_out()

    def _set_back(self, sink: str, commits: int) -> bool:
        return self.world.set_back(sink, commits) and self._cut_off(sink)

    def _fail_over(self, sink: str, requests: int) -> bool:
        return self.world.fail_over(sink, requests) and self._cut_off(sink)

    def _cut_off(self, sink: str) -> bool:
        """Forget what is under way to a database that was set back: its connections end."""
        if sink in self.world.postgres:
            self.forget_due(*(f"{each} " for each in self.sinks if home(each) == sink))
        return True

    def _leave_out(self) -> bool:
        self.world.brokers.leaves_out = True
        return True

    def _lose_records(self, how: str) -> bool:
        return self.world.brokers.lose_records(how)

    def _lose_at_partition(self, how: str) -> bool:
        return self.world.brokers.lose_at_partition(how)

    def _roll_back(self) -> bool:
        struck = [target.roll_back_all() for target in self.world.postgres.values()]
        return any(struck)

    def _forget_markers(self, sink: str) -> bool:
        # until an epoch is done, nothing says that there ever was a marker: the protocol's page names that limit
        return self._is_any_done() and sink in self.world.copies and self.world.forget_markers(sink)

    def _alter_marker(self, sink: str, how: str) -> bool:
        # likewise
        return self._is_any_done() and sink in self.world.copies and self.world.alter_marker(sink, how)

    def _is_any_done(self) -> bool:
        return any(entry_of(data)["entry"] == "done" for data in self.world.files.get(FOLDER, {}).values())

    def _acknowledge_early(self, sink: str, steps: int) -> bool:
        index = self.world.search[sink]
        index.acknowledge_early()
        self._due.append((self.now + steps, Operation(f"crash of {sink}'s node", index.crash, reads=False)))
        return True

    def _overload(self, sink: str, operations: int) -> bool:
        self.world.search[sink].busy = operations
        return True

    def _retry_letters(self, sink: str) -> bool:
        target = self.world.search[sink]
        if not target.indices.get(target.aside):
            return False
        target.refuses, target.mended = False, True
        self.note("        the mapping is corrected, and an operator types: epochsink letters retry CHECKPOINT")
        try:
            retried = operators.retry_letters(
                self.world, self.variant.kind(sink), self.active.coordinator.identity(sink)
            )
        except EpochsinkError as refused:
            self.note(f"        it is refused: {refused}")
        else:
            self.note(f"        {retried}")
        return True

    def _damage_spool(self, how: str) -> bool:
        newest = [key for key in self.world.spool if key[0] == self.query and self.world.spool[key]][-1:]
        for key in newest:
            folder = self.world.spool[key]
            self.world.spool[key] = {} if how == "gone" else {name: altered(folder[name], how) for name in folder}
        return bool(newest)

    def _call_twice(self) -> bool:
        self.doubling = True
        return True

    def _change_options(self) -> bool:
        self.note("        all drivers die; the next one starts with other options")
        self._kill_all()
        self.world.options += 1
        return True

    def _join_again(self) -> bool:
        # of a new checkpoint the targets know nothing yet; and one fault at a time has to do with two folders
        if not self.copies or self.query != "query-1" or self.twin.driver or not any(map(self.world.knows, self.sinks)):
            return False
        self.note("        all drivers die; epochsink/ is lost, and join_running=True was left in the code")
        self._kill_all()
        self.joins = True
        self.world.files.pop(FOLDER, None)
        self.world.spool.clear()
        return True

    def _abandon(self) -> bool:
        if self.abandoned_at is not None or self.query != "query-1" or not self.world.files.get(FOLDER):
            return False
        self.note("        an operator types: epochsink abandon CHECKPOINT")
        try:
            operators.abandon(self.world, {letter: self.variant.kind(letter) for letter in self.sinks}, self.query)
        except EpochsinkError as refused:
            self.note(f"        it is refused: {refused}")
            return True
        self.abandoned_at = self.decided_rows()
        return True

    def _copy_checkpoint(self) -> bool:
        if self.twin.driver is not None or not self.world.files.get("commits"):
            return False
        twin = self.twin
        twin.files = copied(self.world.files)
        twin.spool = Spooled({key: dict(kept) for key, kept in self.world.spool.items()})
        self.note("        the checkpoint is copied, and a second query starts on the copy")
        twin.driver = self._new_driver(twin.files, twin.spool)
        return True

    def _kill_all(self) -> None:
        """Kill every driver, and wait until the file system has carried out what they asked of it."""
        for process in self.processes:
            process.kill()
        self.forget_due("create", "remove", "SPARK", "spool")

    def _new_checkpoint(self) -> bool:
        if self.query != "query-1":
            return False
        self.note("        all drivers die; a new checkpoint on the same targets")
        self._kill_all()
        self.query, self.catching_up = "query-2", 1
        self.world.apart += 1
        self.world.files = {}
        self.copies.clear()
        return True

    def _restore(self, number: int, offsets: int, ledger: int) -> bool:
        copy = self.copies.get(number)
        # forward into an abandoned timeline is beyond what can be told apart
        if copy is None or number > self._restored_to or FOLDER not in self.world.files:
            return False
        files = self.world.files
        if files["commits"].keys() == copy["commits"].keys() and not offsets:
            return False
        self.note(f"        all drivers die; restored: commits<={number} offsets={offsets} ledger={ledger}")
        self._kill_all()
        self._restored_to = number
        self.world.readers.went_back = True
        files["commits"] = dict(copy["commits"])
        if offsets:
            files["offsets"] = dict(copy["offsets"])
            self.catching_up = 1
        if ledger == 1:
            files[FOLDER] = dict(copy.get(FOLDER, {}))
        if ledger == 2:
            files[FOLDER] = without_later_epochs(files[FOLDER], number)
        return True

    def _restore_ledger(self, number: int) -> bool:
        # forward into an abandoned timeline is beyond what can be told apart
        if (number not in self.copies and number != -1) or number > self._restored_to:
            return False
        self.note(f"        all drivers die; the ledger alone is that of commits<={number}")
        self._kill_all()
        self.world.readers.went_back = True
        self.world.files[FOLDER] = dict(self.copies.get(number, {}).get(FOLDER, {}))
        return True

    # ---- a whole history

    def play(self) -> None:
        """Run under the plan, then without faults, and check."""
        with determined(self.look_at_clock):
            self.start_driver()
            self.run()
            self.steps_before_healing = self.now
            self._take_the_way_on()
            if self.loud is None and (not self.anomalies or self.twin.driver is not None):
                self._recover_healthily()
                if self.loud is not None and self._take_the_way_on():
                    self._recover_healthily()
            for process in self.processes:
                process.kill()
        self.world.brokers.finish()
        invariants.check(self)

    def forget(self) -> None:
        """Cut the rings of objects that a history is made of: what is freed at once, nothing has to search for."""
        for process in self.processes:
            without_frames(process.failure)
            without_frames(process.coordinator.queue._failure)
            vars(process).clear()
        vars(self.world).clear()
        vars(self).clear()

    def _take_the_way_on(self) -> bool:
        """Do what an error tells the operator, where that is known to be right; return whether it was."""
        if self.abandoned_at is not None:
            return False
        if isinstance(self.loud, ConfigurationError) and "double" in self.faults:
            self.note("        the operator takes the second call out of the user's function")
        elif isinstance(self.loud, OutcomeUnknown) and self.faults == {"async"}:
            self.note("        the operator reads which setting it is")
        elif isinstance(self.loud, WentBack) and self.omitted and self._lacks_only_what_was_left_out():
            newest = operators.accept(self.world, self.query)
            if newest is None:
                return False
            self.note(f"        the operator has typed: epochsink accept CHECKPOINT {newest}")
        elif isinstance(self.loud, WentBack) and self.variant.retains and self.faults <= self._repaired_after():
            if not self._repair():
                return False
        else:
            return False
        self.said.append(self.loud)
        self.loud = None
        return True

    def _repaired_after(self) -> set[str]:
        """Return the faults after which the operator tries a repair: Kafka's log shows if markers alone are gone."""
        return {"back", "failover", "unmark"} if self.sinks == "K" else {"back", "failover"}

    def _repair(self) -> bool:
        """Type ``epochsink repair`` until it has ended; return whether the targets could be repaired."""
        # nothing of the drivers that have died is under way any more
        self.deliver(everything=True)
        kinds = {letter: self.variant.kind(letter) for letter in self.sinks}
        repair = operators.Repairs(self.world, kinds, self.query, self.variant)
        before = len(self.anomalies)
        self.repaired += repair.play()
        # the commit under which an index was set back has left newer rows there: they are written again after these;
        # and a copy of the checkpoint does not know what the other one's repair had prepared
        unknown = {ROLLED_BACK.format(letter) for letter in self.sinks} if self.variant.repairs_on_copies else set()
        spared = {"STALE F", *unknown}
        self.anomalies[before:] = [one for one in self.anomalies[before:] if one not in spared]
        if repair.refusal is not None and "nothing to repair" not in str(repair.refusal):
            self.loud = repair.refusal
        self.note(f"        the operator has typed epochsink repair: {self.repaired} epoch(s), then {repair.refusal!r}")
        # if nothing is lacking, the error says to start the query: it finds out what else is wrong
        return repair.refusal is None or "nothing to repair" in str(repair.refusal)

    def _lacks_only_what_was_left_out(self) -> bool:
        """Whether the error tells the operator to accept epochs, and not to restore the newer copy."""
        if "epochsink accept CHECKPOINT" not in str(self.loud) or "the ledger is the older copy" in str(self.loud):
            return False
        recorded = max(recorded_epochs(self.world.files), default=-1)
        newest = max(map(int, self.world.files.get("commits", {})), default=-1)
        # all that the error names: also one that Spark has passed over, because a restored copy lacks its commit
        return set(range(recorded + 1, newest + 1)) <= self.omitted.keys()

    def _recover_healthily(self) -> None:
        self.deliver(everything=True)
        self.now += HEALTHY_FROM
        self.healthy = True
        self.swallows, self.doubling = 0, False
        # one more batch, so that foreachBatch runs, whatever the faults have left
        self.source_rows += self.variant.rows
        self.note("        --- healthy run")
        self.start_driver()
        self.run()
        if self.active.dead not in ("done", "loud"):
            self.flag(f"STUCK after healing: {self.active.dead}")


def copied(files: Folders) -> Folders:
    """Return a copy of a checkpoint folder."""
    return {folder: dict(content) for folder, content in files.items()}


def recorded_epochs(files: Folders) -> set[int]:
    """Return the epochs that a ledger has a record of."""
    recorded: set[int] = set()
    for _, data in sorted(files.get(FOLDER, {}).items()):
        entry = entry_of(data)
        if entry["entry"] == "prepared":
            recorded.add(entry["epoch"])
        elif entry["entry"] == "withdrawn":
            recorded.discard(entry["epoch"])
    return recorded


def has_other_input(files: Folders, number: int) -> bool:
    """Whether the ledger has an epoch with other offsets: those of an older copy of the checkpoint, gone on from."""
    checkpoint = Checkpoint(MemoryFiles(files, at_once))
    if not checkpoint.has_offsets(number):
        # of an older copy, and Spark has not planned it anew
        return False
    digest = checkpoint.offsets_digest(number)
    entries = map(entry_of, files.get(FOLDER, {}).values())
    return all(
        entry["offsets"] != digest for entry in entries if (entry["entry"], entry.get("epoch")) == ("prepared", number)
    )


def without_later_epochs(ledger: dict[str, bytes], newest: int) -> dict[str, bytes]:
    """Return a ledger from which somebody has removed the entries of epochs above one."""
    kept = [data for _, data in sorted(ledger.items()) if entry_of(data).get("epoch", -1) <= newest]
    return {f"{i:020d}": data for i, data in enumerate(kept)}


def without_frames(error: BaseException | None) -> None:
    """Take the frames from an error and from those before it: they hold the driver, which holds the error."""
    while error is not None:
        before = error.__context__
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error = before


def play(
    plan: Plan, sinks: str, schedule: int = 0, variant: Variant = PRODUCTION, *, trace: bool = False
) -> Simulation:
    """Play one plan and return the history with its verdict."""
    simulation = Simulation(plan, sinks, schedule, variant)
    if trace:
        simulation.trace = []
    simulation.play()
    return simulation
