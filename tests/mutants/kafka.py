"""Mutants of connectors/epochsink/kafka."""

from __future__ import annotations

from mutants.mutant import Mutant

AVRO = "tests/unit/test_kafka_avro.py"
CLUSTER = "tests/unit/test_kafka_cluster.py"
COMMIT = "tests/unit/test_kafka_commit.py"
DEAD_LETTER = "tests/unit/test_kafka_dead_letter.py"
FENCE = "tests/unit/test_kafka_fence.py"
IN_LOG = "tests/unit/test_kafka_rows_in_log.py"
LETTERS = "tests/integration/test_kafka_letters.py"
LOG_ENDS = "tests/unit/test_kafka_log_ends.py"
MARKERS = "tests/unit/test_kafka_applied_epochs.py"
ORPHANS = "tests/integration/test_kafka_orphans.py"
RECORD_BATCH = "tests/unit/test_kafka_record_batch.py"
REDO = "tests/unit/test_kafka_redo.py"
RETRY = "tests/integration/test_kafka_retry.py"
SWEEP = "tests/unit/test_kafka_sweep.py"
TOPIC_LOG = "tests/unit/test_kafka_topic_log.py"
TRANSACTIONS = "tests/unit/test_kafka_transactions.py"
WITNESS = "tests/unit/test_kafka_witness.py"
WITNESS_LIVE = "tests/integration/test_kafka_witness.py"

MUTANTS: list[Mutant] = [
    # ---- dead letters
    Mutant(
        "kafka/letters.py",
        "                    if end is None or message.offset() >= end:\n",
        "                    if end is None or message.offset() <= end:\n",
        f"{RETRY} -k hides",
        "a letter that is written again because an open transaction hides that it was written",
    ),
    Mutant(
        "kafka/letters.py",
        "letters_id(self._key), timeout_ms,",
        "letters_id(uuid.uuid4().hex), timeout_ms,",
        f"{RETRY} -k asleep",
        "two retries that both commit",
    ),
    Mutant(
        "kafka/dead_letter.py",
        "    if batch_bytes(size, key, value) > rules.largest_batch:\n",
        "    if batch_bytes(size, key, value) > rules.largest_batch + 1:\n",
        DEAD_LETTER,
        "a row that the broker refuses, and that is no letter",
    ),
    Mutant(
        "kafka/dead_letter.py",
        '        sizes = sizes + _header_bytes(batch.column("headers"))\n',
        "        pass\n",
        DEAD_LETTER,
        "a row whose headers make it too large",
    ),
    Mutant(
        "kafka/redo.py",
        "        again = replace(task, settings={} if lost.rules is None else lost.rules.to_json())\n",
        "        again = task\n",
        f"{LETTERS} -k whatever_the_options",
        "letters that a replay sends to the topic, or that stop it",
    ),
    Mutant(
        "kafka/redo.py",
        "        for topic in lost.topics:\n",
        "        for topic in list(lost.topics)[:1]:\n",
        f"{LETTERS} -k taken_from_the_log",
        "letters that are lost when their epoch is prepared again",
    ),
    Mutant(
        "kafka/writer.py",
        "            self._letters += len(found.rows)\n",
        "            self._letters += 1\n",
        f"{LETTERS} -k more_letters_than_the_limit",
        "letters that are not counted",
    ),
    # ---- rows that are prepared again
    Mutant(
        "kafka/topic_log.py",
        "_ALL_REPLICAS: Final = -1\n",
        "_ALL_REPLICAS: Final = 1\n",
        TOPIC_LOG,
        "rows that were prepared again, and are lost with one broker",
    ),
    Mutant(
        "kafka/topic_log.py",
        "if 0 <= at < after:",
        "if at < -1:",
        TOPIC_LOG,
        "a batch that was not appended, and counts as prepared again",
    ),
    Mutant(
        "kafka/topic_log.py",
        "if self.topic_id != topic_id:",
        "if False:",
        TOPIC_LOG,
        "rows that are copied into a topic which does not hold the others any more",
    ),
    Mutant(
        "kafka/redo.py",
        "        if batch.base_sequence != self._next[partition]:\n",
        "        if False:\n",
        REDO,
        "rows that the log holds twice, or a gap in place of them",
    ),
    Mutant(
        "kafka/redo.py",
        "            elif batch.producer_epoch == producer_epoch:\n",
        "            else:\n",
        REDO,
        "rows of an earlier attempt besides those of the lost transaction",
    ),
    Mutant(
        "kafka/redo.py",
        "        if not batch.is_whole:\n",
        "        if False:\n",
        REDO,
        "rows that compaction has removed",
    ),
    Mutant(
        "kafka/redo.py",
        "        if self._found != self._rows:\n",
        "        if False:\n",
        REDO,
        "an epoch without the rows that retention has deleted",
    ),
    Mutant(
        "kafka/redo.py",
        "        if self._found > self._rows:\n",
        "        if False:\n",
        REDO,
        "rows that the lost transaction did not have",
    ),
    Mutant(
        "kafka/redo.py",
        "        if written != lost.rows:\n",
        "        if False:\n",
        REDO,
        "an epoch without the rows that its spool lacks",
    ),
    Mutant(
        "kafka/record_batch.py",
        " and self.records == self.last_offset_delta + 1",
        "",
        RECORD_BATCH,
        "rows that compaction has removed",
    ),
    Mutant(
        "kafka/record_batch.py",
        "        crc ^= _after_zeros(_remainder(changed), len(self.data) - _HEADER.size)\n",
        "        crc ^= _remainder(changed)\n",
        RECORD_BATCH,
        "a lost transaction that no broker takes again: the query is wedged",
    ),
    # ---- what the coordinator answers
    Mutant(
        "kafka/transactions.py",
        '    7: (Answer.AGAIN, "REQUEST_TIMED_OUT"),\n',
        '    7: (Answer.DECIDED, "REQUEST_TIMED_OUT"),\n',
        TRANSACTIONS,
        "a commit that timed out, and counts as done",
    ),
    Mutant(
        "kafka/transactions.py",
        '    51: (Answer.AGAIN, "CONCURRENT_TRANSACTIONS"),\n',
        '    51: (Answer.DECIDED, "CONCURRENT_TRANSACTIONS"),\n',
        TRANSACTIONS,
        "a commit that was not carried out, and counts as done",
    ),
    Mutant(
        "kafka/transactions.py",
        "    if now.state in ENDING or (mine and now.state is State.ONGOING):\n",
        "    if mine and now.state is State.ONGOING:\n",
        TRANSACTIONS,
        "every row of an epoch twice: written again while its commit is under way",
    ),
    Mutant(
        "kafka/transactions.py",
        "        return COMMITTED if mine else None\n",
        "        return COMMITTED\n",
        TRANSACTIONS,
        "a lost epoch that counts as done, because another one has committed under its id",
    ),
    Mutant(
        "kafka/transactions.py",
        "    if marker is None and (marker_may_be_gone or now.state is State.NOT_FOUND):\n",
        "    if False:\n",
        TRANSACTIONS,
        "every row of an epoch twice: written again because its marker has expired",
    ),
    # ---- the look before the commit, and the one after it
    Mutant(
        "kafka/witness.py",
        "    elif not found or (rows - part.rows) % SEQUENCES:\n",
        "    elif not found:\n",
        WITNESS,
        "a commit of a transaction that a partition has lost rows of",
    ),
    Mutant(
        "kafka/witness.py",
        "            if start != _NOT_OPEN and epochs.get(state.producer_id) == state.producer_epoch:\n",
        "            if start != _NOT_OPEN and state.producer_id in epochs:\n",
        WITNESS,
        "a commit on the rows of another use of the transactional id",
    ),
    Mutant(
        "kafka/witness.py",
        "if opened.get(at) != start]:",
        "if at not in opened]:",
        WITNESS,
        "a commit of rows that were aborted, and of what was written after that",
    ),
    Mutant(
        "kafka/witness.py",
        "if at in starts and start < starts[at].offset]:",
        "if False]:",
        WITNESS,
        "a commit of a transaction whose first rows retention has deleted",
    ),
    Mutant(
        "kafka/witness.py",
        "                or batch.base_sequence != 0\n",
        "",
        WITNESS,
        "rows that a partition lost while their task wrote on: any first sequence number is accepted without state",
    ),
    Mutant(
        "kafka/witness.py",
        " or known.leader_epoch != place.leader_epoch",
        "",
        WITNESS,
        "rows that a partition lost while their task wrote on, in a later epoch",
    ),
    Mutant(
        "kafka/committer.py",
        "        if not seen.missing:\n",
        "        if True:\n",
        f"{WITNESS_LIVE} -k however_often",
        "rows that are lost, because a part that one vote refused is taken for whole by the next",
    ),
    Mutant(
        "kafka/witness.py",
        "            if end < now[at].end:\n",
        "            if False:\n",
        WITNESS,
        "a done epoch whose rows an unclean leader election has cut off",
    ),
    Mutant(
        "kafka/witness.py",
        "            if ending.was_aborted:\n",
        "            if False:\n",
        WITNESS,
        "a done epoch whose rows an operator had aborted",
    ),
    Mutant(
        "kafka/witness.py",
        "            if cut := _cut_off(leaders, parts, gone | endings.mixed()):\n",
        "            if cut := _cut_off(leaders, parts, gone):\n",
        WITNESS,
        "a done epoch of which one transaction, prepared again, was cut off",
    ),
    Mutant(
        "kafka/commit.py",
        "self._side_by_side(epoch, [parts[index] for index in seen.whole], deadline)",
        "self._side_by_side(epoch, parts, deadline)",
        COMMIT,
        "a commit of transactions whose topics were created again, when there are 8 or more",
    ),
    Mutant(
        "kafka/commit.py",
        "            ended = not self._ending(epoch, loss.unseen, deadline)\n",
        "            ended = True\n",
        COMMIT,
        "a done epoch of which nobody has looked whether it was aborted before",
    ),
    Mutant(
        "kafka/commit.py",
        "            self._ends.setdefault(transaction, seen.ends)\n",
        "            self._ends[transaction] = seen.ends\n",
        COMMIT,
        "a done epoch whose rows an operator had aborted between two tries of its commit",
    ),
    Mutant(
        "kafka/commit.py",
        "            if loss.words is not None:\n",
        "            if False:\n",
        COMMIT,
        "a done epoch whose rows a partition has lost",
    ),
    Mutant(
        "kafka/commit.py",
        "        if wrong is not None:\n",
        "        if False:\n",
        COMMIT,
        "a done epoch that another driver has written, or that the cluster has lost again",
    ),
    Mutant(
        "kafka/commit.py",
        "            ours = self._markers.marks_of(self._markers.unexpired(this, found))\n",
        "            ours = self._markers.marks_of(this)\n",
        COMMIT,
        "a query that never starts again, because the marker of its last epoch has expired",
    ),
    # ---- markers
    Mutant(
        "kafka/applied_epochs.py",
        "        return DAY_SECONDS if found is None else",
        '        return float("inf") if found is None else',
        MARKERS,
        "a query that does not start again after a day: an expired marker looks like a cluster that was set back",
    ),
    Mutant(
        "kafka/applied_epochs.py",
        "if self._group(done.epoch, part) in found or part.prepared_at > oldest]",
        "if part.prepared_at > oldest]",
        MARKERS,
        "a cluster that was set back, which nobody notices after a day without rows",
    ),
    Mutant(
        "kafka/applied_epochs.py",
        '            raise_for(group.error_code, f"the offsets of group {group.group_id}")\n',
        "            pass\n",
        MARKERS,
        "every row of an epoch twice: a marker that could not be read counts as absent",
    ),
    Mutant(
        "kafka/applied_epochs.py",
        " or mark.epoch > found[group.group_id].epoch:\n",
        ":\n",
        MARKERS,
        "every row of an epoch twice: an older marker under another topic hides the newest one",
    ),
    Mutant(
        "kafka/applied_epochs.py",
        "require_stable=stable",
        "require_stable=False",
        MARKERS,
        "every row of an epoch twice: an old broker shows its marker late",
    ),
    Mutant(
        "kafka/applied_epochs.py",
        "            told += self._ask(groups, settled_in, stable=True)\n",
        "            pass\n",
        MARKERS,
        "every row of an epoch twice: an old broker shows the first marker of a group late",
    ),
    Mutant(
        "kafka/commit.py",
        "        if verdict is None or verdict.outcome is not Outcome.ABORTED:\n",
        "        if True:\n",
        COMMIT,
        "every row of an epoch twice: an old broker shows its marker late",
    ),
    # ---- other drivers
    Mutant(
        "kafka/cluster.py",
        "        if brokers != known:\n",
        "        if False:\n",
        CLUSTER,
        "what a broker coordinates that has joined since: another driver's transactions and markers are not seen",
    ),
    Mutant(
        "kafka/fence.py",
        "(State.PREPARE_COMMIT,), deadline):",
        "(State.ONGOING,), deadline):",
        FENCE,
        "every row of an epoch twice: another driver's commit was under way when the markers were read",
    ),
    Mutant(
        "kafka/fence.py",
        "            if time.monotonic() >= deadline:\n",
        "            if False:\n",
        f"{FENCE} -k does_not_end --timeout 20",
        "a query that waits for a broken broker for ever",
    ),
    Mutant(
        "kafka/fence.py",
        "        self._refuse_newer(deadline)\n        self._taken",
        "        self._taken",
        FENCE,
        "a newer driver that an older copy of the checkpoint stops",
    ),
    Mutant(
        "kafka/fence.py",
        "now.producer_epoch > self._taken.producer_epoch",
        "False",
        FENCE,
        "two drivers on two copies of a checkpoint that both write",
    ),
    Mutant(
        "kafka/fence.py",
        "now.producer_id != self._taken.producer_id or ",
        "",
        FENCE,
        "two drivers on two copies of a checkpoint that both write",
    ),
    Mutant(
        "kafka/sweep.py",
        "for each in ongoing if each not in kept]",
        "for each in ongoing]",
        SWEEP,
        "the rows of an epoch that is decided and not yet committed",
    ),
    Mutant(
        "kafka/sweep.py",
        " and name not in self.busy\n",
        "\n",
        SWEEP,
        "rows that are being prepared again: the query is wedged between the two",
    ),
    Mutant(
        "kafka/sweep.py",
        " and parsed.generation <= self._generation\n",
        "\n",
        SWEEP,
        "the rows of a newer driver, which an older one aborts",
    ),
    Mutant(
        "kafka/sweep.py",
        "        if self._fence.is_lost(described.pop(self._fence.name)):\n",
        "        if described.pop(self._fence.name) is None:\n",
        SWEEP,
        "the rows of the driver that has the fence, which another one aborts",
    ),
    Mutant(
        "kafka/sweep.py",
        "            if each in lost:\n",
        "            if False:\n",
        SWEEP,
        "the rows of a done epoch whose commit the cluster has lost",
    ),
    Mutant(
        "kafka/sweep.py",
        "        self._transactions.fence_off(orphans, deadline)\n",
        "        for each in orphans:\n            self._transactions.end(each, deadline, commit=False)\n",
        f"{ORPHANS} -k living",
        "rows that a living task adds after the end of its transaction: readers wait for good, or they are doubled",
    ),
    Mutant(
        "kafka/transactions.py",
        "                if not _is_left_open(left[name], told):\n",
        "                if True:\n",
        TRANSACTIONS,
        "an orphan that stays open, because its task was just adding a partition",
    ),
    Mutant(
        "kafka/producer.py",
        "            if sent or self._events.unanswered or self._marking:\n",
        "            if sent:\n",
        f"{ORPHANS} -k a_task",
        "rows that a broker reads after the abort of a task: readers wait for good, or they are doubled",
    ),
    Mutant(
        "kafka/redo.py",
        "give_up(transaction, answered=False)",
        "give_up(transaction)",
        f"{ORPHANS} -k copied_late",
        "rows that are copied late into a transaction that was given up: readers wait for good, or they are doubled",
    ),
    # ---- where rows are kept
    Mutant(
        "kafka/rows_in_log.py",
        '    told = settings.get("retention.ms", "0")\n',
        '    told = settings.get("retention.ms", _NO_LIMIT)\n',
        IN_LOG,
        "a lost epoch whose only copy retention has deleted: nobody has asked for how long the topic keeps it",
    ),
    Mutant(
        "kafka/rows_in_log.py",
        '    if settings.get("unclean.leader.election.enable") != "false":\n',
        "    if False:\n",
        IN_LOG,
        "a lost epoch whose only copy an unclean leader election has removed",
    ),
    Mutant(
        "kafka/rows_in_log.py",
        '    if settings.get("cleanup.policy") != "delete":\n',
        '    if settings.get("cleanup.policy") == "compact":\n',
        IN_LOG,
        "a lost epoch whose only copy compaction has thinned out",
    ),
    Mutant(
        "kafka/rows_in_log.py",
        "        if why is not None:\n            raise",
        "        if False:\n            raise",
        LOG_ENDS,
        "an epoch that is recorded without a copy, after its topic has begun to delete rows",
    ),
    Mutant(
        "kafka/rows_in_log.py",
        " or self._noted.attempt != epoch.attempt:",
        ":",
        LOG_ENDS,
        "an epoch whose rows are looked for where those of another attempt begin",
    ),
    # ---- Avro
    Mutant(
        "kafka/avro.py",
        "X'00{number:08X}'",
        "X'{number:08X}'",
        AVRO,
        "messages that no consumer with a schema registry can read",
    ),
    Mutant(
        "kafka/avro.py",
        '    return ["null", kind] if one.nullable else kind\n',
        "    return kind\n",
        AVRO,
        "a null that ends the query, in a column that may hold one",
    ),
    Mutant(
        "kafka/committer.py",
        "        _refuse_shared_marker(parts)\n",
        "",
        "tests/integration/test_kafka_commit.py -k one_slot",
        "a part whose commit the marker of another one proves: lost if it has to be prepared again",
    ),
]
