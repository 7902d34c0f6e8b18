"""The vote: is every accepted task's transaction open, with all of its rows? If not, they are written again."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Final, NamedTuple

from epochsink.errors import LogIncomplete, PrepareFailed
from epochsink.kafka.end_txn import State
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.log_redo import produce_again
from epochsink.kafka.write_again import write_again
from epochsink.sink import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import KafkaCommittable
    from epochsink.kafka.config import KafkaConfig
    from epochsink.kafka.fence import Fence
    from epochsink.kafka.transactions import Transactions
    from epochsink.kafka.witness import Witness
    from epochsink.sink import Epoch, Identity, Rows

log = logging.getLogger("epochsink.kafka")

_TURNS: Final = 3
"""How often the vote writes lost parts again, before the epoch is taken for too large."""


class Polls(NamedTuple):
    """Whom the vote asks, and for whom."""

    config: KafkaConfig
    cluster: Cluster
    transactions: Transactions
    witness: Witness
    identity: Identity
    fence: Fence


def vote(polls: Polls, epoch: Epoch, parts: Sequence[KafkaCommittable], rows: Rows) -> list[KafkaCommittable]:
    """Return parts whose transactions were all open in one and the same moment. Raises `PrepareFailed`, `Fenced`.

    A transaction may be lost before the vote: the epoch took longer than the transaction timeout, another attempt at
    the task has used its id, or a topic was created anew. Where its rows are kept they are written again, into a
    transaction that may stay open for as long as the brokers allow.
    """
    found = list(parts)
    for turn in range(_TURNS + 1):
        # all of them in every turn: one may have expired while another was written again
        lost, whole = _asked(polls, epoch, found)
        if not lost:
            return [whole[index] for index in range(len(found))]
        if turn == _TURNS or not polls.config.is_redone:
            break
        log.info("epoch %d: %d of %d transaction(s) are written again: %s", epoch.number, len(lost), len(found), lost)
        for index in lost:
            part = found[index]
            found[index] = _again(polls, Task(polls.identity, epoch, part.partition, uuid.uuid4().hex), part, rows)
    raise PrepareFailed(
        f"epoch {epoch.number}: {next(iter(lost.values()))}",
        hint="nothing is lost, and Spark runs the epoch again; if the write took longer than transaction_timeout=, "
        "raise that, or make epochs smaller (maxOffsetsPerTrigger, maxFilesPerTrigger)",
    )


def _again(polls: Polls, task: Task, part: KafkaCommittable, rows: Rows) -> KafkaCommittable:
    if not part.kept_in_topic:
        return write_again(polls.config, task, part, rows)
    try:
        return produce_again(polls.config, polls.cluster, task, part)
    except LogIncomplete as gone:
        raise PrepareFailed(gone.message, hint="nothing is recorded yet: Spark runs the epoch again") from gone


def _asked(
    polls: Polls, epoch: Epoch, parts: Sequence[KafkaCommittable]
) -> tuple[dict[int, str], Mapping[int, KafkaCommittable]]:
    """Return why parts cannot be committed, and the others with their places, by their index."""
    deadline = polls.cluster.deadline()
    try:
        # together: that costs no request, and the fence has to be seen after the last part was prepared
        wanted = [*(part.transaction.transactional_id for part in parts), polls.fence.name]
        now = polls.transactions.describe(wanted, deadline)
        polls.fence.verify(now[polls.fence.name], deadline)
        # after the transactions: what is created anew after this is found by the commit
        seen = polls.witness.look(parts, (), deadline)
    except (Unreachable, Refused) as failure:
        raise PrepareFailed(
            f"epoch {epoch.number}: the brokers could not be asked for its transactions: {failure}",
            hint="Spark runs the epoch again",
        ) from failure
    lost = {}
    for index, part in enumerate(parts):
        name, producer_id, producer_epoch = part.transaction
        told = now[name]
        if told.state is not State.ONGOING or not told.is_of(part.transaction):
            lost[index] = (
                f"transaction {name}, prepared by producer {producer_id} in epoch {producer_epoch}, is now "
                f"{told.state.value} (producer {told.producer_id}, epoch {told.producer_epoch})"
            )
        elif recreated := part.recreated(seen.topics):
            lost[index] = f"topic(s) {', '.join(recreated)} were deleted while rows were written to them"
        elif index in seen.missing:
            lost[index] = seen.missing[index]
    return lost, seen.whole
