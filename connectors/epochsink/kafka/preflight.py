"""Compare the configuration with the cluster before the first row is written.

Each finding is a sentence with the value, the rule and a hint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from kafka.errors import BrokerResponseError

from epochsink.errors import ConfigurationError, PrepareFailed
from epochsink.kafka import client_options, errors, row_mapping, rows_in_log, trial_transaction
from epochsink.kafka.config import KafkaConfig, NewTopic, Rendering
from epochsink.kafka.dead_letter import Rules
from epochsink.kafka.errors import UNKNOWN_TOPIC, Refused, Unreachable
from epochsink.kafka.leaders import Leaders
from epochsink.kafka.server import KafkaServer, Producers
from epochsink.sink import Finding, Identity, only_compares, would

log = logging.getLogger("epochsink.kafka")

_TOPIC_RIGHTS: Final = {
    "WRITE": "the rows cannot be written",
    "READ": "the marker of the newest epoch cannot be added to the transaction, and the brokers do not say whether "
    "they still have the rows",
}

_LETTERS_NEED_LIMITS: Final = "the limits of both topics decide which rows become dead letters"
_DEFAULT_LARGEST_LETTER: Final = 16 << 20
_LARGEST_LETTER: Final = 900 << 20
"""A little below the largest message.max.bytes that librdkafka takes."""


def findings(config: KafkaConfig, cluster: KafkaServer, schema: pa.Schema | None) -> list[str]:
    """Return what does not fit. Creates the topic if the configuration has ``create``, unless it `only_compares`.

    Without ``schema``, the columns are not compared.
    """
    problems = [] if schema is None else _columns(config, schema)
    try:
        # first: the producing client reports wrong credentials or missing rights at once
        problems += trial_transaction.beginning(config) or _version(cluster)
        if not problems:
            cap = transaction_timeout_cap(cluster)
            problems = _transaction_timeout(config, cap)
        if not problems and config.topic is not None:
            problems = _topic(config, cluster, schema, cap)
    except (Unreachable, Refused) as failure:
        problems.append(f"{failure.message}; {failure.hint}")
    return problems


def examine(config: KafkaConfig, cluster: KafkaServer) -> Iterator[Finding]:
    """Yield what an operator wants to know before a start. Raises `Unreachable`, `Refused`."""
    problems = findings(config, cluster, None)
    yield from (Finding("cluster", each, is_fatal=True) for each in problems)
    if problems:
        return
    cap = transaction_timeout_cap(cluster)
    topic = "rows name their topics" if config.topic is None else f"topic {config.topic}"
    yield Finding("cluster", f"{cluster.target}, version {cluster.version()}, {topic}")
    longest = "is not told to this user" if cap is None else f"= {cap:g} s"
    yield Finding("settings", f"transaction.max.timeout.ms {longest}")
    if config.topic is not None:
        ahead = trial_transaction.clock_ahead(config, cluster, config.topic, cap)
        yield Finding.of_clock("the coordinator", ahead)
        done = "begun as a task does, given an offset, and aborted as the driver does; no row was written"
        yield Finding("trial transaction", done)


def transaction_timeout_cap(cluster: KafkaServer) -> float | None:
    """Return the longest transaction timeout (seconds) that the brokers allow; None without the right to ask."""
    setting = cluster.broker_setting("transaction.max.timeout.ms")
    return None if setting is None else int(setting) / 1000


def largest_batch(cluster: KafkaServer, topic: str | None) -> int | None:
    """Return a topic's max.message.bytes; None if the topic does not exist, or without the right to ask."""
    setting = None if topic is None else cluster.topic_settings(topic).get("max.message.bytes")
    return None if setting is None else int(setting)


def _columns(config: KafkaConfig, schema: pa.Schema) -> list[str]:
    for rendering in (config.key, config.value):
        if isinstance(rendering, Rendering) and not only_compares():
            rendering.begin_run()
    try:
        row_mapping.columns(config, "row", schema)
    except ConfigurationError as wrong:
        return [f"{wrong.message}; {wrong.hint}"]
    return []


def _version(cluster: KafkaServer) -> list[str]:
    if cluster.describes_transactions():
        return []
    return [
        f"the brokers (version {cluster.version()}) cannot describe producers and transactions; use Kafka 3.0 or later"
    ]


def _transaction_timeout(config: KafkaConfig, cap: float | None) -> list[str]:
    if cap is not None and (config.transaction_timeout or 0) > cap:
        finding = (
            f"transaction_timeout = {config.transaction_timeout:g} s is above the brokers' "
            f"transaction.max.timeout.ms = {cap * 1000:.0f}; set it to at most {cap:g}, or raise the brokers' setting"
        )
        return [finding]
    # the identity of a sink that joins now
    identity = Identity("", "", origin={} if cap is None else {"transaction_timeout": cap})
    return trial_transaction.settings(config, config.transaction_timeout_ms(identity))


def _topic(config: KafkaConfig, cluster: KafkaServer, schema: pa.Schema | None, cap: float | None) -> list[str]:
    topic = str(config.topic)
    description = _describe(cluster, topic)
    if description["error_code"] == UNKNOWN_TOPIC and config.new_topic is not None:
        if would(f"create topic '{topic}' as {config.new_topic}"):
            return []
        if failure := _create(config.new_topic, cluster, topic, "create="):
            return [failure]
        description = _describe(cluster, topic)
    if description["error_code"] == UNKNOWN_TOPIC:
        return [f"topic '{topic}' does not exist; create it, correct topic=, or set create=True or NewTopic(...)"]
    if description["error_code"] != 0:
        code = int(description["error_code"])
        return [f"topic '{topic}' cannot be described: error code {code}; {errors.hint(code)}"]
    # after the topic was created: before that it has no settings
    settings = cluster.topic_settings(topic)
    if schema is not None:
        log.info("topic %s: rows are kept %s", topic, rows_in_log.where(config, settings, schema))
    problems = _rights(topic, description) + _replicas(topic, description, settings) + _sizes(config, topic, settings)
    return (
        problems
        or (_compaction(config, settings, schema) if schema is not None else [])
        or _witness(cluster, topic)
        or _letters(config, cluster, settings)
        # last: it needs the topic and the rights that were checked before
        or trial_transaction.ending(config, cluster, topic, cap)
    )


def _witness(cluster: KafkaServer, topic: str) -> list[str]:
    """Ask the leaders for their producers, because some brokers do not list the user's rights on a topic."""
    leaders = Leaders(cluster)
    try:
        cluster.until(cluster.deadline(), lambda: leaders.look([topic], leaders.partitions, Producers()))
    except Refused as failure:
        if failure.code not in errors.NOT_AUTHORIZED:
            raise
        return [_no_right("READ", topic)]
    return []


def _describe(cluster: KafkaServer, topic: str) -> dict[str, Any]:
    description: dict[str, Any] = cluster.until(cluster.deadline(), lambda: cluster.describe_topic(topic))
    return description


def rules_of_letters(config: KafkaConfig, cluster: KafkaServer) -> Rules:
    """Return which rows become dead letters as the topics are set now. Raises `PrepareFailed`."""
    limits = []
    for topic in (str(config.topic), str(config.letters_topic)):
        settings = cluster.topic_settings(topic)
        if "max.message.bytes" not in settings:
            raise PrepareFailed(
                f"topic '{topic}' does not exist any more, or its settings may not be read: which rows are too large "
                "is not known",
                hint=f"create it, or grant DESCRIBE_CONFIGS on it, and start again: {_LETTERS_NEED_LIMITS}",
            )
        limits.append((int(settings["max.message.bytes"]), "compact" in settings.get("cleanup.policy", "")))
    (largest_batch, compacted), (largest_letter, _) = limits
    return Rules(
        topic=str(config.letters_topic),
        largest_message=client_options.largest_message(config.options),
        largest_batch=largest_batch,
        largest_letter=min(largest_letter, _LARGEST_LETTER),
        needs_key=compacted or config.key is not None,
    )


def _letters(config: KafkaConfig, cluster: KafkaServer, of_rows: Mapping[str, str]) -> list[str]:
    """Create the topic of dead letters if it does not exist, and return why it cannot take them, or would lose them."""
    topic = config.letters_topic
    if topic is None:
        return []
    if "max.message.bytes" not in of_rows:
        return [
            f"the settings of topic '{config.topic}' may not be read; grant DESCRIBE_CONFIGS: {_LETTERS_NEED_LIMITS}"
        ]
    least = 2 * int(of_rows["max.message.bytes"])
    description = _describe(cluster, topic)
    if description["error_code"] == UNKNOWN_TOPIC:
        replication = config.new_topic.replication if config.new_topic else None
        largest = str(max(least, _DEFAULT_LARGEST_LETTER))
        kept = {"cleanup.policy": "delete", "retention.ms": "-1", "max.message.bytes": largest}
        wanted = NewTopic(replication=replication, config=kept)
        if would(f"create topic '{topic}' as {wanted}"):
            return []
        if failure := _create(wanted, cluster, topic, "dead_letter_topic="):
            return [failure]
        description = _describe(cluster, topic)
    if description["error_code"] != 0:
        code = int(description["error_code"])
        return [f"topic '{topic}' cannot be described: error code {code}; {errors.hint(code)}"]
    settings = cluster.topic_settings(topic)
    problems = _rights(topic, description) + _replicas(topic, description, settings)
    if "max.message.bytes" not in settings:
        problems.append(
            f"the settings of topic '{topic}' may not be read; grant DESCRIBE_CONFIGS: {_LETTERS_NEED_LIMITS}"
        )
    elif int(settings["max.message.bytes"]) < least:
        problems.append(
            f"topic '{topic}' has max.message.bytes = {settings['max.message.bytes']}, and a dead letter may need "
            f"twice what topic '{config.topic}' allows; set it to at least {least}"
        )
    if "compact" in settings.get("cleanup.policy", ""):
        problems.append(
            f"topic '{topic}' has cleanup.policy = {settings['cleanup.policy']}, and dead letters have no key; set "
            "it to delete"
        )
    return problems or _witness(cluster, topic)


def _create(wanted: NewTopic, cluster: KafkaServer, topic: str, argument: str) -> str | None:
    how = {
        "num_partitions": wanted.partitions,
        "replication_factor": -1 if wanted.replication is None else wanted.replication,
        "configs": dict(wanted.config),
    }
    try:
        cluster.create_topic(topic, how)
    except (BrokerResponseError, ValueError) as failure:
        return f"topic '{topic}' could not be created as {wanted}: {failure}; create it by hand or correct {argument}"
    log.info("created topic %s with %d partition(s)", topic, wanted.partitions)
    return None


def _rights(topic: str, description: Mapping[str, Any]) -> list[str]:
    allowed = description.get("authorized_operations")
    if allowed is None:  # the broker does not list the rights
        return []
    return [_no_right(right, topic) for right in _TOPIC_RIGHTS if right not in allowed]


def _no_right(right: str, topic: str) -> str:
    return f"the user has no right to {right} on topic '{topic}': {_TOPIC_RIGHTS[right]}; grant {right} on it"


def _replicas(topic: str, description: Mapping[str, Any], settings: Mapping[str, str]) -> list[str]:
    replicas = min(len(partition["replica_nodes"]) for partition in description["partitions"])
    needed = int(settings.get("min.insync.replicas", 1))
    if needed > replicas:
        finding = (
            f"topic '{topic}' has min.insync.replicas = {needed} and {replicas} replica(s): no row can be "
            "acknowledged; lower min.insync.replicas or add replicas"
        )
        return [finding]
    if needed == 1 and replicas > 1:
        log.warning(
            "topic %s: min.insync.replicas = 1 of %d replicas: an acknowledged epoch may be lost with one broker",
            topic,
            replicas,
        )
    return []


def _sizes(config: KafkaConfig, topic: str, settings: Mapping[str, str]) -> list[str]:
    allowed = settings.get("max.message.bytes")
    setting = config.options.get("message.max.bytes")
    if allowed is None or setting is None or int(setting) <= int(allowed):
        return []
    finding = (
        f"message.max.bytes = {setting} in options is above max.message.bytes = {allowed} of topic '{topic}': the "
        "broker would refuse rows that the client accepts; raise the topic's setting or lower the option"
    )
    return [finding]


def _compaction(config: KafkaConfig, settings: Mapping[str, str], schema: pa.Schema) -> list[str]:
    compacted = "compact" in settings.get("cleanup.policy", "")
    if not compacted or "key" in row_mapping.fields(config, schema):
        return []
    return [
        f"topic '{config.topic}' has cleanup.policy = compact and takes only rows with a key; set key= to an expression"
    ]
