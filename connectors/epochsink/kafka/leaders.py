"""Ask the leaders of partitions, with one request to each broker for all partitions that it leads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from epochsink.kafka.errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC
from epochsink.kafka.server import KafkaServer, LeaderRequest, Partition, Question, Topic, raise_for, require_all


class Leaders:
    """The leaders of some topics' partitions, as of the last `look`.

    Every method raises what kafka-python raises. After an error, look again: another broker may be the leader now.
    """

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self.topics: Mapping[str, Topic] = {}

    def look(
        self, names: Collection[str], partitions: Callable[[], Collection[Partition]], *questions: Question
    ) -> list[dict[Partition, Any]]:
        """Find the leaders, and ask about ``partitions``, which may depend on them; return the answers as `ask` does.

        The leaders of an earlier look are asked at the same time, which saves a round trip. If other brokers lead now,
        the questions are asked again.
        """
        self.topics = self._server.topics_known(names)
        # only if all topics are known: `partitions` may need each of them
        wanted = partitions() if len(self.topics) == len(names) else []
        requests = self._requests(wanted, questions)
        topics, answers = self._server.topics_and(names, requests)
        # the answers count only if they come from the current leaders of the same topics
        if topics == self.topics and requests:
            return _by_question(wanted, questions, answers)
        self.topics = topics
        return self.ask(partitions(), *questions)

    def ids(self) -> dict[str, str]:
        """Return the id of each topic that exists, by name."""
        return {name: topic.id for name, topic in self.topics.items()}

    def partitions(self, names: Collection[str] | None = None) -> list[Partition]:
        """Return the partitions of these topics, or of all."""
        topics = sorted(self.topics.keys() if names is None else self.topics.keys() & names)
        return [(name, number) for name in topics for number in sorted(self.topics[name].leaders)]

    def ask(self, partitions: Collection[Partition], *questions: Question) -> list[dict[Partition, Any]]:
        """Return, for each question, the leaders' answers by partition.

        Each leader gets the questions in this order, all before its first answer.
        """
        return _by_question(partitions, questions, self._server.ask_leaders(self._requests(partitions, questions)))

    def ask_each(self, questions: Sequence[tuple[Partition, Question]]) -> list[Any]:
        """Return the answer to each question about one partition. All are sent before the first answer."""
        requests = [LeaderRequest(self._leader(at), question, [at]) for at, question in questions]
        answers = zip(questions, self._server.ask_leaders(requests), strict=True)
        return [_by_question([at], [question], [answer])[0][at] for (at, question), answer in answers]

    def _leader(self, partition: Partition) -> int:
        name, number = partition
        if name not in self.topics:
            raise_for(UNKNOWN_TOPIC, f"topic '{name}'")
        node = self.topics[name].leaders.get(number, -1)
        if node < 0:
            raise_for(LEADER_NOT_AVAILABLE, f"partition {number} of topic '{name}'")
        return node

    def _requests(self, partitions: Iterable[Partition], questions: Sequence[Question]) -> list[LeaderRequest]:
        brokers: dict[int, list[Partition]] = {}
        for partition in partitions:
            brokers.setdefault(self._leader(partition), []).append(partition)
        return [LeaderRequest(node, question, mine) for node, mine in brokers.items() for question in questions]


def _by_question(
    wanted: Collection[Partition], questions: Sequence[Question], answers: Sequence[Mapping[Partition, Any]]
) -> list[dict[Partition, Any]]:
    """Merge the answers to `Leaders._requests`: those of each leader are in the order of the questions."""
    by_question: list[dict[Partition, Any]] = [
        {at: value for answer in answers[index :: len(questions)] for at, value in answer.items()}
        for index in range(len(questions))
    ]
    for values in by_question:
        require_all(wanted, values, "partitions")
    return by_question
