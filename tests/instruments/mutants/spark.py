"""Mutants of connectors/epochsink/spark that tests without a JVM notice."""

from mutants.mutant import Mutant

ATTEMPTS = "tests/unit/test_query_run.py -k 'attempt or store or recorded'"
EPOCH_WRITER = "tests/unit/test_epoch_writer.py"
COMMIT_THREAD = "tests/unit/test_commit_thread.py"
CONNECT_RECOVERY = "tests/unit/test_connect_recovery.py"
QUERY_RUN = "tests/unit/test_query_run.py -k 'call or disputed'"
RETRIED_READS = "tests/unit/test_retried_reads.py"
STORE_OPTIONS = "tests/unit/test_object_storage.py -k settings"
PLACEMENT = "tests/unit/test_placement.py"
SETTINGS = "tests/integration/test_session_settings.py"
WRITE_TASK = "tests/unit/test_write_task.py"

MUTANTS: list[Mutant] = [
    Mutant(
        "spark/write_task.py",
        "        acknowledge_at_once()\n",
        "",
        WRITE_TASK,
        "a task whose rows come 40 ms later",
    ),
    Mutant(
        "spark/worker_process.py",
        "            set_option(int(file.name), socket.IPPROTO_TCP, option, ctypes.byref(yes), ctypes.sizeof(yes))\n",
        "            pass\n",
        "tests/unit/test_worker_process.py",
        "a task whose rows come 40 ms later",
    ),
    Mutant(
        "spark/write_task.py",
        "chosen = column.drop_null() if column.null_count else column",
        "chosen = column",
        f"{WRITE_TASK} -k that_where_leaves_over",
        "rows that where= has left out, written as rows of nulls",
    ),
    Mutant(
        "spark/write_task.py",
        "                share.spool.write(rows)\n",
        "                pass\n",
        WRITE_TASK,
        "rows that are in no spool when the target has lost them",
    ),
    Mutant(
        "spark/write_task.py",
        "self._uuid = uuid.uuid4().hex",
        "self._uuid = order.epoch.attempt",
        WRITE_TASK,
        "a losing task whose rows are taken for those of the accepted one: they come twice",
    ),
    Mutant(
        "spark/write_task.py",
        "            task.abort()\n",
        "",
        WRITE_TASK,
        "what a failed task has prepared keeps readers waiting",
    ),
    Mutant(
        "spark/write_task.py",
        "spooled = spooling.result()",
        "spooled = {}",
        WRITE_TASK,
        "rows that the disk did not take, and a record that says nothing of it",
    ),
    Mutant(
        "spark/epoch_attempts.py",
        "        if settled is Plan.RUN_FOR_STATE:",
        "        if False:",
        ATTEMPTS,
        "rows of a recorded epoch that are written again",
    ),
    Mutant(
        "spark/epoch_attempts.py",
        "        self._recording = True\n",
        "",
        ATTEMPTS,
        "another attempt beside a record that may have been written: rows come twice",
    ),
    Mutant(
        "spark/epoch_attempts.py",
        "attempts=1 if once else ATTEMPTS",
        "attempts=ATTEMPTS",
        ATTEMPTS,
        "rows of one attempt beside the state of another",
    ),
    Mutant(
        "spark/epoch_attempts.py",
        "            self._coordinator.abandon(epoch)\n            raise",
        "            raise",
        ATTEMPTS,
        "what a failed attempt has prepared stays, and no sweep may end it",
    ),
    Mutant(
        "spark/epoch_attempts.py",
        "if not (passing or unread) or not query.goes_on():",
        "if not (passing or unread):",
        ATTEMPTS,
        "a query that writes on after its commits have failed",
    ),
    Mutant(
        "spark/query_run.py",
        "            if number == self._called:",
        "            if False:",
        QUERY_RUN,
        "the rows of a second call in an epoch are in no sink",
    ),
    Mutant(
        "spark/query_run.py",
        "            self._coordinator.fail(mistake)\n",
        "",
        QUERY_RUN,
        "a record that lacks the rows of a second call, committed",
    ),
    Mutant(
        "spark/query_run.py",
        "if unrecorded := self._dispute(number):",
        'if unrecorded := "":',
        QUERY_RUN,
        "a record that lacks the rows of a second call, committed by the next start",
    ),
    Mutant(
        "spark/epoch_writer.py",
        "for answer in sorted(answers, key=lambda answer: answer.partition):",
        "for answer in answers:",
        EPOCH_WRITER,
        "rows of one key in another order than that of the input",
    ),
    Mutant(
        "spark/epoch_writer.py",
        "            self._carry_limit.forget()\n",
        "",
        EPOCH_WRITER,
        "an epoch whose answers are too much for the driver, in every attempt",
    ),
    Mutant(
        "spark/retried_reads.py",
        ' and "Interrupt" not in str(failure)',
        "",
        RETRIED_READS,
        "a query that does not stop when it is told to",
    ),
    Mutant(
        "spark/query_handle.py",
        "        if is_committing():\n",
        "        if False:\n",
        COMMIT_THREAD + " -k stopped_by",
        "a query that its function for the progress stops, and that never ends",
    ),
    Mutant(
        "spark/connect/recovery.py",
        "history.owner.driver.startswith(self.start)",
        'history.owner.driver == ""',
        CONNECT_RECOVERY,
        "a query on Spark Connect that ends without its last epoch, which waits for the next start",
    ),
    Mutant(
        "spark/connect/recovery.py",
        "if ended and (history.owner is None or history.owner.driver.startswith(self.start)):",
        "if ended:",
        CONNECT_RECOVERY,
        "the driver of another run, fenced by a query that has ended",
    ),
    Mutant(
        "spark/store_options.py",
        'return setting(f"fs.s3a.bucket.{bucket}.{name}") or setting(f"fs.s3a.{name}")',
        'return setting(f"fs.s3a.{name}")',
        STORE_OPTIONS,
        "a query that cannot start, or writes rows to another store, where a bucket has settings of its own",
    ),
    Mutant(
        "spark/running_query.py",
        "        if is_of_store(failure):\n",
        "        if False:\n",
        "tests/unit/test_query_run.py -k full_disk",
        "a full disk that ends the query with a bare OSError, of which nobody knows what it means for the rows",
    ),
    # ---- where rows of a key are stored
    Mutant(
        "spark/placement.py",
        'return before.text != "." and each.name in _FUNCTIONS',
        'return each.name != "rand"',
        PLACEMENT,
        "a document of one key in two indices: the function asks the clock",
    ),
    Mutant(
        "spark/placement.py",
        "and not _OF_THE_MOMENT.fullmatch(each.value)",
        "",
        PLACEMENT,
        "a document of one key in two indices: the constant was read from the clock",
    ),
    Mutant(
        "spark/query_plan.py",
        " or texts_as_times(frame, expression)",
        "",
        "tests/integration/test_elasticsearch_placement.py -k follows_from_the_key",
        "a document of one key in two indices: the text that Spark has computed is a day of the clock",
    ),
    Mutant(
        "spark/placement.py",
        'loose and ("timestamp" in times or not any(',
        "loose and (not any(",
        "tests/integration/test_spark_compat.py -k of_the_clock",
        "a document of one key in two indices: a text column has a time alone, which is today's",
    ),
    # ---- SQL in any session
    Mutant(
        "sink/sql.py",
        """        return f"CAST(X'{text.encode().hex()}' AS STRING)"
    return _constant""",
        """        return "'" + text.replace("'", "\\\\'") + "'"
    return _constant""",
        f"{SETTINGS} -k escapes",
        "instants with a backslash in them, in a session whose literals have no escapes",
    ),
    Mutant(
        "sink/sql.py",
        """    return f"{struct}[{_constant(name)}]"
""",
        """    return f"{struct}.{quoted(name)}"
""",
        f"{SETTINGS} -k names",
        "columns that are regular expressions in a session with quotedRegexColumnNames",
    ),
    Mutant(
        "sink/sql.py",
        'f"TRY_CAST({expression} AS STRING)"',
        'f"CAST({expression} AS STRING)"',
        f"{SETTINGS} -k 'same_values and ANSI'",
        "keys and ids that are 0E-18 in a session without ANSI, and 0.000000000000000000 in others",
    ),
    Mutant(
        "sink/sql.py",
        "IF({expression} IS NULL, NULL, {refused})",
        "NULL",
        f"{SETTINGS} -k 'out_of_range and ANSI'",
        "rows in another partition than they name, and with another time",
    ),
    Mutant(
        "kafka/row_mapping.py",
        '"timestamp": "TIMESTAMP_LTZ"',
        '"timestamp": "TIMESTAMP"',
        f"{SETTINGS} -k 'no and zone'",
        "times of records that are hours off in a session whose TIMESTAMP has no zone",
    ),
]
