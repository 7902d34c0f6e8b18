"""The mutants with the plan that is known to kill each: the protocol with one part taken away, or one rule broken.

Each must lose, double or pin rows, or accuse somebody wrongly. The unmutated code (``control``) passes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation import machine_mutants as machine
from simulation import repair_mutants as repair
from simulation import sink_mutants as sink
from simulation import world_mutants as world
from simulation.driver import PRODUCTION, Variant
from simulation.explorer import Case
from simulation.kafka_port import KafkaLogPort
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
LOGGED = Variant(ports={"K": KafkaLogPort}, kept="K")


MUTANTS = (
    Mutant("ledger without a fence", Variant(ledger=machine.Unfenced), "K", ((33, ("pause", 36, 3)),)),
    Mutant(
        "appends behind its successor's entries",
        Variant(ledger=machine.BehindItsSuccessor),
        "E",
        ((1, ("pause", 45, 12)),),
        control=Variant(ledger=TrimmingLedger),
    ),
    Mutant("ledger overwritten", Variant(ledger=machine.Overwriting), "K", ((5, ("pause", 20, 2)),)),
    Mutant("no generation check", Variant(ledger=machine.Unchecked), "K", ((1, ("pause", 20, 2)),)),
    Mutant(
        "replay not recorded",
        Variant(coordinator=made_of(commits=machine.CommitsUnrecordedReplays)),
        "K",
        ((31, ("timeout",)),),
    ),
    Mutant(
        "a later take changes the version base", Variant(ledger=machine.LaterOriginsWin), "F", ((4, ("pause", 36, 2)),)
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
        ((69, ("restore", 0, 0, 1)),),
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
        ((13, ("pause", 20, 2)),),
    ),
    Mutant(
        "sweep after the commits of a recovery",
        Variant(coordinator=machine.SweepsAfterCommits),
        "P",
        ((26, ("rollback",)), (38, ("pause", 7, 1))),
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
        Variant(coordinator=machine.IgnoresReplays, ports={"K": sink.KafkaLeavesLosers}),
        "K",
        ((32, ("timeout",)),),
        Variant(ports={"K": sink.KafkaLeavesLosers}),
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
        "P",
        ((5, ("pause", 28, 5)),),
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
    Mutant("Kafka without markers", Variant(ports={"K": sink.KafkaWithoutMarker}), "K", ((45, ("lost",)),)),
    Mutant("Kafka time-out taken as aborted", Variant(ports={"K": sink.KafkaGuesses}), "K", ((45, ("lost",)),)),
    Mutant("Kafka marker outside it", Variant(ports={"K": sink.KafkaMarkerApart}), "K", ((45, ("after",)),)),
    Mutant(
        "Kafka producer re-used",
        Variant(ports={"K": sink.KafkaReusesProducer}),
        "K",
        ((45, ("delay", 50)),),
        Variant(ports={"K": sink.KafkaOldBroker}),
    ),
    Mutant(
        "Kafka's coordinator is believed",
        Variant(ports={"K": sink.KafkaAsksTheCoordinatorAlone}),
        "K",
        ((40, ("holder", "aborted")),),
    ),
    Mutant(
        "Kafka's partitions are not asked after the commit",
        Variant(ports={"K": sink.KafkaLooksOnlyBefore}),
        "K",
        ((45, ("holder", "lost")),),
    ),
    Mutant(
        "Kafka's log is believed to hold all records",
        Variant(ports={"K": sink.KafkaBelievesTheLog}, kept="K"),
        "K",
        ((70, ("log", "gone")), (70, ("timeout",))),
        LOGGED,
    ),
    Mutant(
        "records of another producer are taken from Kafka's log",
        Variant(ports={"K": sink.KafkaTakesOthersRecords}, kept="K"),
        "K",
        ((66, ("timeout",)),),
        LOGGED,
    ),
    Mutant(
        "Kafka sweep takes newer generations",
        Variant(ports={"K": world.KafkaSweepsNewerUnfenced}, spool=False),
        "K",
        ((35, ("pause", 60, 2)),),
        Variant(ports={"K": world.KafkaUnfenced}, spool=False),
    ),
    Mutant("42704 taken as done", Variant(ports={"P": sink.TrustsMissing}), "P", ((31, ("rollback",)),)),
    Mutant("42704 taken as aborted", Variant(ports={"P": sink.MissingIsAborted}), "P", ((45, ("lost",)),)),
    Mutant(
        "rows staged for other columns are merged",
        Variant(ports={"P": sink.CastsPrepared}),
        "P",
        ((25, ("alter", "P")),),
    ),
    Mutant(
        "rows staged for other columns are merged after the decision",
        Variant(ports={"S": sink.CastsStaged}),
        "S",
        ((32, ("alter", "S")),),
    ),
    Mutant("gid re-used", Variant(ports={"P": sink.ReusesGid}), "P", ((27, ("pause", 20, 2)),)),
    Mutant(
        "commits that were sent side by side are taken for carried out",
        Variant(ports={"T": sink.SentIsCommitted}),
        "T",
        ((37, ("err",)),),
    ),
    Mutant(
        "sinks of one database prepare a transaction each",
        Variant(ports={"A": sink.SharesNothing, "B": sink.OtherSharesNothing}),
        "AB",
        (),
    ),
    Mutant("losers hold readers back", Variant(ports={"K": sink.KafkaLeavesLosers}), "K", ((75, ("loser", 1, 0)),)),
    Mutant("one of two sinks marks what they share", Variant(ports={"A": sink.MarksOne}), "AB", ()),
    Mutant(
        "a shared transaction is prepared again for one sink",
        Variant(ports={"A": sink.ReplaysOne}),
        "AB",
        ((38, ("rollback",)),),
    ),
    Mutant(
        "staged rows of one database are merged sink by sink",
        Variant(ports={"C": sink.MergesOne, "D": sink.OtherMergesOne}),
        "CD",
        (),
    ),
    Mutant("marker as upsert", Variant(ports={"S": sink.UpsertsMarker}), "S", ((43, ("after",)),)),
    Mutant("marker outside the transaction", Variant(ports={"S": sink.MarksApart}), "S", ((44, ("after",)),)),
    Mutant("the losers' attempts committed", Variant(ports={"S": sink.MergesLosers}), "S", ((21, ("loser", 0, 0)),)),
    Mutant(
        "staging sweep takes newer generations",
        Variant(ports={"S": sink.StagedSweepsNewer}, spool=False),
        "S",
        ((11, ("pause", 30, 2)),),
        NO_SPOOL,
    ),
    Mutant("no marker document", Variant(ports={"E": sink.SearchWithoutMarker}), "E", ((51, ("restore", 0, 1, 1)),)),
    Mutant("keyless ids without the query id", Variant(ports={"E": sink.SearchWithoutQuery}), "E", ((47, ("newck",)),)),
    Mutant("automatic document ids", Variant(ports={"E": sink.SearchAutomaticIds}), "E", ((34, ("pause", 44, 999)),)),
    Mutant("no version base", Variant(ports={"F": sink.SearchWithoutBase}), "F", ((81, ("newck",)),)),
    Mutant("no external version", Variant(ports={"F": sink.SearchWithoutVersion}), "F", ((39, ("delay", 50)),)),
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
        "marker of the epoch before not in PREPARE",
        Variant(coordinator=world.ComparesNothing, ports={"P": world.PreparesBlindly}),
        "P",
        ((82, ("failover", "P", 3)),),
        Variant(coordinator=world.ComparesNothing),
    ),
    Mutant(
        "marker of the epoch before not in the merge",
        Variant(ports={"S": world.MergesBlindly}),
        "S",
        ((101, ("back", "S", 1)),),
        schedule=1,
    ),
    Mutant(
        "Kafka's markers of even and odd epochs are one",
        Variant(ports={"K": world.KafkaSeesOneEpoch}),
        "K",
        ((90, ("back", "K", 1)), (93, ("timeout",))),
        Variant(ports={"K": sink.KafkaLeavesLosers}),
        schedule=1,
    ),
    Mutant(
        "Kafka's highest marker stands for every partition",
        Variant(ports={"K": world.KafkaComparesTheHighest}),
        "K",
        ((111, ("failover", "K", 5)),),
    ),
    Mutant(
        "the sinks are not told what is done",
        Variant(coordinator=world.SweepsDoneParts),
        "P",
        ((66, ("failover", "P", 2)), (71, ("pause", 9, 1))),
        schedule=1,
    ),
    Mutant(
        "Kafka aborts what is done",
        Variant(ports={"K": world.KafkaRollsBackDone}),
        "K",
        ((36, ("delay", 1)), (65, ("failover", "K", 3))),
    ),
    Mutant(
        "PostgreSQL rolls back what is done",
        Variant(ports={"P": world.PreparedRollsBackDone}),
        "P",
        ((49, ("err",)), (69, ("back", "P", 1))),
    ),
    Mutant(
        "Elasticsearch's marker is written whatever stands there",
        Variant(ports={"E": world.SearchMarksBlindly}),
        "E",
        ((104, ("failover", "E", 5)),),
    ),
    Mutant(
        "two copies apply one epoch to an index",
        Variant(ports={"E": world.SearchClaimsNothing}),
        "E",
        ((29, ("copy",)), (45, ("stall", 27))),
    ),
    Mutant(
        "any incarnation of the index will do",
        Variant(ports={"E": world.SearchAnyIncarnation}),
        "E",
        ((78, ("back", "E", 1)),),
    ),
    Mutant(
        "settings of the index are not judged in vote and commit",
        Variant(ports={"E": world.SearchAnySetting}),
        "E",
        ((40, ("async", "E", 60)),),
    ),
    # against a second copy of the checkpoint, altered markers and an altered spool
    Mutant(
        "nobody asks who wrote Kafka's marker",
        Variant(ports={"K": world.KafkaAnyWriterUnfenced}),
        "K",
        ((51, ("copy",)),),
        Variant(ports={"K": world.KafkaUnfenced}),
    ),
    Mutant(
        "no fence between two copies in Kafka",
        Variant(ports={"K": world.KafkaUnfenced}),
        "K",
        ((61, ("copy",)), (97, ("stall", 25))),
    ),
    Mutant(
        "Kafka's fence is not looked at after a replay",
        Variant(ports={"K": world.KafkaLooksOnce}),
        "K",
        ((76, ("copy",)), (86, ("stall", 15))),
    ),
    Mutant(
        "who has lost Kafka's fence sweeps all the same",
        Variant(ports={"K": world.KafkaSweepsAnyway}, spool=False),
        "K",
        ((50, ("clock",)), (55, ("copy",)), (56, ("before",))),
        NO_SPOOL,
    ),
    Mutant(
        "what a later generation has open is left, and not refused",
        Variant(ports={"K": world.KafkaIgnoresNewer}),
        "K",
        ((55, ("copy",)), (59, ("before",)), (68, ("stall", 60)), (85, ("before",)), (130, ("stall", 40))),
    ),
    Mutant(
        "nobody asks who wrote the marker row",
        Variant(ports={"S": world.StagedAnyWriter}),
        "S",
        ((103, ("remark", "S", "newer")),),
    ),
    Mutant(
        "nobody asks who wrote the marker document",
        Variant(ports={"E": world.SearchAnyWriter}),
        "E",
        ((65, ("back", "E", 1)),),
    ),
    Mutant("the spool is believed", Variant(spool_keeper=world.Unverified), "E", ((51, ("spool", "changed")),)),
    Mutant(
        "a conflict is taken for a later epoch",
        Variant(ports={"F": world.SearchGivesWay}),
        "F",
        ((112, ("outside", "F")),),
    ),
    Mutant(
        "who writes over a newer document does not ask the ledger",
        Variant(ports={"F": world.SearchAsksNoLedger}),
        "F",
        ((38, ("pause", 999, 4)), (96, ("back", "F", 1))),
    ),
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
        "Kafka replays with today's options",
        Variant(ports={"K": world.KafkaOtherOptions}),
        "K",
        ((34, ("options",)), (40, ("timeout",))),
    ),
    Mutant(
        "staged rows are merged with today's options",
        Variant(ports={"S": world.StagedOtherOptions}),
        "S",
        ((71, ("options",)),),
    ),
    Mutant(
        "a spool is applied with today's options",
        Variant(ports={"E": world.SearchOtherOptions}),
        "E",
        ((71, ("options",)),),
    ),
    Mutant(
        "a repair applies the newest epoch first",
        Variant(retains=True, dies_in_repair=(4,), repair=repair.NewestFirst),
        "S",
        ((76, ("back", "S", 2)),),
        Variant(retains=True, dies_in_repair=(4,)),
    ),
    Mutant(
        "a repair applies the newest epoch alone",
        Variant(retains=True, repair=repair.NewestAlone),
        "S",
        ((76, ("back", "S", 2)),),
        RETAINS,
    ),
    Mutant(
        "a repair aborts what is prepared of done epochs",
        Variant(retains=True, repair=repair.SweepsDoneParts),
        "P",
        ((82, ("back", "P", 2)),),
        RETAINS,
    ),
    Mutant(
        "a repair looks at the newest marker only",
        Variant(retains=True, ports={"T": repair.LooksAtTheNewestMarker}),
        "T",
        ((95, ("back", "T", 4)),),
        RETAINS,
    ),
    Mutant(
        "a repair of a topic looks at markers alone",
        Variant(retains=True, ports={"K": repair.TrustsMarkersAlone}),
        "K",
        ((85, ("unmark", "K")),),
        RETAINS,
    ),
    Mutant(
        "a repair of a topic looks at the log alone",
        Variant(retains=True, dies_in_repair=(13,), repairs_on_copies=True, ports={"K": repair.TrustsTheLogAlone}),
        "K",
        ((84, ("back", "K", 3)),),
        Variant(retains=True, dies_in_repair=(13,), repairs_on_copies=True),
    ),
)
