"""Mutants of connectors/epochsink/elasticsearch."""

from __future__ import annotations

from mutants.mutant import Mutant

BULK_BODY = "tests/unit/test_elasticsearch_bulk_body.py"
BULK_REQUEST = "tests/unit/test_elasticsearch_bulk_request.py"
COMMITTABLE = "tests/unit/test_elasticsearch_committable.py"
DEDUPLICATE = "tests/unit/test_elasticsearch_deduplicate.py"
EPOCHS = "tests/unit/test_elasticsearch_epochs.py"
PACE = "tests/unit/test_elasticsearch_pace.py"
PIPELINES = "tests/integration/test_elasticsearch_pipelines.py"
PLACEMENT = "tests/integration/test_elasticsearch_placement.py"
REJECTED = "tests/integration/test_elasticsearch_rejected.py"
RETRY = "tests/integration/test_elasticsearch_retry.py"
STREAMS = "tests/integration/test_elasticsearch_data_stream.py"

MUTANTS: list[Mutant] = [
    # ---- dead letters
    Mutant(
        "elasticsearch/letters.py",
        '        version = self._identity.origin["base"] + epoch\n',
        '        version = self._identity.origin["base"] + epoch + 1\n',
        f"{RETRY} -k never_replaced",
        "a document of a later epoch, replaced by an older one",
    ),
    Mutant(
        "elasticsearch/letters.py",
        'version_type="external_gte"',
        'version_type="external"',
        f"{RETRY} -k 'killed_before or at_once'",
        "letters that count as superseded, because their retry was killed",
    ),
    Mutant(
        "elasticsearch/letters.py",
        '{"filter": [{"term": {"epoch": kept.epoch}}, {"term": {"run": kept.run}}]}',
        '{"filter": [{"term": {"epoch": kept.epoch + 1}}]}',
        f"{RETRY} -k 'read_newest or the_limit'",
        "letters of an epoch that its next start applies, taken for final ones",
    ),
    Mutant(
        "elasticsearch/apply.py",
        "            if self._set_aside > self._config.letters_limit * self._prepared.rows:\n",
        "            if False:\n",
        f"{RETRY} -k the_limit",
        "an index without most of an epoch's rows",
    ),
    Mutant(
        "elasticsearch/deduplicate.py",
        '                told = told.set_column(0, "id", _different(told.column("id"), numbers))\n',
        "",
        f"{REJECTED} -k 'without_a_valid_key'",
        "all rows without a key but one",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "        if unfit > self._config.letters_limit * total:\n",
        "        if False:\n",
        f"{REJECTED} -k 'before_the_decision'",
        "an epoch that is recorded, and could be stopped in time",
    ),
    # ---- bulk requests
    Mutant(
        "elasticsearch/errors.py",
        "Meaning.PASSING if status >= _SERVER_ERROR else Meaning.REFUSED)",
        "Meaning.DOCUMENT if status >= _SERVER_ERROR else Meaning.REFUSED)",
        f"{BULK_REQUEST} -k fail_in_passing",
        "documents that a busy server answered 503, and that count as refused for good",
    ),
    Mutant(
        "elasticsearch/errors.py",
        "    429: Meaning.PASSING,\n",
        "    429: Meaning.DOCUMENT,\n",
        f"{BULK_REQUEST} -k only_the_overloaded",
        "documents that an overloaded server answered 429, and that count as refused for good",
    ),
    Mutant(
        "elasticsearch/bulk_request.py",
        "                passing.append(position)\n",
        "                continue\n",
        f"{BULK_REQUEST} -k 'only_the_overloaded or fail_in_passing'",
        "documents that a busy server answered 503, and that nobody sends again",
    ),
    Mutant(
        "elasticsearch/bulk_request.py",
        "                refusals.append(_refusal(request.operation(position), answer))\n",
        "                continue\n",
        f"{BULK_REQUEST} -k refused_documents_come_back",
        "documents that the server refuses, and that nobody misses",
    ),
    Mutant(
        "elasticsearch/bulk_request.py",
        "            return self.post(first) + self.post(second)\n",
        "            return self.post(first)\n",
        f"{BULK_REQUEST} -k sent_in_halves",
        "the second half of a request that is too large",
    ),
    Mutant(
        "elasticsearch/bulk_request.py",
        "    return isinstance(error, _NothingSucceeded) or is_passing(error)\n",
        "    return is_passing(error)\n",
        f"{BULK_REQUEST} -k asked_again",
        "a query that stops as soon as the server is busy",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        "return Request(self.data, self.offsets[: end + 1]), Request(self.data, self.offsets[end:])",
        "return Request(self.data, self.offsets[:end]), Request(self.data, self.offsets[end:])",
        f"{BULK_BODY} -k cutting",
        "the last document of each request",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        "    if waiting:\n        yield joined(waiting)\n",
        "",
        f"{BULK_BODY} -k small_requests",
        "the last documents of an epoch of many small tasks",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        "ids = position_ids(self.prefix, self.seen, count)",
        "ids = position_ids(self.prefix, 0, count)",
        f"{EPOCHS} -k id_of_its_own",
        "rows without a key that overwrite others of their task",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        "epoch.number, attempt)}{partition}-",
        "epoch.number, attempt)}-",
        f"{EPOCHS} -k id_of_its_own",
        "rows without a key that overwrite those of another task",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        'version=self._version, version_type="external_gte")',
        'version=self._version, version_type="external")',
        f"{EPOCHS} -k same_versions",
        "an epoch applied again whose documents get versions of their own, and may win over later ones",
    ),
    Mutant(
        "elasticsearch/bulk_body.py",
        '        self._version = identity.origin["base"] + epoch.number\n',
        '        self._version = identity.origin["base"]\n',
        f"{EPOCHS} -k same_versions",
        "documents that a late request of an earlier epoch sets back",
    ),
    # ---- the rows of the spool
    Mutant(
        "elasticsearch/apply.py",
        "        if not self._verified_on_executors():\n            rows.verify()\n",
        "        self._verified_on_executors()\n",
        f"{EPOCHS} -k damaged_spool",
        "a part of an epoch that nobody can take back, because the rest of its spool is damaged",
    ),
    Mutant(
        "elasticsearch/apply.py",
        "        if counted != self._prepared.rows:\n",
        "        if False:\n",
        f"{EPOCHS} -k fewer_rows_than_are_recorded",
        "an epoch without the rows that its spool lacks",
    ),
    Mutant(
        "elasticsearch/apply.py",
        "        if not self._prepared.replaced:\n",
        "        if True:\n",
        f"{EPOCHS} -k id_is_sent_once",
        "an older row in place of the newest one of its key",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "        if set(tasks) != set(expected):\n",
        "        if False:\n",
        f"{EPOCHS} -k fails_the_vote",
        "an epoch without the rows of some tasks",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "        if counted != total:\n",
        "        if False:\n",
        f"{EPOCHS} -k fails_the_vote",
        "an epoch that is recorded, and that can never be applied",
    ),
    Mutant(
        "elasticsearch/deduplicate.py",
        "    if across:\n",
        "    if False:\n",
        f"{DEDUPLICATE} -k 'refused'",
        "an older row of a key in place of the newest one, by chance",
    ),
    Mutant(
        "elasticsearch/deduplicate.py",
        'for name in (*keys, "number")]',
        "for name in keys]",
        f"{DEDUPLICATE} -k 'within_a_task or equal_ranks or plain_loop'",
        "an older row of a key in place of the newest one",
    ),
    Mutant(
        "elasticsearch/deduplicate.py",
        'kept = last(pa.Table.from_batches(kept), "id", "task").to_batches()',
        'kept = last(pa.Table.from_batches(kept), "id").to_batches()',
        f"{DEDUPLICATE} -k many_rows_of_one_id_in_two_tasks",
        "an older row of a key in place of the newest one, in large epochs",
    ),
    # ---- documents of others
    Mutant(
        "elasticsearch/changed_elsewhere.py",
        "            if not keyed:\n",
        "            if False:\n",
        f"{EPOCHS} -k stays_changed",
        "changes that somebody has made to documents without a key",
    ),
    Mutant(
        "elasticsearch/changed_elsewhere.py",
        "if stored.get(each.id, 0) >= end]:",
        "if stored.get(each.id, 0) < 0]:",
        f"{EPOCHS} -k another_sink",
        "documents of another sink",
    ),
    Mutant(
        "elasticsearch/apply.py",
        "            others += self._changed_elsewhere.overwrite(conflicts, keyed=self._keyed)\n",
        "            pass\n",
        f"{EPOCHS} -k changed_elsewhere",
        "rows that are dropped, because their documents were changed elsewhere",
    ),
    # ---- markers and claims
    Mutant(
        "elasticsearch/committer.py",
        "    if kept.epoch == epoch.number and kept.attempt != epoch.attempt:\n",
        "    if False:\n",
        f"{EPOCHS} -k another_attempt_applied",
        "an epoch that is called done, although another attempt at it was applied",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "        if (claim.epoch, claim.attempt) == (epoch.number, epoch.attempt):\n",
        "        if claim.epoch == epoch.number:\n",
        f"{EPOCHS} -k another_attempt_has_claimed",
        "the documents of two attempts at an epoch, mixed",
    ),
    Mutant(
        "elasticsearch/applied_epochs.py",
        "        if known is not None and known.epoch >= epoch.number:\n",
        "        if known is not None and known.epoch > epoch.number:\n",
        f"{EPOCHS} -k another_attempt_has_claimed",
        "the documents of two attempts at an epoch, mixed",
    ),
    Mutant(
        "elasticsearch/applied_epochs.py",
        "        **_only_over(after.place if after else None),\n",
        "",
        f"{EPOCHS} -k marker_that_changes",
        "the marker of a later epoch, set back: that epoch is written again",
    ),
    Mutant(
        "elasticsearch/applied_epochs.py",
        '        if error_type(error) == "index_not_found_exception" or _is_absent(error.body):\n',
        "        if True:\n",
        f"{EPOCHS} -k not_the_servers",
        "an applied epoch that a proxy's error makes look like one that is not applied",
    ),
    Mutant(
        "elasticsearch/applied_epochs.py",
        "        if kept is not None and kept.epoch >= self._epoch.number:\n",
        "        if kept is not None and kept.epoch > self._epoch.number:\n",
        f"{EPOCHS} -k overtaken",
        "documents that a delayed driver restores after they were deleted",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "_JUST_READ_SECONDS: Final = 0.05\n",
        "_JUST_READ_SECONDS: Final = 3600.0\n",
        f"{EPOCHS} -k read_again",
        "documents of an applied epoch that are sent once more, over those of later ones",
    ),
    Mutant(
        "elasticsearch/committer.py",
        "        if kept is not None and kept.epoch >= epoch.number:\n",
        "        if kept is not None and kept.epoch > epoch.number:\n",
        f"{EPOCHS} -k stops_the_vote",
        "an epoch that is recorded a second time when an older checkpoint is restored",
    ),
    Mutant(
        "elasticsearch/committable.py",
        "    if version != VERSION:\n",
        "    if False:\n",
        COMMITTABLE,
        "an epoch of another version of epochsink, misread",
    ),
    # ---- the index
    Mutant(
        "elasticsearch/target_index.py",
        "    elif kept is not None and (found.uuid, found.history) != (kept.index_uuid, kept.history):\n",
        "    elif False:\n",
        f"{EPOCHS} -k takes_no_further_epoch",
        "epochs in an index that was created again and lacks those before them",
    ),
    Mutant(
        "elasticsearch/apply.py",
        "            if (before.incarnation, before.stored_in(pipeline)) == "
        "(after.incarnation, after.stored_in(pipeline)):\n",
        "            if True:\n",
        f"{EPOCHS} -k during_the_run",
        "the documents of an epoch whose index was created again while it was applied",
    ),
    Mutant(
        "elasticsearch/index_settings.py",
        'settings.get("index.translog.durability", "request").lower() == "async"',
        "False",
        f"{EPOCHS} -k asynchronous",
        "documents that a crash of the server takes away after they were acknowledged",
    ),
    Mutant(
        "elasticsearch/index_settings.py",
        "(duration_seconds(deletes) or 0) < (duration_seconds(config.gc_deletes) or 0)",
        "False",
        f"{EPOCHS} -k forgetful",
        "deleted documents that a delayed write restores",
    ),
    Mutant(
        "elasticsearch/connection.py",
        '    if shards["failed"] or shards["successful"] < primaries:\n',
        '    if shards["failed"]:\n',
        f"{EPOCHS} -k leaves_out_a_shard",
        "dead letters, or claims of another sink, that a search does not find",
    ),
    # ---- places, pipelines, pace
    Mutant(
        "elasticsearch/bulk_body.py",
        '    return {name: fields[name] for name in ("_index", "routing") if name in fields}\n',
        '    return {name: fields[name] for name in ("_index",) if name in fields}\n',
        f"{PLACEMENT} -k documents_of_a_routing",
        "a document in two shards, since it was written over without its routing",
    ),
    Mutant(
        "elasticsearch/target_index.py",
        "    if kept is not None and kept.placed_by != placed_by:\n",
        "    if False:\n",
        f"{PLACEMENT} -k rendered_again",
        "documents of a key in two places, after routing= was changed",
    ),
    Mutant(
        "elasticsearch/target_index.py",
        "        if kept is not None and found.get(name) != incarnation:\n",
        "        if False:\n",
        f"{PLACEMENT} -k that_was_set_back",
        "the rows of an index that was deleted and created again",
    ),
    Mutant(
        "elasticsearch/pipelines.py",
        '    return answer.get("result") == "noop" or stored',
        "    return False and stored",
        f"{PIPELINES} -k takes_elsewhere_stops",
        "documents that a pipeline drops or sends elsewhere",
    ),
    Mutant(
        "elasticsearch/pace.py",
        "                self._share = max(_LEAST_SHARE, self._share * _FALL)\n",
        "                pass\n",
        PACE,
        "an epoch that an overloaded server never takes",
    ),
    # ---- data streams
    Mutant(
        "elasticsearch/apply.py",
        "        if isinstance(self._found, Stream) and len(self._found.backing) > 1:\n",
        "        if False:\n",
        f"{STREAMS} -k before_a_rollover",
        "documents that are appended a second time, since an _id is unique in one backing index only",
    ),
    Mutant(
        "elasticsearch/data_stream.py",
        "            if not second:\n",
        "            if True:\n",
        f"{STREAMS} -k before_any_request",
        "documents twice, whose request was sent again after a rollover",
    ),
    Mutant(
        "elasticsearch/data_stream.py",
        "            for index in self._stream.backing:\n",
        "            for index in [self._stream.written]:\n",
        f"{STREAMS} -k before_a_rollover",
        "documents that are looked for in the newest backing index only",
    ),
    Mutant(
        "elasticsearch/data_stream.py",
        "        if elsewhere := sorted(self._reached - stream.backing.keys()):\n",
        "        if elsewhere := []:\n",
        f"{STREAMS} -k is_no_success",
        "documents that a pipeline has sent to another index",
    ),
    Mutant(
        "elasticsearch/data_stream.py",
        '            if answer.get("failure_store") == "used":\n',
        "            if False:\n",
        f"{STREAMS} -k is_no_success",
        "documents that the server has put into its failure store",
    ),
    Mutant(
        "identity.py",
        'if attempt is None else f"{key}-{epoch}-{attempt}-"',
        'if attempt is None else f"{key}-{epoch}-"',
        f"{STREAMS} -k another_attempt",
        "rows of an attempt in whose place another one's count as stored",
    ),
    Mutant(
        "elasticsearch/letters.py",
        "if each.id not in stored]))\n",
        "if each.id]))\n",
        f"{STREAMS} -k broke_off_before_a_rollover",
        "a retry that appends to the new backing index what the old one has",
    ),
    Mutant(
        "elasticsearch/letters.py",
        "            if stream.incarnation == before.incarnation:\n",
        "            if True:\n",
        f"{STREAMS} -k overtake_deletes",
        "copies that a slow retry has made after a rollover",
    ),
]
