"""The deterministic scheduler: it interleaves the threads of the drivers step by step, and applies a plan's faults.

Each thread of a simulated driver is a greenlet. It hands an `Operation` (an I/O step) or a `Wait` to the scheduler,
which runs one of them at a time and counts steps. Time is that count: there is no clock. A thread that would be chosen
again goes on at once, because a handover takes longer than most steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from greenlet import getcurrent

from simulation.threads import Operation, Thread, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.plans import Fault, Plan

Answer = TypeVar("Answer")

MOST_TURNS = 6000
MOST_DRIVERS = 9
AHEAD = (None, "stream", "commit thread")
"""By schedule, the thread that goes first; with schedule 0 they take turns."""
AT_STEP = ("before", "after", "err", "lost", "delay", "twice", "swallow")


def can_meet(fault: Fault, operation: Operation) -> bool:
    """Whether a fault of a step makes a difference: by reading nothing changes, and "before" and "err" are enough."""
    return not operation.reads or fault[0] in ("before", "err", "swallow")


class Process:
    """What the scheduler knows of a driver's process."""

    number: int
    threads: list[Thread]
    dead = ""
    """"" while it runs; else "crash", "error" (to be started again), "done" or "loud" (stopped for the operator)."""
    paused_until = 0
    alone_for = 0

    def kill(self) -> None:
        """Crash."""
        self.dead = self.dead or "crash"
        for thread in self.threads:
            thread.kill()


class Scheduler:
    """Runs processes under a plan. A subclass says how a driver starts and what the world-wide faults do."""

    def __init__(self, plan: Plan, schedule: int, *, faults_wait: bool = False) -> None:
        self._faults_wait = faults_wait
        self.plan: dict[int, list[Fault]] = {}
        for number, fault in plan:
            self.plan.setdefault(number, []).append(fault)
        self.schedule = schedule
        self.now = 0
        self.struck = 0
        self.healthy = False
        self.trace: list[str] | None = None
        self.loud: BaseException | None = None
        self.processes: list[Any] = []
        self.active: Any = None
        self._due: list[tuple[int, Operation]] = []
        self._burst: tuple[Any, int] | None = None
        self._turn = 0
        self._turns_left = 0
        self._living: list[Any] = []
        self._chosen: Any = None
        """The thread whose turn it is."""
        self._alone: Any = None
        """Its process, if that is the active one and no other lives."""

    # ---- for subclasses

    def add(self, process: Any) -> None:
        """Run a process that has started, too."""
        self.processes.append(process)
        self._living.append(process)
        self._alone = None

    def start_driver(self) -> None:
        """Start a fresh process and make it the active one."""
        raise NotImplementedError

    def start_others(self) -> bool:
        """Start again whatever else has to run; return whether anything had to."""
        return False

    def strike_step(self, kind: str) -> None:
        """Take note of a fault that strikes one step or one process."""

    def strike(self, process: Any, fault: Fault) -> bool:
        """Apply a world-wide fault; return whether it had an effect. Killing processes ends the turn."""
        raise NotImplementedError

    def stuck(self, why: str) -> None:
        """Note that nothing moves any more."""
        raise NotImplementedError

    # ---- steps

    def step(self, name: str, apply: Callable[[], Answer], *, reads: bool = False) -> Answer:
        """Make one I/O step (see `simulation.steps.Stepper`)."""
        parent: Any = getcurrent().parent
        if parent is None:
            return apply()
        # a fault that is due is the scheduler's
        if (self.healthy or self.now + 1 not in self.plan) and self._goes_on():
            self._count_step()
            return self._make_step(self._alone, self._chosen, name, apply)
        answer: Answer = parent.switch(Operation(name, apply, reads))
        return answer

    def wait(self, ready: Callable[[], bool]) -> None:
        """Suspend the calling thread until a condition holds."""
        if not (ready() and self._goes_on()):
            parent: Any = getcurrent().parent
            parent.switch(Wait(ready))

    def _goes_on(self) -> bool:
        """Take the next turn if it is that of the thread that runs; return whether it is."""
        process, thread = self._alone, self._chosen
        # a dead one: its threads are being killed
        if process is None or process.dead or self._burst or not self._turns_left:
            return False
        # the one that goes first needs no look at the other
        if thread.name != AHEAD[self.schedule]:
            ready = [(process, one) for one in process.threads if one is thread or self._is_ready(one)]
            if len(ready) > 1 and self._next_of(ready, self._turn + 1)[1] is not thread:
                return False
        self._turn += 1
        self._turns_left -= 1
        return True

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(line)

    def deliver(self, *, everything: bool = False) -> None:
        """Carry out delayed requests that are due."""
        for item in [item for item in self._due if everything or item[0] <= self.now]:
            self._due.remove(item)
            self.note(f"        late delivery of {item[1].name} -> {item[1].apply()}")

    def forget_due(self, *names: str) -> None:
        """Forget delayed requests whose names begin so: a client that is gone sends them no more."""
        self._due = [item for item in self._due if not item[1].name.startswith(names)]

    # ---- the loop

    def run(self) -> None:
        """Run until every process has ended, starting again those that ended with a passing error."""
        self._turns_left = MOST_TURNS
        while self._turns_left:
            self._turns_left -= 1
            self._resume_paused()
            if self.active is None or (self.active.dead in ("crash", "error") and self.loud is None):
                if len(self.processes) > MOST_DRIVERS:
                    return self.stuck("restarts")
                self.start_driver()
                continue
            if self.start_others():
                continue
            chosen = self._choose()
            if chosen is None:
                return None
            process, thread = chosen
            if thread is None:
                continue
            self._chosen = thread
            self._alone = process if process is self.active and len(self._living) == 1 else None
            if isinstance(thread.request, Wait):
                thread.resume(None)
            else:
                self._execute(process, thread)
        return self.stuck("steps")

    def _resume_paused(self) -> None:
        for process in self._living:
            if not process.paused_until or process.dead:
                continue
            if self.now >= process.paused_until or self.active.dead in ("done", "loud"):
                process.paused_until = 0
                self._burst = (process, self.now + process.alone_for)
                self.note(f"        driver {process.number} goes on, {process.alone_for} steps alone")

    def _choose(self) -> tuple[Any, Thread | None] | None:
        """Return whose turn it is; (_, None) to look again, None if nothing is left to run."""
        self._living = [process for process in self._living if not process.dead]
        ready = [
            (process, thread)
            for process in self._living
            if not process.paused_until
            for thread in process.threads
            if self._is_ready(thread)
        ]
        if not ready:
            return self._nothing_ready()
        if self._burst:
            process, until = self._burst
            alone = [pair for pair in ready if pair[0] is process]
            if self.now < until and alone:
                ready = alone
            else:
                self._burst = None
        self._turn += 1
        return self._next_of(ready, self._turn)

    def _next_of(self, ready: list[tuple[Any, Thread]], turn: int) -> tuple[Any, Thread]:
        if self.schedule == 0:
            return ready[turn % len(ready)]
        return next((pair for pair in ready if pair[1].name == AHEAD[self.schedule]), ready[0])

    def _is_ready(self, thread: Thread) -> bool:
        request = thread.request
        if request is None or thread.stalled_until > self.now:
            return False
        return not isinstance(request, Wait) or request.ready()

    def _nothing_ready(self) -> tuple[Any, Thread | None] | None:
        going = [process for process in self.processes if not process.dead and not process.paused_until]
        living = [thread for process in going for thread in process.threads if thread.request is not None]
        stalled = [thread for thread in living if thread.stalled_until > self.now]
        paused = [process for process in self.processes if process.paused_until and not process.dead]
        for thread in stalled:
            thread.stalled_until = 0
        if not stalled:
            for process in paused:
                process.paused_until = max(1, self.now)
        if stalled or paused:
            # nothing else moves, so their time has come
            return (None, None)
        if living:
            self.stuck("deadlock")
        return None

    def _execute(self, process: Any, thread: Thread) -> None:
        operation: Any = thread.request
        self._count_step()
        faults = None if self.healthy else self.plan.get(self.now)
        if faults is None:
            self._carry_out(process, thread, operation)
            return
        left = faults.copy()
        halted = self._strike_around(process, thread, operation, faults, left)
        met = None if halted else next((fault for fault in faults if fault[0] in AT_STEP), None)
        if met is not None and can_meet(met, operation):
            left.remove(met)
        else:
            met = None
        # before the step, of which some parts look at what is still to come; and the next step may follow at once
        del self.plan[self.now]
        if self._faults_wait and left:
            self.plan[self.now + 1] = [*left, *self.plan.get(self.now + 1, ())]
        if met is not None:
            self._strike_step(process, thread, operation, met)
        elif not halted:
            self._carry_out(process, thread, operation)

    def _count_step(self) -> None:
        self.now += 1
        if self._due:
            self.deliver()

    def _carry_out(self, process: Any, thread: Thread, operation: Operation) -> None:
        thread.resume(self._make_step(process, thread, operation.name, operation.apply))

    def _make_step(self, process: Any, thread: Thread, name: str, apply: Callable[[], Answer]) -> Answer:
        answer = apply()
        if self.trace is not None:
            self._note_step(process, thread, name, str(answer)[:90])
        return answer

    def _note_step(self, process: Any, thread: Thread, name: str, what: str) -> None:
        self.note(f"{self.now:4} driver {process.number} {thread.name}: {name} -> {what}")

    def _strike_around(
        self, process: Any, thread: Thread, operation: Operation, faults: list[Fault], left: list[Fault]
    ) -> bool:
        """Apply the faults that do not concern the step itself, and take those that have struck from ``left``.

        Return whether the step must wait or is gone.
        """
        for fault in faults:
            if fault[0] == "pause":
                if process is not self.active or process.paused_until:
                    continue
                self.struck += 1
                left.remove(fault)
                self.strike_step("pause")
                process.paused_until, process.alone_for = self.now + fault[1], fault[2]
                self.note(f"{self.now:4} driver {process.number} PAUSED before {operation.name}")
                self.start_driver()
                return True
            if fault[0] == "stall":
                self.struck += 1
                left.remove(fault)
                self.strike_step("stall")
                thread.stalled_until = self.now + fault[1]
                self.note(f"{self.now:4} driver {process.number} {thread.name} STALLED before {operation.name}")
                return True
            if fault[0] not in AT_STEP and self.strike(process, fault):
                self.struck += 1
                left.remove(fault)
                if process.dead:
                    return True
        return False

    def _strike_step(self, process: Any, thread: Thread, operation: Operation, fault: Fault) -> None:
        kind = fault[0]
        self.struck += 1
        self.strike_step(kind)
        if kind in ("after", "lost", "twice"):
            answer = operation.apply()
            self._note_step(process, thread, operation.name, f"{str(answer)[:60]} and then {fault}")
        else:
            answer = None
            self._note_step(process, thread, operation.name, f"not carried out: {fault}")
        if kind in ("delay", "twice"):
            self._due.append((self.now + fault[1], operation))
        if kind in ("before", "after"):
            process.kill()
        elif kind == "twice":
            thread.resume(answer)
        else:
            thread.throw(OSError(f"{operation.name}: outcome unknown"))
