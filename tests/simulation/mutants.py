"""The mutants with the plan that is known to kill each: the protocol with one part taken away, or one rule broken.

Each must lose, double or pin rows, or accuse somebody wrongly. The unmutated code (``control``) passes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation import machine_mutants as machine
from simulation import repair_mutants as repair
from simulation import world_mutants as world
from simulation.driver import PRODUCTION, Variant
from simulation.explorer import Case
from simulation.kafka_sink import KafkaLogSink
from simulation.machine_mutants import made_of
from simulation.storage import TrimmingLedger

if TYPE_CHECKING:
    from simulation.plans import Plan


@dataclass(frozen=True)
class Mutant:
    """One mutation, the sinks and the plan that kill it, and what must pass that plan."""

    name: str
    variant: Variant
    sinks: str
    plan: Plan
    control: Variant = PRODUCTION
    schedule: int = 0

    @property
    def case(self) -> Case:
        """Return the history that kills it."""
        return Case(self.plan, self.sinks, self.schedule)


NO_SPOOL = Variant(spool=False)
RETAINS = Variant(retains=True)
LOGGED = Variant(kinds={"K": KafkaLogSink}, kept="K")


MUTANTS = (
    Mutant("ledger without a fence", Variant(ledger=machine.Unfenced), "K", ((86, ("pause", 11, 999)),)),
    Mutant(
        "appends behind its successor's entries",
        Variant(ledger=machine.BehindItsSuccessor),
        "E",
        ((1, ("pause", 45, 12)),),
        control=Variant(ledger=TrimmingLedger),
    ),
    Mutant("ledger overwritten", Variant(ledger=machine.Overwriting), "K", ((5, ("pause", 20, 2)),)),
    Mutant("no generation check", Variant(ledger=machine.Unchecked), "K", ((8, ("pause", 25, 2)),)),
    Mutant(
        "replay not recorded",
        Variant(coordinator=made_of(commits=machine.CommitsUnrecordedReplays)),
        "K",
        ((31, ("timeout",)),),
    ),
    Mutant(
        "a later take changes the version base", Variant(ledger=machine.LaterOriginsWin), "F", ((1, ("pause", 9, 999)),)
    ),
    Mutant(
        "ledger begins at the clock",
        Variant(ledger=machine.BeginsAtTheClock),
        "P",
        ((27, ("clock",)), (28, ("ledger", -1))),
    ),
    Mutant("no digest of the offsets", Variant(checkpoint=machine.OffsetsUnseen), "K", ((65, ("restore", 0, 1, 0)),)),
    Mutant("commit before the decision", Variant(checkpoint=machine.DecidedAtOnce), "K", ((32, ("after",)),)),
    Mutant(
        "abort at the re-run what is recorded",
        Variant(coordinator=machine.AbortsWhatIsRecorded),
        "K",
        ((29, ("pause", 70, 999)),),
    ),
    Mutant("supersede what is recorded", Variant(coordinator=machine.Supersedes), "P", ((34, ("before",)),)),
    Mutant(
        "abort at recovery what is recorded",
        Variant(coordinator=machine.AbortsAtRecovery),
        "K",
        ((34, ("before",)),),
    ),
    Mutant(
        "markers not compared at the start",
        Variant(coordinator=made_of(check=machine.IgnoresMarkers)),
        "K",
        ((69, ("restore", 0, 1, 1)),),
    ),
    Mutant(
        "older ledger not noticed at the start",
        Variant(coordinator=machine.IgnoresOlderLedger),
        "K",
        ((68, ("ledger", 0)),),
    ),
    Mutant(
        "conclusion without reading the ledger again",
        Variant(coordinator=made_of(run=machine.ConcludesFromMemory)),
        "K",
        ((49, ("pause", 90, 1)),),
    ),
    Mutant(
        "outcome judged without reading the ledger again",
        Variant(coordinator=made_of(commits=machine.ConcludesBeforeReading)),
        "E",
        ((40, ("pause", 52, 1)),),
    ),
    Mutant(
        "spool listed after the ledger is read",
        Variant(coordinator=made_of(sweep=machine.SweepsByAnOldLedger)),
        "E",
        ((15, ("pause", 22, 2)),),
    ),
    Mutant(
        "sweep after the commits of a recovery",
        Variant(coordinator=machine.SweepsAfterCommits),
        "P",
        ((30, ("rollback",)), (45, ("pause", 9, 1))),
        schedule=2,
    ),
    Mutant(
        "tidy beside an attempt",
        Variant(coordinator=made_of(sweep=machine.TidiesAnyTime), spool=False),
        "K",
        ((36, ("stall", 3)),),
        NO_SPOOL,
    ),
    Mutant(
        "attempt that a replay has overtaken",
        # what the replay stands behind is ended before the epoch is done: a second guard, which finds the same
        Variant(coordinator=machine.IgnoresReplays, kinds={"K": machine.LeavesLosers}),
        "K",
        ((39, ("timeout",)),),
        Variant(kinds={"K": machine.LeavesLosers}),
    ),
    Mutant(
        "abort after an unknown append",
        Variant(coordinator=machine.AbandonsTheUnknown),
        "E",
        ((23, ("lost",)),),
    ),
    Mutant(
        "what a driver prepares after its checkpoint was abandoned is left",
        Variant(coordinator=made_of(sweep=machine.LeavesItsOwn)),
        "P",
        ((18, ("abandon",)),),
    ),
    Mutant(
        "a driver whose checkpoint was abandoned sweeps under its old fence",
        Variant(coordinator=made_of(sweep=machine.EndsWithoutTheFence)),
        "K",
        ((23, ("abandon",)),),
    ),
    Mutant(
        "a superseded driver ends what it has recorded",
        Variant(coordinator=made_of(sweep=machine.EndsWhatIsRecorded), spool=False),
        "K",
        ((39, ("pause", 12, 15)),),
        NO_SPOOL,
    ),
    Mutant(
        "a second replay is built from the parts before the first",
        Variant(coordinator=made_of(commits=machine.ReplaysFromTheFirstRecord)),
        "T",
        ((29, ("rollback",)), (53, ("rollback",))),
        schedule=2,
    ),
    Mutant("spool dropped before done", Variant(coordinator=made_of(commits=machine.DropsFirst)), "KPE", ()),
    # against a world that goes back. Some rules find the same; then the control has only the rule in question
    Mutant(
        "markers compared at the start",
        Variant(coordinator=world.ComparesNothing),
        "S",
        ((52, ("back", "S", 1)),),
        Variant(coordinator=world.ComparesAtTheStart),
    ),
    Mutant(
        "markers compared before a sweep",
        Variant(coordinator=world.ComparesNothing),
        "S",
        ((73, ("back", "S", 1)),),
        Variant(coordinator=world.ComparesBeforeASweep),
    ),
    Mutant(
        "markers not compared in the commit",
        Variant(coordinator=made_of(commits=world.IgnoresMarkersInCommit)),
        "E",
        ((90, ("failover", "E", 2)),),
    ),
    Mutant(
        "the sinks are not told what is done",
        Variant(coordinator=world.SweepsDoneParts),
        "P",
        ((70, ("failover", "P", 2)), (73, ("pause", 11, 1))),
        schedule=1,
    ),
    # against a second copy of the checkpoint, altered markers and an altered spool
    Mutant("the spool is believed", Variant(spool_keeper=world.Unverified), "E", ((51, ("spool", "changed")),)),
    # against users
    Mutant(
        "nobody asks what Spark decided alone",
        Variant(coordinator=made_of(check=world.IgnoresWhatSparkDecidedAlone)),
        "K",
        ((34, ("skip",)),),
    ),
    Mutant(
        "errors are raised to the user's function alone",
        Variant(coordinator=made_of(commits=world.LetsErrorsBeSwallowed)),
        "K",
        ((20, ("swallow",)),),
    ),
    Mutant("a second call in an epoch", Variant(refuses_second_calls=False), "K", ((48, ("double",)),)),
    Mutant("half a record stands", Variant(coordinator=world.KeepsHalfARecord), "K", ((48, ("double",)),)),
    Mutant("joining any target", Variant(coordinator=made_of(check=world.JoinsAnyTarget)), "K", ((41, ("rejoin",)),)),
    Mutant(
        "a repair applies the newest epoch first",
        Variant(retains=True, dies_in_repair=(18,), repair=repair.NewestFirst),
        "K",
        ((98, ("back", "K", 3)),),
        Variant(retains=True, dies_in_repair=(18,)),
    ),
    Mutant(
        "a repair applies the newest epoch alone",
        Variant(retains=True, repair=repair.NewestAlone),
        "K",
        ((82, ("back", "K", 3)),),
        RETAINS,
    ),
    Mutant(
        "a repair aborts what is prepared of done epochs",
        Variant(retains=True, repair=repair.SweepsDoneParts),
        "P",
        ((82, ("back", "P", 2)),),
        RETAINS,
    ),
)
