"""The session's Kafka broker, at the level of transaction.version that a file of tests asks for, and certificates."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

import pytest
from kafka.admin import UpdateFeatureType
from kafka_kit import admin, sink_on_new_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink.kafka import Kafka
    from epochsink_devkit.services import KafkaService

KEY_PASSWORD: Final = "canary-key-s3cr3t"
"""Of the client's key."""

TRANSACTION_VERSION: Final = "transaction.version"
NEWEST_LEVEL: Final = 2
"""What a broker that is made anew has; one that was upgraded keeps 0 until somebody finalises more.

On an older Kafka that does not know this level: the newest that it knows, 0 before the feature existed.
"""

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


@pytest.fixture
def topic_sink(kafka: KafkaService, fresh_topic: FreshName) -> Kafka:
    """Return a sink that writes to a new topic of the session's broker."""
    return sink_on_new_topic(kafka.bootstrap_servers, fresh_topic())


def lower(servers: str, level: int) -> None:
    """Finalise a level of transaction.version that is not above what the cluster has; an older Kafka knows fewer."""
    with admin(servers) as client:
        feature = client.describe_features().get(TRANSACTION_VERSION, {})
        if feature.get("supported", (0, 0))[1] < level < NEWEST_LEVEL:
            pytest.skip(f"this Kafka has no level {level} of {TRANSACTION_VERSION}")
        if level < feature.get("finalized", (0, 0))[1]:
            answer = client.update_features({TRANSACTION_VERSION: (UpdateFeatureType.SAFE_DOWNGRADE, level)})
            assert answer == {TRANSACTION_VERSION: "OK"}


def knows_newest_level(servers: str) -> bool:
    """Return whether brokers are new enough for the newest level of transaction.version."""
    with admin(servers) as client:
        supported: tuple[int, int] = client.describe_features().get(TRANSACTION_VERSION, {}).get("supported", (0, 0))
        return supported[1] >= NEWEST_LEVEL


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, the broker's certificate, a client's with an encrypted key, and a stranger's authority."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S607 - the PATH's

    for name in ("authority", "stranger"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("broker", "client"):
        openssl("req", "-newkey", "rsa:2048", "-noenc", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "authority.pem", "-CAkey", "authority.key", "-days", "2",
                "-CAcreateserial", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    openssl("pkcs8", "-topk8", "-in", "client.key", "-passout", f"pass:{KEY_PASSWORD}", "-out", "client.encrypted.key")
    (folder / "keystore.pem").write_text((folder / "broker.key").read_text() + (folder / "broker.pem").read_text())
    return folder
