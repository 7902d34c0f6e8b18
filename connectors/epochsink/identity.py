"""The names of epochs in targets, each with its parser and its limits in one place.

Every name begins with `PREFIX` and a digest of (query id, sink name), so that two queries, or two
checkpoints of one query, never touch each other's leftovers, whatever characters a sink's name holds. Names that an
operator may have to end by hand also end in a label, ``pipeline/sink``, for people only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from epochsink.sink import Epoch, Identity, identity_key

PREFIX = "epochsink"
_LABEL = r"[A-Za-z0-9_-]{0,24}/[A-Za-z0-9_-]{1,24}"


def identity_label(identity: Identity) -> str:
    """Return ``pipeline/sink`` for people: at most 49 characters that every target takes."""
    pipeline, sink = (re.sub(r"[^A-Za-z0-9_-]", "_", name)[:24] for name in (identity.pipeline, identity.sink))
    return f"{pipeline}/{sink or '_'}"


def pipeline_name(checkpoint: str) -> str:
    """Return what people call the query of a checkpoint, given as a path or URI: the folder's name."""
    return checkpoint.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PreparedName:
    """The gid of a prepared PostgreSQL transaction: shorter than 200 bytes, unique for each attempt.

    ``part`` tells the transactions of one epoch apart: "all" for the whole epoch's, else a task's uuid. ``label`` is
    that of `identity_label`.
    """

    key: str
    generation: int
    epoch: int
    attempt: str
    part: str = "all"
    label: str = ""

    def __str__(self) -> str:
        end = f":{self.label}" if self.label else ""
        return f"{PREFIX}:{self.key}:{self.generation}:{self.epoch}:{self.attempt}:{self.part}{end}"

    @classmethod
    def of(cls, identity: Identity, epoch: Epoch, part: str) -> Self:
        """Return the name of a sink's transaction of an attempt at an epoch."""
        label = identity_label(identity)
        return cls(identity_key(identity), identity.generation, epoch.number, epoch.attempt, part, label)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that ``text`` is, or None if it is not one of ours."""
        match = re.fullmatch(
            PREFIX + r":([0-9a-f]{20}):(\d+):(\d+):([0-9a-f]{32}):(all|[0-9a-f]{32})(?::(" + _LABEL + "))?", text
        )
        if match is None:
            return None
        key, generation, epoch, attempt, part, label = match.groups()
        return cls(key, int(generation), int(epoch), attempt, part, label or "")

    @staticmethod
    def pattern(key: str) -> str:
        """Return the LIKE pattern of all names of one identity."""
        return f"{PREFIX}:{key}:%"


@dataclass(frozen=True, slots=True)
class TransactionalId:
    """A Kafka transactional id.

    Bounded: later epochs of the same parity reuse it, so that brokers do not accumulate one for each epoch.

    ``nonce`` is set (32 hex) only if no spool could repair a zombie's abort of a recorded transaction. ``label`` is
    that of `identity_label`.
    """

    key: str
    generation: int
    partition: int
    parity: int
    attempt: int
    nonce: str = ""
    label: str = ""

    def __str__(self) -> str:
        end = "".join(f".{part}" for part in (self.nonce, self.label) if part)
        return f"{PREFIX}.{self.key}.g{self.generation}.s{self.partition}.p{self.parity}.a{self.attempt}{end}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that ``text`` is, or None if it is not one of ours."""
        match = re.fullmatch(
            PREFIX + r"\.([0-9a-f]{20})\.g(\d+)\.s(\d+)\.p([01])\.a(\d+)(?:\.([0-9a-f]{32}))?(?:\.(" + _LABEL + "))?",
            text,
        )
        if match is None:
            return None
        key, generation, partition, parity, attempt, nonce, label = match.groups()
        return cls(key, int(generation), int(partition), int(parity), int(attempt), nonce or "", label or "")

    @staticmethod
    def prefix(key: str) -> str:
        """Return the prefix of all transactional ids of one identity: what an ACL has to allow."""
        return f"{PREFIX}.{key}."


def fence_id(key: str) -> str:
    """Return the transactional id that each driver of a Kafka sink initialises at its start, to fence earlier ones."""
    return f"{PREFIX}.{key}.fence"


def letters_identity(identity: Identity) -> Identity:
    """Return the identity under which the dead letters of a sink are written again; no sink has such a name.

    Names made of it are the same for all who retry them: without the pipeline, which is called as its folder is.
    """
    return replace(identity, sink=f"{identity.sink}\x00letters", generation=0, pipeline="")


@dataclass(frozen=True, slots=True)
class FenceHolder:
    """A transactional id that names the holder of a fence: its producer, the time (seconds since 1970) and the host."""

    key: str
    producer_id: int
    producer_epoch: int
    since: int
    process: int
    host: str

    def __str__(self) -> str:
        place = f"{self.producer_id}.{self.producer_epoch}.{self.since}.{self.process}.{self.host}"
        return f"{self.prefix(self.key)}{place}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that ``text`` is, or None if it is not one of these."""
        match = re.fullmatch(PREFIX + r"\.([0-9a-f]{20})\.fence\.(\d+)\.(\d+)\.(\d+)\.(\d+)\.(.*)", text)
        if match is None:
            return None
        key, producer_id, producer_epoch, since, process, host = match.groups()
        return cls(key, int(producer_id), int(producer_epoch), int(since), int(process), host)

    @staticmethod
    def prefix(key: str) -> str:
        """Return the prefix of all these names of one identity."""
        return f"{fence_id(key)}."


def marker_group(key: str, partition: int, parity: int) -> str:
    """Return the Kafka consumer group whose committed offset is a partition's newest epoch, of the even or the odd."""
    return f"{PREFIX}.{key}.marker.{partition}.p{parity}"


def marker_group_prefix(key: str) -> str:
    """Return the prefix of all these groups' names of one identity."""
    return f"{PREFIX}.{key}.marker."


def marker_document(key: str) -> str:
    """Return the ``_id`` of the Elasticsearch document that names the newest epoch applied."""
    return f"{PREFIX}-marker-{key}"


def claim_document(key: str) -> str:
    """Return the ``_id`` of the Elasticsearch document that names the attempt which may be applied."""
    return f"{PREFIX}-claim-{key}"


def document_id_prefix(key: str, epoch: int, attempt: str | None = None) -> str:
    """Return the beginning of the ``_id`` of keyless documents; their position in the spool follows.

    In data streams, documents have no version that would name their writer, so their ``_id`` has the attempt.
    """
    return f"{key}-{epoch}-" if attempt is None else f"{key}-{epoch}-{attempt}-"


def staging_table(key: str, attempt: str) -> str:
    """Return the name of the staging table of one attempt: within PostgreSQL's 63 bytes."""
    return f"s_{key}_{attempt}"


def staging_owner(table: str) -> tuple[str, str] | None:
    """Return (identity key, attempt) of a staging table's name, or None if it is not one of ours."""
    match = re.fullmatch(r"s_([0-9a-f]{20})_([0-9a-f]{32})", table)
    return (match[1], match[2]) if match else None
