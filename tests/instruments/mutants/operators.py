"""Mutants of what on-call people read and type: progress, metrics, `status`, `doctor` and `resolve`."""

from __future__ import annotations

from mutants.mutant import Mutant

CLI = "tests/unit/test_cli.py"
DOCTOR = "tests/unit/test_doctor.py"
HINTS = "tests/unit/test_hints_typed.py"
LOOKS = "tests/integration/test_operators_looks.py"
METRICS = "tests/unit/test_metrics.py"
PROGRESS = "tests/unit/test_progress.py"
TYPED = "tests/integration/test_hints_typed.py"

MUTANTS: list[Mutant] = [
    Mutant(
        "cli/resolve.py",
        "if self._prepared.shares[sink].files and not self._without_rows:",
        "if False:",
        CLI + " -k spool_that_is_not_found",
        "rows in a spool that the command was not told of, discarded for good",
    ),
    Mutant(
        "cli/resolve.py",
        "        for path in (file, file.parent):\n",
        "        for path in (file.parent,):\n",
        CLI + " -k on_the_disk",
        "discarded rows whose file a power cut empties: nothing else has them",
    ),
    # ---- after a failed start, and after a target was set back
    Mutant(
        "spark/query_run.py",
        "            if starts and isinstance(failure, Exception):\n                self.note_failure(failure)\n",
        "",
        LOOKS + " -k every_look",
        "a start that fails again and again, while status says that all is well",
    ),
    Mutant(
        "cli/app.py",
        "        with operation.noting_failure():\n            operation.carry_out()\n",
        "        operation.carry_out()\n",
        LOOKS + " -k after_its_take",
        "a command that has found a target set back, after which status says that all is well",
    ),
    Mutant(
        "cli/targets.py",
        "            disagreements = [_compared(place, participant, name, addresses) for name in names]\n",
        "            disagreements: list[Disagreement | None] = []\n",
        LOOKS + " -k compared_before",
        "a table that was set back, of which status and doctor say that nothing is pending",
    ),
    Mutant(
        "cli/status.py",
        "or (facts.history.owner and facts.missing) or facts.disagreements",
        "or facts.disagreements",
        CLI + " -k older_copy",
        "epochs that Spark has decided and no sink has, and a scheduler's check that passes",
    ),
    Mutant(
        "cli/status.py",
        "failed.stamp is not None and done < failed.stamp.at\n",
        "failed.stamp is not None\n",
        CLI + " -k failed_before_it_took",
        "an alarm about a query that runs, because somebody's start of it once failed",
    ),
    Mutant(
        "spark/query_run.py",
        "                failed_start.forget(files)\n",
        "                pass\n",
        "tests/integration/test_spark_failures.py -k noted_until_one_succeeds",
        "an alarm for ever, because a start failed that was mended",
    ),
    Mutant(
        "spark/exactly_once.py",
        "                    failed_start.note(opened.files, failure, engine.application(session))\n",
        "                    pass\n",
        "tests/integration/test_spark_failures.py -k noted",
        "a start that fails each night, of which status says that all is well",
    ),
    Mutant(
        "cli/accept.py",
        "            raise ledger_is_older(newest, history.newest)\n",
        "            pass\n",
        CLI + " -k older_copy",
        "an older copy of the ledger that an operator calls right, after which the query never starts again",
    ),
    Mutant(
        "protocol/spool.py",
        "--as discard --without-rows; its ",
        "--as discard; its ",
        HINTS + " -k damaged",
        "a way out that is refused as it stands",
    ),
    Mutant(
        "errors.py",
        "        self.message = addresses.complete(self.message)",
        "        pass",
        TYPED + " -k what_is_prepared_holds",
        "the command in a finding of a start, in which CHECKPOINT stands for the folder",
    ),
    Mutant(
        "cli/options.py",
        'replace(place, reference=sinks or "")',
        "place",
        TYPED + " -k rows_became_letters",
        "the command in a warning of `epochsink recover`, in which MODULE:ATTRIBUTE stands for the sinks",
    ),
    Mutant(
        "cli/doctor.py",
        "hint=addresses.complete(line.hint)",
        "hint=line.hint",
        DOCTOR + " -k can_be_typed",
        "the command in a line of the doctor, in which CHECKPOINT stands for the folder",
    ),
    Mutant(
        "spark/connect/query_handle.py",
        "        refused.address(self._addresses)\n",
        "",
        "tests/unit/test_connect.py -k does_not_know",
        "the command in what a query on Spark Connect does not know, in which CHECKPOINT stands for the folder",
    ),
    Mutant(
        "cli/driver_process.py",
        "return began is not None and began > stamp.at + _CLOCK_SECONDS",
        "return False",
        CLI + " -k has_ended",
        "a dead driver that is said to be connected, because another process has its number",
    ),
    Mutant(
        "cli/targets.py",
        "    return replace(remnant, in_use=False) if ended else remnant\n",
        "    return remnant\n",
        LOOKS + " -k has_died",
        "a driver that died seconds ago, and is said to be connected",
    ),
    # ---- what operators declare
    Mutant(
        "cli/resolve.py",
        "            AppliedCheck(self.run).verify(sink, but=self.number)\n",
        "            pass\n",
        CLI + " -k by_word",
        "a target that was set back and gets a newer epoch by word: it looks whole, and the epochs between are lost",
    ),
    Mutant(
        "cli/accept.py",
        "            raise other_input(history.newest)\n",
        "            pass\n",
        "tests/unit/test_consistency.py -k not_all_that_is_lacking",
        "epochs accepted behind one that has other input, whose new rows are in no sink",
    ),
    # ---- the age of what readers wait for
    Mutant(
        "protocol/progress_tracker.py",
        "round(now - min(decided), 3)",
        "round(now - max(decided), 3)",
        PROGRESS,
        "two epochs wait, and the alert sees the age of the newer one",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "            if known.decided is None:\n                known.decided = time.monotonic()",
        "            if True:\n                known.decided = time.monotonic()",
        PROGRESS,
        "each look at the checkpoint makes a late epoch young again: the alert never fires",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "            self._opened.setdefault(number, time.monotonic())\n\n    def closed",
        "            self._opened[number] = time.monotonic()\n\n    def closed",
        PROGRESS,
        "an epoch that Spark calls for again looks young",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "now - at + self._opened_before.get(number, 0.0)",
        "now - at",
        PROGRESS,
        "a query that is restarted every few seconds looks well for ever",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "round(max(ages), 3)",
        "round(min(ages), 3)",
        PROGRESS,
        "the newest epoch's age hides that of the oldest one",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "self._failure = self._failure or failure",
        "self._failure = failure",
        PROGRESS,
        "what followed from the failure is shown in its place",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "        elif late >= LOG_SECONDS:\n",
        "        elif late < 0:\n",
        PROGRESS,
        "a log without a word while readers wait",
    ),
    Mutant(
        "protocol/progress_tracker.py",
        "set_aside=sum(known) if len(known) == len(rows) else None",
        "set_aside=sum(known)",
        PROGRESS,
        "dead letters of an unknown number are shown as fewer than there are",
    ),
    # ---- metrics
    Mutant(
        "metrics.py",
        "lambda query: query.late_seconds",
        "lambda query: query.open_seconds",
        METRICS,
        "an alert about late data at each long epoch, and none where data is late",
    ),
    Mutant(
        "metrics.py",
        "lambda query: bool(query.failure)",
        "lambda query: not query.failure",
        METRICS,
        "a query that has stopped looks well in Prometheus",
    ),
    Mutant(
        "metrics.py",
        "        if self._sinks.setdefault(query, sink) is not sink:",
        "        if self._sinks.setdefault(query, sink) is None:",
        METRICS,
        "the metrics of one query under the name of another",
    ),
    # ---- the command line
    Mutant(
        "cli/app.py",
        "max(current.late_seconds, current.open_seconds) > max_age",
        "current.late_seconds > max_age",
        CLI,
        "a scheduler's check that passes while a target does not answer",
    ),
    Mutant(
        "cli/status.py",
        "late = max((each.age_seconds or 0.0 for each in known if each.state is EpochState.DECIDED), default=0.0)",
        "late = max((each.age_seconds or 0.0 for each in known if each.state is EpochState.RECORDED), default=0.0)",
        CLI,
        "status calls late what Spark has not decided, and not what readers wait for",
    ),
    Mutant(
        "cli/status.py",
        "    since = place.checkpoint.begun_at(min(numbers))",
        "    since = place.checkpoint.begun_at(max(numbers))",
        CLI,
        "status takes the newest epoch for the oldest one: an old one that is stuck looks young",
    ),
    Mutant(
        "cli/doctor.py",
        "return 1 if Health.WRONG in states else ATTENTION if Health.ATTENTION in states else 0",
        "return ATTENTION if Health.WRONG in states or Health.ATTENTION in states else 0",
        DOCTOR,
        "a script starts a pipeline that cannot write an epoch",
    ),
    Mutant(
        "cli/doctor.py",
        "is_well = not (state.damage or state.needs_person) and state.late_seconds < SOON_SECONDS",
        "is_well = not state.damage",
        DOCTOR,
        "the doctor says that all is well while readers wait",
    ),
]
