"""Produce orders into the topic while pipelines run and are killed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # it is public

from epochsink.errors import ServiceError
from epochsink_devkit.demo.reader import Background

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

PARTITIONS: Final = 2
CHUNK: Final = 500
"""Number of orders between two checks of how many are allowed by now."""
LOOK_SECONDS: Final = 0.02
FLUSH_SECONDS: Final = 30.0
_ERRORS_ONLY: Final = 3
_FIRST_ORDER_SECONDS: Final = 1_760_000_000


def make_topic(bootstrap_servers: str, topic: str) -> None:
    """Create the topic of orders."""
    # A variable, because otherwise the client would be deleted before the answer arrives.
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": _ERRORS_ONLY})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()


class Orders(Background):
    """Produces the orders 0 to ``total`` - 1, in order. ``allowed`` returns how many may exist by now."""

    def __init__(self, bootstrap_servers: str, topic: str, total: int, allowed: Callable[[], int], seed: int) -> None:
        super().__init__("orders")
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": _ERRORS_ONLY,
            }
        )
        self._topic = topic
        self._total = total
        self._allowed = allowed
        self._random = Random(seed)  # noqa: S311 - made-up orders
        self._refused: KafkaError | None = None
        self.produced = 0

    def step(self) -> float | None:
        """Produce more orders, up to the allowed number."""
        if self.produced == self._total:
            return None
        upto = min(self.produced + CHUNK, self._total)
        if self._allowed() < upto:
            return LOOK_SECONDS
        self._produce(upto)
        return 0.0

    def end(self) -> None:
        """Stop producing, and disconnect."""
        super().end()
        del self._producer

    def _produce(self, upto: int) -> None:
        for order in range(self.produced, upto):
            self._producer.produce(self._topic, self._order(order), on_delivery=self._delivered)
        if self._producer.flush(FLUSH_SECONDS):
            raise ServiceError(f"Kafka did not accept orders within {FLUSH_SECONDS:.0f} s")
        if self._refused is not None:
            raise ServiceError(f"Kafka refused an order: {self._refused}")
        self.produced = upto

    def _order(self, order: int) -> str:
        customer, amount = f"customer {self._random.randrange(10_000)}", self._random.randrange(100, 100_000) / 100
        placed_at = _FIRST_ORDER_SECONDS + order // 100
        return f'{{"order_id":{order},"customer":"{customer}","amount":{amount},"placed_at":{placed_at}}}'

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        self._refused = error or self._refused
