"""The session's Kafka broker, at the level of transaction.version that a file of tests asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from kafka.admin import UpdateFeatureType
from kafka_kit import admin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from epochsink.devkit.services import KafkaService

TRANSACTION_VERSION: Final = "transaction.version"
NEWEST_LEVEL: Final = 2
"""What a broker that is made anew has; one that was upgraded keeps 0 until somebody finalises more."""

at_every_transaction_version = pytest.mark.parametrize(
    "kafka", [NEWEST_LEVEL, 1, 0], indirect=True, ids=lambda level: f"transaction.version={level}"
)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, make_kafka: Callable[..., KafkaService]) -> Iterator[KafkaService]:
    """Return the session's broker, started by the first test that asks. Do not stop it: others use it.

    A level as its parameter makes it anew, once for all tests of a file that have this level.
    """
    with make_kafka() as service:
        lower(service.bootstrap_servers, getattr(request, "param", NEWEST_LEVEL))
        yield service


def lower(servers: str, level: int) -> None:
    """Finalise a level of transaction.version that is not above what the cluster has."""
    with admin(servers) as client:
        if level < client.describe_features()[TRANSACTION_VERSION].get("finalized", (0, 0))[1]:
            answer = client.update_features({TRANSACTION_VERSION: (UpdateFeatureType.SAFE_DOWNGRADE, level)})
            assert answer == {TRANSACTION_VERSION: "OK"}
