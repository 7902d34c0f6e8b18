"""SASL and TLS reach both clients, rights are checked, and no secret shows anywhere."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fix_kafka import KEY_PASSWORD
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, KafkaAdminClient, ResourcePattern
from kafka.admin import ResourceType as Kind
from kafka_kit import Reader, abort, commit, epoch, identity, prepare, rows, task, vote
from waiting import wait_until

from epochsink.errors import PrepareFailed
from epochsink.kafka import Kafka, NewTopic, preflight
from epochsink.kafka.applied_epochs import DAY_SECONDS
from epochsink.kafka.client_options import for_kafka_python, normalise
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.errors import Refused
from epochsink.sink import COMMITTED, Keeping
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from epochsink_devkit.services import KafkaService

SECRETS = {user: f"canary-{user}-s3cr3t" for user in ("admin", "writer", "stranger")}
MECHANISM = "PLAIN"
TOPIC = "guarded"
HANDSHAKE_FAILURE = bytes.fromhex("15030300020228")


@pytest.fixture(scope="module")
def guarded(make_kafka: Callable[..., KafkaService], certificates: Path) -> Iterator[KafkaService]:
    """Start a broker that takes SASL over TLS only, wants a client's certificate, and has an authorizer."""
    users = " ".join(f'user_{user}="{password}"' for user, password in SECRETS.items())
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    settings = {
        "listeners": "SASL_SSL://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": "SASL_SSL://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL",
        "inter.broker.listener.name": "SASL_SSL",
        "sasl.enabled.mechanisms": MECHANISM,
        "sasl.mechanism.inter.broker.protocol": MECHANISM,
        "listener.name.sasl_ssl.plain.sasl.jaas.config": (
            f'{login} required username="admin" password="{SECRETS["admin"]}" {users};'
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates / "keystore.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates / "authority.pem"),
        "ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin;User:ANONYMOUS",
    }
    with make_kafka(settings) as service:
        with_admin(service, certificates, allow_writer)
        yield service


def options(certificates: Path, user: str = "writer", **changed: Any) -> dict[str, Any]:
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": MECHANISM,
        "sasl.username": user,
        "sasl.password": SECRETS[user],
        "ssl.ca.location": str(certificates / "authority.pem"),
        "ssl.certificate.location": str(certificates / "client.pem"),
        "ssl.key.location": str(certificates / "client.encrypted.key"),
        "ssl.key.password": KEY_PASSWORD,
    }
    return given | {name.replace("_", "."): value for name, value in changed.items()}


def with_admin(service: KafkaService, certificates: Path, act: Callable[[KafkaAdminClient], None]) -> None:
    known = normalise(options(certificates, "admin"), service.bootstrap_servers, allow_insecure=False)
    client = KafkaAdminClient(bootstrap_servers=service.bootstrap_servers, **for_kafka_python(known))
    try:
        act(client)
    finally:
        client.close()


def documented_rights() -> list[tuple[str, ACLOperation, ResourcePattern]]:
    """Read the commands that docs/how-to/for-kafka-operators.md gives to an operator."""
    page = (Path(__file__).parents[2] / "docs/how-to/for-kafka-operators.md").read_text()
    kinds = {
        "topic": Kind.TOPIC,
        "transactional-id": Kind.TRANSACTIONAL_ID,
        "group": Kind.GROUP,
        "cluster": Kind.CLUSTER,
    }
    rights = []
    for command in re.findall(r"^    kafka-acls.sh (.*)", page, re.MULTILINE):
        given = re.findall(r"--([a-z-]+) (\w[\w:.-]*)", command.replace("--cluster", "--cluster kafka-cluster"))
        values = dict(given)
        (kind,) = kinds.keys() & values.keys()
        pattern = ACLResourcePatternType[values.get("resource-pattern-type", "literal").upper()]
        resource = ResourcePattern(kinds[kind], values[kind].replace("orders", TOPIC), pattern)
        user = values["allow-principal"].removeprefix("User:")
        rights += [(user, ACLOperation[value.upper()], resource) for name, value in given if name == "operation"]
    assert len(rights) == 5
    return rights


def is_of_cluster(right: tuple[str, ACLOperation, ResourcePattern]) -> bool:
    """Whether a right is the one for ends that a coordinator has left out, which nobody has from the beginning."""
    return right[2].resource_type is Kind.CLUSTER


def allow_writer(client: KafkaAdminClient) -> None:
    """Give the user "writer" what the documentation asks for, and "stranger" only the right to see the topic."""
    client.create_topics({TOPIC: {"num_partitions": 2, "replication_factor": 1}}, wait_for_metadata=True)
    literal = ACLResourcePatternType.LITERAL
    stranger = ("stranger", ACLOperation.DESCRIBE, ResourcePattern(Kind.TOPIC, TOPIC, literal))
    rights = [*(right for right in documented_rights() if not is_of_cluster(right)), stranger]
    for user, operation, resource in rights:
        client.create_acls([ACL(f"User:{user}", "*", operation, ACLPermissionType.ALLOW, resource)])


@pytest.fixture
def committer_for() -> Iterator[Callable[[Kafka], OneSink]]:
    made: list[OneSink] = []

    def make(config: Kafka) -> OneSink:
        made.append(OneSink.of(config, "topic"))
        made[-1].open(identity())
        return made[-1]

    yield make
    for committer in made:
        committer.close()


SCHEMA = rows("a").schema


def test_an_epoch_passes_through_sasl_over_tls_with_the_documented_rights(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=30, options=options(certificates))
    committer = committer_for(config)
    who, at = identity(), epoch(0)
    committer.open(who)
    assert committer.check(SCHEMA) == []
    part = prepare(config, task(who, at), rows("a", "b"))
    orphan = prepare(config, task(who, at, partition=1), rows("orphan"))
    [part] = vote(committer, at, part)
    assert len(committer.abort_orphans([part])) == 1
    assert commit(committer, at, part) == COMMITTED
    assert committer.newest() == 0
    assert commit(committer, at, orphan) != COMMITTED
    with Reader(guarded.bootstrap_servers, TOPIC, **options(certificates, "admin")) as reader:
        reader.until(2)
        assert reader.values() == ["a", "b"]


def test_an_end_that_a_coordinator_has_left_out_is_written_with_the_documented_right_alone(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    """The other rights are without ALTER on the cluster, nor may the user see the topic of the groups' offsets."""
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=30, options=options(certificates))
    who, at = identity(), epoch(0)
    committer = committer_for(config)
    committer.open(who)
    [part] = vote(committer, at, prepare(config, task(who, at), rows("a")))
    commits, parts = committer.participant._commits, [KafkaCommittable.from_json(part)]
    deadline = committer.participant._cluster.deadline()
    opened = commits._witness.left_open(parts, deadline)

    why: list[str] = []

    def is_written() -> bool:
        try:
            commits._witness.write_ends(opened, deadline)
        except Refused as refusal:
            why.append(str(refusal))
            return False
        return True

    assert not is_written()
    assert "ClusterAuthorization" in why[0]
    assert commits._markers_left_open(parts, deadline) == {}
    [(user, operation, resource)] = filter(is_of_cluster, documented_rights())
    right = [ACL(f"User:{user}", "*", operation, ACLPermissionType.ALLOW, resource)]
    with_admin(guarded, certificates, lambda client: client.create_acls(right))
    try:
        wait_until(is_written, "the right is known")
    finally:
        with_admin(guarded, certificates, lambda client: client.delete_acls(right))
    assert commits._witness.left_open(parts, deadline) == {}
    abort(committer, part)


def test_settings_that_the_user_may_not_see_speak_for_a_copy_and_for_markers_that_expire(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    """The documented rights are without DESCRIBE_CONFIGS: what is kept for ever must not be assumed."""
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=30, options=options(certificates))
    committer = committer_for(config)
    assert committer.join().origin == {}
    assert committer.begin(epoch(0), SCHEMA).keeping is Keeping.IN_SPOOL
    assert committer.participant._markers.retention() == DAY_SECONDS


def test_a_refused_password_is_named_at_once_by_both_clients(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    wrong = options(certificates, sasl_password="canary-wrong-s3cr3t")
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=30, options=wrong)
    began = time.monotonic()
    with pytest.raises(PrepareFailed) as raised:
        prepare(config, task(identity(), epoch(0)), rows("a"))
    assert "sasl.password" in str(raised.value)
    [finding] = committer_for(config).check(SCHEMA)
    assert "uthentication" in finding
    assert "sasl.password" in finding
    assert "s3cr3t" not in f"{raised.value!r} {raised.value} {finding}"
    assert time.monotonic() - began < 25


def test_a_broker_that_cannot_be_verified_gets_no_password(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    wrong = options(certificates, ssl_ca_location=str(certificates / "stranger.pem"))
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=5, options=wrong)
    with pytest.raises(PrepareFailed, match=r"ssl\.ca\.location"):
        prepare(config, task(identity(), epoch(0)), rows("a"))
    [finding] = committer_for(config).check(SCHEMA)
    assert "certificates" in finding


@contextmanager
def cutting_handshakes() -> Iterator[str]:
    """Yield the address of a listener that answers handshakes with TLS's alert, as a broker does that is going down."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.recv(65_536)
                    connection.sendall(HANDSHAKE_FAILURE)
                    connection.close()

        cutter = threading.Thread(target=cut)
        cutter.start()
        host, port = server.getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            cutter.join()


def test_a_broker_that_cuts_a_handshake_short_fails_no_task_while_another_one_answers(
    guarded: KafkaService, certificates: Path
) -> None:
    with cutting_handshakes() as restarting:
        config = Kafka(
            bootstrap_servers=f"{restarting},{guarded.bootstrap_servers}",
            topic=TOPIC,
            timeout=30,
            options=options(certificates),
        )
        for _ in range(4):
            part = prepare(config, task(identity(), epoch(0)), rows("a"))
            assert part["producer_id"] >= 0


def test_missing_rights_are_named_before_any_row_moves(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    config = Kafka(
        bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=10, options=options(certificates, "stranger")
    )
    [finding] = committer_for(config).check(SCHEMA)
    assert "transactional ids with the prefix 'epochsink.'" in finding
    with pytest.raises(PrepareFailed, match="transactional ids with the prefix"):
        prepare(config, task(identity(), epoch(0)), rows("a"))


def test_missing_rights_on_topic_and_groups_are_named(
    guarded: KafkaService,
    certificates: Path,
    committer_for: Callable[[Kafka], OneSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without READ, no partition tells whether it has an epoch's rows; that is seen by asking one, too."""

    def allow(client: KafkaAdminClient) -> None:
        ids = ResourcePattern(Kind.TRANSACTIONAL_ID, "epochsink.", ACLResourcePatternType.PREFIXED)
        client.create_acls([ACL("User:stranger", "*", ACLOperation.WRITE, ACLPermissionType.ALLOW, ids)])

    config = Kafka(
        bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=10, options=options(certificates, "stranger")
    )
    with_admin(guarded, certificates, allow)
    found = "\n".join(committer_for(config).check(SCHEMA))
    assert f"no right to WRITE on topic '{TOPIC}'" in found
    assert f"no right to READ on topic '{TOPIC}'" in found
    monkeypatch.setattr(preflight, "_rights", lambda *_: [])  # as of brokers that do not tell
    [finding] = committer_for(config).check(SCHEMA)
    assert f"no right to READ on topic '{TOPIC}'" in finding
    assert "do not say whether they still have the rows" in finding
    with pytest.raises(PrepareFailed, match="allow the user WRITE"):
        prepare(config, task(identity(), epoch(0)), rows("a"))


def test_a_topic_that_may_not_be_created_is_a_finding(
    guarded: KafkaService, certificates: Path, committer_for: Callable[[Kafka], OneSink]
) -> None:
    config = Kafka(
        bootstrap_servers=guarded.bootstrap_servers,
        topic="not-there",
        timeout=10,
        options=options(certificates),
        create=NewTopic(),
    )
    found = committer_for(config).check(SCHEMA)
    assert len(found) == 1
    assert "'not-there'" in found[0]


def test_no_secret_shows_in_logs_reprs_or_what_is_recorded(
    guarded: KafkaService,
    certificates: Path,
    committer_for: Callable[[Kafka], OneSink],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("", "kafka"):
        caplog.set_level(logging.DEBUG, name)
    config = Kafka(bootstrap_servers=guarded.bootstrap_servers, topic=TOPIC, timeout=30, options=options(certificates))
    config = pickle.loads(pickle.dumps(config))  # noqa: S301 - as it crosses to the executors
    committer = committer_for(config)
    committer.check(SCHEMA)
    part = prepare(config, task(identity(), epoch(0)), rows("a"))
    abort(committer, part)
    printed = "".join(capfd.readouterr())
    shown = f"{config} {config!r} {config.options} {part} {committer.join().origin} {caplog.text} {printed}"
    assert "SaslHandshakeRequest" in caplog.text, "the log is deep enough to have shown it"
    assert "s3cr3t" not in shown
    assert config.options["sasl.password"] == SECRETS["writer"], "and yet it crosses"
