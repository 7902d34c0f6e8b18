"""Mutants of connectors/epochsink/postgres."""

from __future__ import annotations

from mutants.mutant import Mutant

PLACE = "tests/unit/test_postgres_place.py"
FAILOVER = "tests/integration/test_postgres_failover.py"
EPOCHS = "tests/integration/test_postgres_epochs.py"
SPOOLED = "tests/integration/test_postgres_spooled.py"
MERGING = "tests/integration/test_postgres_merging.py"
CHECK = "tests/integration/test_postgres_check.py"
SHAPE = "tests/integration/test_postgres_shape.py"
OUTCOMES = "tests/integration/test_postgres_outcomes.py"
ORPHANS = "tests/integration/test_postgres_orphans.py"
REJECTS = "tests/integration/test_postgres_rejects.py"
LETTERS = "tests/integration/test_postgres_letters.py"
RETRY = "tests/integration/test_postgres_retry.py"
SET_BACK = "tests/integration/test_postgres_set_back.py"

MUTANTS: list[Mutant] = [
    Mutant(
        "postgres/committer.py",
        "self.writers_read = not self._config.atomic",
        "self.writers_read = False",
        "tests/integration/test_postgres_merging.py -k slow",
        "a row that a later epoch has deleted: its task did not see it yet",
    ),
    # ---- dead letters
    Mutant(
        "postgres/merge.py",
        "    while len(again := _still_refused(connection, left, write)) < len(left):\n        left = again\n",
        "",
        f"{LETTERS} -k later_one",
        "rows set aside that the table would take after the others",
    ),
    Mutant(
        "postgres/merge.py",
        "    for row, error in left:\n        set_aside(_numbered(row), *told(error))\n",
        "",
        f"{LETTERS} -k 'found_and_no_other'",
        "refused rows that are neither in the table nor among the letters",
    ),
    Mutant(
        "postgres/merge.py",
        "    member = replace(member, rows=member.rows - letters.keep(connection, sink, member, _unfit(member)))\n",
        "    member = replace(member, rows=member.rows - 1)\n",
        f"{LETTERS} -k 'no-uuid and prepared'",
        "rows that staging could not hold, without a letter",
    ),
    Mutant(
        "postgres/table.py",
        '            "on_rejected": "dead_letter" if merge.sets_aside else "stop",\n',
        "",
        f"{LETTERS} -k visible_with_their_epoch",
        "a decided epoch that stops the query because its options have changed since",
    ),
    Mutant(
        "postgres/dead_letter.py",
        "                waiting += reversed(halves)\n",
        "                waiting += halves[:1]\n",
        f"{LETTERS} -k 'found_and_no_other'",
        "half of the rows, after a refusal",
    ),
    Mutant(
        "postgres/letters.py",
        '            commit(connection)\n        reach("postgres.letters.committed")\n',
        '            connection.rollback()\n        reach("postgres.letters.committed")\n',
        f"{RETRY} -k corrected_table",
        "a retry that says what it has not done",
    ),
    Mutant(
        "postgres/letters.py",
        "'WITH gone AS (DELETE FROM {letters} WHERE {where} RETURNING id, \"row\") '\n",
        "'WITH gone AS (SELECT id, \"row\" FROM {letters} WHERE {where}) '\n",
        f"{RETRY} -k killed_anywhere",
        "letters that stay after a retry, and are written again by the next one",
    ),
    Mutant(
        "postgres/letters.py",
        '            exact = sql.SQL("{} AND NOT {}").format(mine, inexact)\n',
        "            exact = mine\n",
        f"{RETRY} -k as_it_was_stays",
        "a value that a retry has rounded",
    ),
    Mutant(
        "postgres/dead_letter.py",
        "if name != DELETED or value}",
        "if name != DELETED}",
        f"{RETRY} -k retried_delete",
        "a row that deletes, inserted by a retry",
    ),
    # ---- what a task and the vote copy
    Mutant(
        "postgres/writer.py",
        "        if self._again and not is_new:\n",
        "        if False:\n",
        "tests/integration/test_repair.py -k 'upsert_by_task'",
        "a repair that can never be repeated once it was interrupted",
    ),
    Mutant(
        "postgres/catalog.py",
        "    if target.has_rules and direct:\n",
        "    if False:\n",
        f"{SHAPE} -k 'pass_its_rules_by and before'",
        "rows in a table whose rule sends them elsewhere",
    ),
    Mutant(
        "postgres/writer.py",
        "        require_unchanged(self._connection, self._found.merge, copied=True)\n",
        "        require_unchanged(self._connection, self._found.merge)\n",
        f"{SHAPE} -k 'pass_its_rules_by and under'",
        "rows in a table whose rule sends them elsewhere",
    ),
    Mutant(
        "postgres/writer.py",
        "        if rows != self._copy.sent:\n",
        "        if False:\n",
        f"{REJECTS} -k 'counts_what_the_server_took'",
        "rows that a trigger of the table swallows, without an error",
    ),
    Mutant(
        "postgres/vote.py",
        "        if copy.sent != self._rows.count:\n",
        "        if False:\n",
        f"{SPOOLED} -k 'fewer_rows and append'",
        "an epoch without the rows that the spool has lost",
    ),
    Mutant(
        "postgres/vote.py",
        "        if spooled and staged:\n",
        "        if False:\n",
        f"{SPOOLED} -k only_some_tasks",
        "an epoch without the rows of some tasks",
    ),
    Mutant(
        "postgres/vote.py",
        "        require_unchanged(self._connection, found.merge, copied=True)\n",
        "",
        f"{SPOOLED} -k altered_just_before_the_copy",
        "other numbers than those that were written",
    ),
    Mutant(
        "postgres/staging.py",
        "        connection.execute(lock)\n",
        "",
        f"{SPOOLED} -k comes_late",
        "rows that a late COMMIT adds to those that were staged again: sums count them twice",
    ),
    Mutant(
        "postgres/vote.py",
        "            if not is_new:\n",
        "            if False:\n",
        f"{SPOOLED} -k 'lost_as_the_driver_stages and upsert'",
        "a query that cannot go on after a lost reply: every row is staged twice",
    ),
    Mutant(
        "postgres/vote.py",
        "    if missing:\n",
        "    if False:\n",
        f"{REJECTS} -k a_prepared_task_that_is_gone",
        "an epoch that is recorded without the rows of a transaction that is gone",
    ),
    Mutant(
        "postgres/vote.py",
        "            share.table.mark(connection, epoch)\n",
        "            pass\n",
        f"{OUTCOMES} -k 'an_epoch_that_is_applied_already and prepared'",
        "every row of an epoch twice when an older checkpoint is restored",
    ),
    Mutant(
        "postgres/vote.py",
        "    share.table.refuse_applied(connection, epoch, [])\n",
        "",
        f"{OUTCOMES} -k 'an_epoch_that_is_applied_already and staged'",
        "an epoch that is recorded a second time, and whose outcome nobody can tell",
    ),
    Mutant(
        "postgres/vote.py",
        "            share.table.expect(connection, share.after, share.own)\n        for share",
        "            pass\n        for share",
        f"{SET_BACK} -k 'before_the_vote_in_it and prepared'",
        "epochs on top of a restored table that lacks those before them",
    ),
    Mutant(
        "postgres/vote.py",
        "    seal = prepare_seal(connection, epoch, {table.identity.sink: share})\n",
        "    gid = str(PreparedName.of(table.identity, epoch, WHOLE))\n"
        "    seal = Part(epoch.attempt, {table.identity.sink: empty}, gid, place)\n",
        f"{OUTCOMES} -k of_two_copies",
        "the rows of an epoch twice, by the tasks of two drivers on copies of the checkpoint",
    ),
    Mutant(
        "postgres/commit.py",
        "    if not all(part in left or is_marked for part, is_marked in zip(parts, marked, strict=True)):\n"
        "        return False\n",
        "",
        f"{SET_BACK} -k prepared_beside_its_commit",
        "an epoch that a failover has lost, behind the next one, which is committed again",
    ),
    Mutant(
        "postgres/commit.py",
        "            if sealed.outcome is Outcome.UNKNOWN:\n",
        "            if False:\n",
        f"{OUTCOMES} -k seal_is_another_attempts",
        "rows of tasks whose epoch another attempt has applied",
    ),
    Mutant(
        "postgres/commit.py",
        "            if sealed.outcome is Outcome.ABORTED:\n",
        "            if False:\n",
        f"{OUTCOMES} -k seal_that_is_gone",
        "rows of tasks without the seal that keeps those of another attempt out",
    ),
    Mutant(
        "postgres/committer.py",
        "                shares[name] = Share(table, member, after if after and after.parts else None, own)\n",
        "                shares[name] = Share(table, member, after if after and after.parts else None)\n",
        f"{SET_BACK} -k 'beside_rows_of_an_epoch'",
        "a query that cannot go on after a failover between the commits of an epoch's parts",
    ),
    Mutant(
        "postgres/committer.py",
        "                    if still_prepared(connection, {str(recorded.gid)}):\n",
        "                    if False:\n",
        f"{OUTCOMES} -k seal_that_is_gone",
        "a query that cannot go on: rows that are still prepared are in the way of those that are prepared again",
    ),
    Mutant(
        "postgres/staging.py",
        "        if not self.logged:\n",
        "        if True:\n",
        f"{OUTCOMES} -k rows_that_wait_for_the_decision",
        "a decided epoch whose staged rows a crash of the server takes away",
    ),
    Mutant(
        "postgres/staging.py",
        'sql.SQL("" if self.logged else "UNLOGGED")',
        'sql.SQL("UNLOGGED")',
        f"{OUTCOMES} -k rows_that_wait_for_the_decision",
        "a decided epoch whose staged rows a crash of the server takes away",
    ),
    # ---- the merge
    Mutant(
        "postgres/merge.py",
        "        if merged != member.rows:",
        "        if False:",
        f"{OUTCOMES} -k staged_rows_that_are_gone",
        "an epoch without the rows that its staging table lacks",
    ),
    Mutant(
        "postgres/merge.py",
        "    _expect(member.staging, found, member.rows)\n",
        "",
        f"{SPOOLED} -k 'fewer_rows and upsert'",
        "an epoch without the rows that its staging table lacks",
    ),
    Mutant(
        "postgres/merge.py",
        'sql.SQL("(SELECT {} FROM {} WHERE {}) AS staged").format(\n'
        '        sql.SQL(", ").join(columns), member.staging.quoted, sql.SQL(" AND ").join(conditions)\n',
        'sql.SQL("(SELECT {} FROM {}) AS staged").format(\n'
        '        sql.SQL(", ").join(columns), member.staging.quoted\n',
        f"{EPOCHS} -k that_spark_did_not_accept",
        "rows of a speculative task besides those of the one that Spark accepted",
    ),
    Mutant(
        "postgres/merge.py",
        "        require_unchanged(connection, member.merge)\n",
        "        pass\n",
        f"{SHAPE} -k 'a_column_altered_after_the_decision'",
        "values cast to another type: 2 for 1.75",
    ),
    Mutant(
        "postgres/merge.py",
        "{} DESC NULLS LAST",
        "{} DESC",
        f"{EPOCHS} -k nulls_lose",
        "an older row in place of the newest one of its key",
    ),
    # ---- rows that are compared or combined with the stored ones; columns that are added
    Mutant(
        "postgres/merge.py",
        '        same = sql.SQL("{} AND {}").format(same, _is_not_older(plan.newer_wins, "gone", "old"))\n',
        "        pass\n",
        f"{MERGING} -k delete_by_an_older",
        "a newer row deleted by an older one",
    ),
    Mutant(
        "postgres/merge.py",
        "    if plan.newer_wins:\n        conditions",
        "    if False:\n        conditions",
        f"{MERGING} -k an_older_row_never",
        "a newer row replaced by an older one of a later epoch",
    ),
    Mutant(
        "postgres/merge.py",
        "pg_catalog.record_image_ne(",
        "pg_catalog.record_ne(",
        f"{MERGING} -k leaves_no_dead_tuple",
        "1.00, of which 1.0 stays",
    ),
    Mutant(
        "postgres/merge.py",
        "[*newest, *_ranks(plan)]",
        "_ranks(plan)",
        f"{MERGING} -k decides_within_an_epoch",
        "an older row in place of the newest one of its epoch",
    ),
    Mutant(
        "postgres/combine.py",
        "coalesce({stored} OPERATOR(pg_catalog.+) {new}, {stored}, {new})",
        "{stored} OPERATOR(pg_catalog.+) {new}",
        f"{MERGING} -k nulls_count",
        "a sum that one null takes away",
    ),
    Mutant(
        "postgres/merge.py",
        'if plan.accumulate else [sql.SQL("*")]',
        'if False else [sql.SQL("*")]',
        f"{MERGING} -k nulls_count",
        "a sum without all rows of a key but one",
    ),
    Mutant(
        "postgres/merge.py",
        "{} ASC NULLS FIRST",
        "{} DESC NULLS LAST",
        f"{MERGING} -k folded_by",
        "rows that an expression combines backwards",
    ),
    Mutant(
        "postgres/combine.py",
        "{number} OPERATOR(pg_catalog.=) 1)",
        "false)",
        f"{MERGING} -k folded_by",
        "the first row of a key combined with a null that nobody stored",
    ),
    Mutant(
        "postgres/compared.py",
        "        connection.execute(whole, binary=True)\n",
        "",
        f"{CHECK} -k expression_of",
        "an expression whose parentheses close those of the merge",
    ),
    Mutant(
        "postgres/table.py",
        '            "accumulate": merge.accumulate,\n',
        "",
        f"{MERGING} -k as_it_was_recorded",
        "a sum that is replaced by the rows of one epoch",
    ),
    Mutant(
        "postgres/ddl.py",
        "if field.name.lower() not in known",
        "if field.name not in known",
        f"{CHECK} -k types_never_changed",
        "a second column whose name differs in case",
    ),
    # ---- the commit
    Mutant(
        "postgres/commit.py",
        "            return self._ask_marker(connection, epoch, part, ballots)\n        reach",
        "            return COMMITTED\n        reach",
        f"{OUTCOMES} -k 'what_somebody_rolled_back'",
        "an epoch that is called done, and whose rows were rolled back",
    ),
    Mutant(
        "postgres/commit.py",
        "        if applied_by == part.attempt:\n",
        "        if applied_by is not None:\n",
        f"{OUTCOMES} -k what_another_attempt_applied",
        "an epoch that is called done, although another attempt at it was applied",
    ),
    Mutant(
        "postgres/commit.py",
        "                    marker.insert(connection, epoch.number, WHOLE, part.attempt)\n",
        "",
        f"{OUTCOMES} -k 'a_commit_may_be_repeated and staged'",
        "every row of a staged epoch twice when its commit is repeated",
    ),
    Mutant(
        "postgres/commit.py",
        "                        marker.verify(connection, member.merge.target, after, own)\n",
        "                        pass\n",
        f"{OUTCOMES} -k set_back_between_the_comparison_and_the_merge",
        "epochs on top of a restored table that lacks those before them",
    ),
    Mutant(
        "postgres/commit.py",
        "            with watched(connection, self.server, self.retry_seconds):\n"
        "                commit_prepared(connection, gid)\n",
        "            commit_prepared(connection, gid)\n",
        f"{OUTCOMES} -k freezes_at_the_commit_itself",
        "a query that waits for a frozen server for ever",
    ),
    Mutant(
        "postgres/commit.py",
        "            if is_passing(error) or is_busy(error):\n"
        "                return Verdict(Outcome.UNKNOWN, evidence)\n",
        "            if is_passing(error) or is_busy(error):\n"
        "                return Verdict(Outcome.ABORTED, evidence)\n",
        f"{OUTCOMES} -k a_frozen_server_makes_the_outcome_unknown",
        "every row of an epoch twice after an outage of the server",
    ),
    Mutant(
        "postgres/prepared_transaction.py",
        "    if status != wanted:\n",
        "    if False:\n",
        f"{OUTCOMES} -k a_transaction_that_has_failed",
        "an epoch that is called prepared, and that the server has rolled back",
    ),
    Mutant(
        "postgres/server.py",
        "\"SELECT pg_catalog.set_config('synchronous_commit', 'on', false) \"",
        "\"SELECT pg_catalog.set_config('synchronous_commit', 'off', false) \"",
        f"{OUTCOMES} -k what_is_done_outlives_a_crash",
        "an epoch that is called done, and that a crash of the server takes away",
    ),
    # ---- markers
    Mutant(
        "postgres/applied_epochs.py",
        '"DELETE FROM {} WHERE key = {} AND epoch BETWEEN 0 AND {}").format(\n'
        "            self._table, sql.Literal(self._key), ",
        '"DELETE FROM {} WHERE epoch BETWEEN 0 AND {}").format(\n            self._table, ',
        f"{EPOCHS} -k markers_too_old_to_be_asked_for",
        "the markers of another query, whose epochs are then written again",
    ),
    Mutant(
        "postgres/applied_epochs.py",
        "epoch - KEPT_EPOCHS - 1",
        "epoch",
        f"{EPOCHS} -k old_markers_are_forgotten",
        "the marker of the newest epoch, without which the query does not start again",
    ),
    Mutant(
        "postgres/applied_epochs.py",
        "    PRIMARY KEY (key, epoch, part)\n",
        "    PRIMARY KEY (key, epoch, part, attempt)\n",
        f"{OUTCOMES} -k 'an_epoch_that_is_applied_already and prepared'",
        "every row of an epoch twice when an older checkpoint is restored",
    ),
    # ---- the sweep
    Mutant(
        "postgres/orphans.py",
        "        gids = {part.gid for part in keep}\n",
        "        gids: set[str | None] = set()\n",
        f"{ORPHANS} -k what_is_recorded_stays",
        "the rows of an epoch that is decided and not yet committed",
    ),
    Mutant(
        "postgres/orphans.py",
        "if table not in tables]",
        "]",
        f"{ORPHANS} -k what_is_recorded_stays",
        "the staged rows of an epoch that is decided and not yet committed",
    ),
    Mutant(
        "postgres/orphans.py",
        "if name is None or name.generation > self._generation or not",
        "if name is None or not",
        f"{ORPHANS} -k a_newer_driver_is_left_alone",
        "the rows of a newer driver, which an older one rolls back",
    ),
    Mutant(
        "postgres/orphans.py",
        """        ended = self._end_sessions(lambda name: not any(name.works_for(attempt) for attempt in attempts))
        staging = [table for table in self._staging() if table not in tables]
        of_others = [table for table in staging if (owner := staging_owner(table)) and owner[1] not in attempts]
        return [
            *ended,
            *self._roll_back(self._own | self._shared(of_others), lambda name: str(name) not in gids),
""",
        """        staging = [table for table in self._staging() if table not in tables]
        of_others = [table for table in staging if (owner := staging_owner(table)) and owner[1] not in attempts]
        own = self._own | self._shared(of_others)
        return [
            *self._end_sessions(lambda name: not any(name.works_for(attempt) for attempt in attempts)),
            *self._roll_back(own, lambda name: str(name) not in gids),
""",
        f"{ORPHANS} -k prepares_as_the_sweep_begins",
        "a prepared transaction of a task that has ended, which blocks later epochs and VACUUM",
    ),
    Mutant(
        "postgres/orphans.py",
        " AND n.nspname = %s AND c.relname = ANY (%s)\n",
        " AND (true OR n.nspname = %s AND c.relname = ANY (%s))\n",
        "tests/integration/test_postgres_shared.py -k commits_apart",
        "a recorded epoch that another sink's sweep rolls back: lost without a spool",
    ),
    Mutant(
        "postgres/commit.py",
        "for one in part.members if one in ballots)",
        "for one in part.members)",
        "tests/integration/test_postgres_shared.py -k set_apart",
        "a decided epoch that no start can commit after the sinks were set apart",
    ),
    Mutant(
        "postgres/orphans.py",
        "        if again:\n",
        "        if False:\n",
        f"{SET_BACK} -k a_failover_has_lost",
        "the rows of a done epoch that a failover has made prepared again",
    ),
    Mutant(
        "postgres/sessions.py",
        '        return f"{PREFIX}:{key}:%"\n',
        '        return f"{PREFIX}:%"\n',
        f"{ORPHANS} -k another_query_and_another_sink",
        "a query that ends the sessions of every other one",
    ),
    Mutant(
        "postgres/types.py",
        "    if wider := _rounded(column, receive):\n",
        "    if wider := None:\n",
        f"{REJECTS} -k types_that_cut",
        "a time of day, an interval or an amount of money that the column rounds",
    ),
    Mutant(
        "postgres/types.py",
        '    if len(finer):\n        raise pa.ArrowInvalid(\n            f"{finer[0].as_py()!r} has',
        '    if False:\n        raise pa.ArrowInvalid(\n            f"{finer[0].as_py()!r} has',
        f"{REJECTS} -k times_of_day",
        "a time of day without its last digits",
    ),
    Mutant(
        "postgres/repair.py",
        "            _require_before(participant, epoch, ballots)\n",
        "",
        "tests/integration/test_repair.py -k 'set_back_again and prepared'",
        "an epoch that a second failover takes back under a repair, hidden by the next one's marker",
    ),
    # ---- another server, another table
    Mutant(
        "postgres/place.py",
        "            if is_standby:\n",
        "            if False:\n",
        f"{FAILOVER} -k 'lags and prepared'",
        "rows that are loaded twice, since a standby that lags was taken for an older copy",
    ),
    Mutant(
        "postgres/place.py",
        " or self.oid != recorded.oid:",
        ":",
        PLACE,
        "a database restored from a dump, which is taken for the one that has every epoch",
    ),
    Mutant(
        "postgres/place.py",
        "        if 0 < self.timeline < recorded.timeline:\n",
        "        if False:\n",
        PLACE,
        "epochs in the old primary, which are lost when it is rebuilt",
    ),
    Mutant(
        "postgres/table.py",
        "        if pending is not None and (done is None or done.parts):\n",
        "        if False:\n",
        f"{FAILOVER} -k 'old_primary and prepared'",
        "an epoch in the old primary, which lacks it in the present one",
    ),
    Mutant(
        "postgres/catalog.py",
        "        if target != here:\n",
        "        if False:\n",
        f"{SHAPE} -k 'another_table_of_the_same_name and by-task'",
        "rows in another table, with markers that say that they are in this one",
    ),
    Mutant(
        "postgres/table.py",
        "        return Relation(named.schema or self.schema, named.name)\n",
        "        return named\n",
        f"{SHAPE} -k looks_a_name",
        "rows in another table, with markers that say that they are in this one",
    ),
    Mutant(
        "postgres/committer.py",
        "                if pending is not None:\n"
        "                    # before anything is finished: an old primary may have prepared what the present one has\n"
        "                    table.require_place(connection, done, pending)\n"
        "            try:\n"
        "                with unblocked(connection, self._server, str(table.marker), self._retry_seconds):\n"
        "                    table.require_place(connection, done)\n",
        "            try:\n"
        "                with unblocked(connection, self._server, str(table.marker), self._retry_seconds):\n"
        "                    table.require_place(connection, done, pending)\n",
        f"{FAILOVER} -k still_prepared",
        "a done epoch that is committed on the old primary, which then passes for the present one",
    ),
    Mutant(
        "postgres/table_identity.py",
        " and oid != before.oid:\n",
        " and False:\n",
        f"{SET_BACK} -k restored_on_its_own",
        "a table restored on its own, which lacks the epochs since its backup",
    ),
    Mutant(
        "postgres/catalog.py",
        "    if target.unlogged:\n",
        "    if False:\n",
        f"{SHAPE} -k 'made_unlogged_gets_no_further_epoch'",
        "done epochs that a crash of the server empties the table of",
    ),
]
