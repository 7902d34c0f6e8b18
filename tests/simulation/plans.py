"""Fault plans: which fault strikes at which global step.

A plan is a tuple of (step number, fault). A fault is a name with whole numbers:

    before, after            the process crashes before or after the step
    err                      the step is not carried out and raises
    lost                     the step is carried out and its reply is lost
    delay k                  the step raises, and is carried out k steps later, whoever runs then
    twice k                  the step is carried out, and once more k steps later
    pause k z                the driver stops for k steps; a second one starts; then the first goes on, z steps alone
    stall k                  one thread of the driver stops for k steps
    timeout                  Kafka aborts every open transaction
    leaderless               Kafka leaves out one end of a decided transaction, whose partition has no leader just then
    rollback                 a DBA rolls every prepared transaction back
    loser n back             a losing task attempt (number n) of the epoch ``back`` before the running one prepares
    restore k offsets ledger all drivers die; the checkpoint is restored to the copy made after commits/k: commits
                             alone or offsets too; the ledger kept (0), as in the copy (1), without later epochs (2)
    clock                    the clock of the drivers' machine goes back from now on, whenever somebody looks
    ledger k                 all drivers die; the ledger alone is restored to the copy made after commits/k (-1: lost)
    newck                    all drivers die; a new checkpoint on the same targets
    back sink k              a target is set back to before its last k commits, by a restore
    failover sink k          a target loses the last k requests that changed it, by a failover
    unmark sink              somebody deletes a target's markers
    remark sink how          somebody changes a target's newest marker: to a "newer" epoch, or to an "other" attempt
    alter sink               somebody gives a column of a PostgreSQL table another type
    outside sink             somebody else writes to every document of an index
    async sink k             an index is made to acknowledge documents before they are on disk; k steps later its node
                             crashes and comes back
busy sink k              an index answers 429 to the next k operations
    retry sink               an index takes again what it refused, and an operator retries its dead letters
    spool how                the newest attempt's files in the spool are "changed", "cut" or "gone"
    holder how               Kafka's partition loses a row of the newest open transaction ("lost"), or it is aborted
                             there ("aborted"); the coordinator is not told
    log how                  retention takes the beginning of Kafka's newest transaction ("cut"), or all ("gone")
    copy                     the checkpoint is copied, and a second query runs on the copy beside the first
    options                  all drivers die; the next one starts with other options
    abandon                  an operator types `epochsink abandon` while the query runs
    rejoin                   all drivers die; epochsink/ is lost, and join_running=True was left in the code
    skip                     the user's function does not call us for the next epoch
    double                   the user's function calls us twice from now on, each time with some of an epoch's rows
    swallow                  the step raises, and from now on the user's function catches every error and returns
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from simulation.world import home

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Fault = tuple[Any, ...]
Plan = tuple[tuple[int, Fault], ...]

SINKS = ("F", "K", "P", "S", "E", "T", "AB", "CD", "KP", "KPE", "KSE", "KE", "PE")
SIMPLE: tuple[Fault, ...] = (("before",), ("after",), ("err",), ("lost",), ("timeout",), ("rollback",), ("newck",))
LEADERLESS: tuple[Fault, ...] = (("leaderless",),)
LOSERS: tuple[Fault, ...] = (("loser", 0, 0), ("loser", 1, 0), ("loser", 0, 1), ("loser", 0, 2))
RESTORES: tuple[Fault, ...] = (
    *(("restore", k, offsets, ledger) for k in (0, 1) for offsets in (0, 1) for ledger in (0, 1, 2)),
    *(("ledger", k) for k in (-1, 0, 1)),
)


def kinds(
    pauses: Sequence[int], resumes: Sequence[int], delays: Sequence[int], stalls: Sequence[int]
) -> tuple[Fault, ...]:
    """Return every fault with the given lengths, in steps."""
    timed: list[Fault] = [("delay", k) for k in delays] + [("twice", k) for k in delays]
    timed += [("stall", k) for k in stalls]
    timed += [("pause", k, z) for k in pauses for z in resumes]
    return (*SIMPLE, *LOSERS, *RESTORES, *timed)


MISUSE: tuple[Fault, ...] = (("skip",), ("double",), ("swallow",))
HOLDER: tuple[Fault, ...] = (("holder", "lost"), ("holder", "aborted"))
LOG: tuple[Fault, ...] = (("log", "cut"), ("log", "gone"))
SPOOL: tuple[Fault, ...] = (("spool", "changed"), ("spool", "cut"), ("spool", "gone"))


def outside(sinks: str) -> tuple[Fault, ...]:
    """Return what users, operators and other programs do to a query and to its sinks."""
    remarks = tuple(
        ("remark", sink, how) for sink in sorted({home(sink) for sink in sinks}) for how in ("newer", "other")
    )
    return (
        *MISUSE,
        *SPOOL,
        ("options",),
        ("copy",),
        ("rejoin",),
        ("clock",),
        *remarks,
        *(("alter", sink) for sink in sinks if sink in "PS"),
        *((("outside", "F"),) if "F" in sinks else ()),
        *(LEADERLESS if "K" in sinks else ()),
    )


def backwards(sinks: str) -> tuple[Fault, ...]:
    """Return the faults that set one of the sinks' targets back, or take its markers away."""
    targets = sorted({home(sink) for sink in sinks})
    return (
        *(("back", sink, k) for sink in targets for k in (1, 2, 3)),
        *(("failover", sink, k) for sink in targets for k in (1, 2, 3, 5, 8)),
        *(("unmark", sink) for sink in targets),
    )


_VICTIMS = {"timeout": "K", "rollback": "PTAB"}


def possible(faults: Sequence[Fault], sinks: str) -> tuple[Fault, ...]:
    """Return the faults that can ever strike these sinks."""
    return tuple(fault for fault in faults if set(_VICTIMS.get(fault[0], sinks)) & set(sinks))


QUICK = kinds(pauses=(9, 20, 36, 60, 999), resumes=(2, 6, 999), delays=(2, 12, 50), stalls=(6, 25))
"""What CI runs at every step."""
MEDIUM = kinds(
    pauses=(4, 7, 9, 11, 13, 15, 17, 20, 24, 30, 36, 44, 52, 60, 70, 90, 999),
    resumes=(1, 2, 4, 8, 999),
    delays=(1, 2, 4, 8, 16, 32, 64, 128),
    stalls=(2, 5, 10, 20, 40),
)
"""What random plans and the search for a mutant's death choose from."""
FULL = kinds(
    pauses=(*range(3, 50), 55, 60, 70, 80, 90, 120, 999),
    resumes=(1, 2, 3, 4, 5, 6, 8, 12, 999),
    delays=(1, 2, 4, 8, 16, 32, 64, 128),
    stalls=(2, 5, 10, 20, 40),
)
"""What ``python -m simulation.explore --one-fault full`` runs at every step."""


def one_fault(steps: int, faults: Sequence[Fault]) -> Iterator[Plan]:
    """Yield every plan with one fault."""
    for step in range(1, steps + 1):
        for fault in faults:
            yield ((step, fault),)


def another_too(seed: int, steps: int, some: Sequence[Fault], faults: Sequence[Fault]) -> Iterator[Plan]:
    """Yield plans for ever in which one of some faults strikes, and one of all faults and of those."""
    choose = random.Random(seed)
    ahead, behind = at_random(seed, steps, 1, [*faults, *some]), by_kind(some)
    for other in ahead:
        yield tuple(sorted([*other, (choose.randint(1, steps), choose.choice(behind[choose.choice(sorted(behind))]))]))


def of_others(seed: int, steps: int, sinks: str) -> Iterator[Plan]:
    """Yield plans for ever with three faults of those that users, operators and restores of targets bring about."""
    return at_random(seed, steps, 3, (*outside(sinks), *backwards(sinks)))


def late_and_backwards(seed: int, steps: int, sinks: str) -> Iterator[Plan]:
    """Yield plans for ever in which a request or a driver comes late, and a target is set back before or meanwhile."""
    late = [fault for fault in MEDIUM if fault[0] in ("pause", "stall", "delay", "twice")]
    behind = [fault for fault in backwards(sinks) if fault[0] != "unmark"]
    return another_too(seed, steps, behind, late)


def copied_and_stalled(seed: int, steps: int) -> Iterator[Plan]:
    """Yield plans for ever in which the checkpoint is copied, and soon after a thread of either query stalls."""
    choose = random.Random(seed)
    while True:
        copied = choose.randint(20, steps)
        stalls = [
            (copied + choose.randint(1, 70), ("stall", choose.choice((3, 6, 12, 25))))
            for _ in range(choose.randint(1, 2))
        ]
        yield ((copied, ("copy",)), *sorted(stalls))


def doubled_and_more(seed: int, steps: int) -> Iterator[Plan]:
    """Yield plans for ever in which the user's function calls twice, and something else happens soon after."""
    choose = random.Random(seed)
    others = by_kind([fault for fault in MEDIUM if fault[0] not in ("restore", "ledger", "newck")] + [("swallow",)])
    while True:
        doubled = choose.randint(1, steps)
        other = choose.choice(others[choose.choice(sorted(others))])
        yield ((doubled, ("double",)), (doubled + choose.randint(1, 70), other))


def by_kind(faults: Sequence[Fault]) -> dict[str, list[Fault]]:
    """Return faults by their names."""
    found: dict[str, list[Fault]] = {}
    for fault in faults:
        found.setdefault(fault[0], []).append(fault)
    return found


def at_random(seed: int, steps: int, depth: int, faults: Sequence[Fault]) -> Iterator[Plan]:
    """Yield plans with ``depth`` faults for ever, each kind of fault as likely as any other."""
    choose = random.Random(seed)
    by_name = by_kind(faults)
    names = sorted(by_name)
    while True:
        plan = [(choose.randint(1, steps), choose.choice(by_name[choose.choice(names)])) for _ in range(depth)]
        yield tuple(sorted(plan))
