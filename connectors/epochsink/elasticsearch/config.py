"""Hold the arguments of an Elasticsearch sink, and check them without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal
from urllib.parse import SplitResult, urlsplit

from epochsink import arguments, credentials
from epochsink.errors import ConfigurationError
from epochsink.identity import PREFIX
from epochsink.sink.sql import operand, text_of

SECRETS: Final = frozenset({"api_key", "basic_auth", "bearer_auth", "headers"})
"""Options whose values are never shown."""

OPTIONS: Final = SECRETS | {
    "ca_certs",
    "client_cert",
    "client_key",
    "http_compress",
    "opaque_id",
    "request_timeout",
    "ssl_assert_fingerprint",
    "ssl_assert_hostname",
    "ssl_show_warn",
    "verify_certs",
}
"""Options passed to the vendor's client: those that can be pickled and that versions 8 and 9 share."""

_UNITS: Final = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEAST_GC_DELETES: Final = 60.0
"""Smallest ``gc_deletes`` in seconds, the server's default. A driver checks every
`epochsink.elasticsearch.applied_epochs.LOOK_EVERY` seconds whether it was overtaken: with a shorter time, a delayed
write could restore a deleted document."""
MARKERS: Final = f"{PREFIX}-markers"
"""The index of the sinks' markers."""
_LONGEST_NAME: Final = 255
MOST_INDICES: Final = 100
"""Largest number of indices that one epoch may touch (``index_by``): the record of the epoch names each."""
MOST_AT_ONCE: Final = 16
"""Largest number of bulk requests at once: they hold 40 MB, and what one driver renders keeps no more of them busy."""
_REQUEST_TIMEOUT: Final = 60.0


@dataclass(frozen=True, init=False, repr=False)
class ElasticsearchConfig:
    """The arguments of `epochsink.Elasticsearch`, which documents them. Equal by value, hashable, picklable.

    ``settings`` are those of an index to create, as JSON text; ``options`` are the client's, as sorted pairs.
    """

    hosts: tuple[str, ...]
    index: str
    index_by: str | None
    key: tuple[str, ...]
    order_by: tuple[str, ...]
    delete_when: str | None
    dead_letter_index: str | None
    letters_limit: float
    validate: bool
    refresh: bool
    create: bool
    settings: str
    gc_deletes: str
    partition_by_key: bool
    timeout: float
    allow_insecure: bool
    options: tuple[tuple[str, Any], ...]
    select: tuple[str, ...] = ("*",)
    where: str | None = None
    routing: str | None = None
    pipeline: str | None = None

    product: ClassVar[str] = "Elasticsearch"
    package: ClassVar[str] = "elasticsearch"
    """The vendor's client. The extra has the product's name."""
    secrets: ClassVar[frozenset[str]] = SECRETS
    known_options: ClassVar[frozenset[str]] = OPTIONS
    bulk_bytes: ClassVar[int] = 2_500_000
    """The size of a bulk request in bytes."""
    per_node: ClassVar[int] = 2
    """Number of bulk requests at once for each data node of the cluster."""

    def __init__(
        self,
        hosts: str | Sequence[str],
        *,
        index: str | None = None,
        index_by: str | None = None,
        key: str | Sequence[str] | None = None,
        select: str | Sequence[str] = "*",
        where: str | None = None,
        order_by: str | Sequence[str] | None = None,
        delete_when: str | None = None,
        routing: str | None = None,
        pipeline: str | None = None,
        on_rejected: Literal["stop", "dead_letter"] = "stop",
        dead_letter_index: str | None = None,
        letters_limit: float = 1.0,
        validate: bool = False,
        refresh: bool = False,
        create: bool | Mapping[str, Any] = True,
        gc_deletes: str = "1h",
        partition_by_key: bool = False,
        timeout: float = 120.0,
        allow_insecure: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        arguments.require_package(self.product, self.product.lower(), self.package)
        values = {
            "hosts": arguments.expressions("hosts", hosts),
            "index": "" if index is None else _index_name("index", index),
            "index_by": arguments.optional_text("index_by", index_by),
            "key": arguments.expressions("key", key),
            "select": arguments.expressions("select", select) or ("*",),
            "where": arguments.optional_text("where", where),
            "order_by": arguments.expressions("order_by", order_by),
            "delete_when": arguments.optional_text("delete_when", delete_when),
            "routing": arguments.optional_text("routing", routing),
            "pipeline": arguments.optional_text("pipeline", pipeline),
            "dead_letter_index": None
            if dead_letter_index is None
            else _index_name("dead_letter_index", dead_letter_index),
            "letters_limit": arguments.share("letters_limit", letters_limit),
            "validate": arguments.flag("validate", validate),
            "refresh": arguments.flag("refresh", refresh),
            "create": create is not False,
            "settings": _settings(create),
            "gc_deletes": _gc_deletes(gc_deletes),
            "partition_by_key": arguments.flag("partition_by_key", partition_by_key),
            "timeout": arguments.seconds("timeout", timeout),
            "allow_insecure": arguments.flag("allow_insecure", allow_insecure),
            "options": _options(options or {}, self.known_options, self.secrets),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        arguments.choice("on_rejected", on_rejected, ("stop", "dead_letter"))
        for host in self.hosts:
            self._check_host(host)
        self._check_rows()
        self._check_dead_letters(on_rejected)

    @property
    def client_options(self) -> dict[str, Any]:
        """The options for the vendor's client."""
        given = dict(self.options)
        if "headers" in given:
            given["headers"] = dict(given["headers"])
        return {"request_timeout": _REQUEST_TIMEOUT, **given}

    @property
    def index_settings(self) -> dict[str, Any]:
        """The settings of an index that `check` creates."""
        settings: dict[str, Any] = json.loads(self.settings)
        return settings

    @property
    def shown_hosts(self) -> str:
        """The hosts without credentials."""
        return ", ".join(map(credentials.without_userinfo, self.hosts))

    def __repr__(self) -> str:
        shown = credentials.masked(dict(self.options), self.secrets)
        key = f", key={list(self.key)}" if self.key else ""
        options = f", options={shown}" if shown else ""
        target = f"index={self.index!r}" if self.index else f"index_by={self.index_by!r}"
        return f"{self.product}({self.shown_hosts!r}, {target}{key}{options})"

    def _check_host(self, host: str) -> None:
        credentials.refuse_unencoded("hosts=", host)
        url = _split(host)
        if url is None or url.scheme not in {"http", "https"} or not url.hostname or not _port(url):
            raise ConfigurationError(
                f"the host {credentials.without_userinfo(host)!r} is not a URL with scheme, name and port",
                hint='write it as "https://search.example:9200"',
            )
        secret = bool(url.password or url.username or self.secrets & dict(self.options).keys())
        local = credentials.is_loopback(url.hostname)
        if url.scheme == "http" and secret and not self.allow_insecure and not local:
            raise ConfigurationError(
                f"credentials would be sent unencrypted to {credentials.without_userinfo(host)}",
                hint="use https (ca_certs or ssl_assert_fingerprint in options= for a private certificate), or allow "
                "it with allow_insecure=True",
            )

    def _check_rows(self) -> None:
        if bool(self.index) == bool(self.index_by):
            raise ConfigurationError(
                "give either index= or index_by=",
                hint="index= is the name of one index; index_by= an SQL expression for the name of each row's index, "
                "e.g. index_by=\"concat('orders-', year(day))\"",
            )
        if self.index_by and self.validate:
            raise ConfigurationError(
                "validate=True asks an index before the epoch is decided, and those of index_by= may not exist then",
                hint='leave validate= out, or set documents aside with on_rejected="dead_letter"',
            )
        for name, value in (("delete_when", self.delete_when), ("order_by", self.order_by)):
            if value and not self.key:
                raise ConfigurationError(
                    f"{name}= is given without key=: without a key, rows cannot replace or delete documents",
                    hint=f"give key= (a column, an SQL expression or a list), or leave {name}= out",
                )

        if self.partition_by_key:
            self._check_partitioning()

    @property
    def shown_index(self) -> str:
        """The index, or the expression of the indices, for messages."""
        return self.index or f"index_by={self.index_by}"

    @property
    def placed_by(self) -> str:
        """The arguments that decide where the document of a key is stored; "" if only the key does."""
        given = {"index_by": self.index_by, "routing": self.routing} if self.key else {}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value)

    @property
    def partitioning(self) -> tuple[str, ...]:
        """The expressions over the stream by which ``partition_by_key`` shuffles rows: the texts of the ``_id``."""
        if not self.partition_by_key:
            return ()
        origins = (arguments.origin(self.select, name) or name for name in self.key)
        # Shuffle by text because the _id is made of text: all values with the same text must be in one task.
        return tuple(text_of(operand(each)) for each in origins)

    def _check_partitioning(self) -> None:
        if not self.key or not self.order_by:
            raise ConfigurationError(
                "partition_by_key=True needs key= and order_by=: a shuffle does not keep the order of rows",
                hint="give order_by= (the highest value of a key wins), or leave partition_by_key= out",
            )
        if not arguments.says_all_names(self.select):
            raise ConfigurationError(
                f"partition_by_key=True needs the name of every column, and select= has expressions without one: "
                f"{list(self.select)}",
                hint="write each expression that is more than a name with AS: '... AS name'",
            )

    def _check_dead_letters(self, on_rejected: str) -> None:
        if (on_rejected == "dead_letter") != (self.dead_letter_index is not None):
            raise ConfigurationError(
                f"on_rejected={on_rejected!r} and dead_letter_index={self.dead_letter_index!r} contradict each other",
                hint='give both on_rejected="dead_letter" and dead_letter_index=, or neither',
            )
        if self.dead_letter_index is None and self.letters_limit != 1.0:
            raise ConfigurationError(
                f"letters_limit={self.letters_limit!r} without on_rejected='dead_letter': no row becomes a dead letter",
                hint="give on_rejected='dead_letter' with dead_letter_index=, or leave letters_limit= out",
            )
        if self.dead_letter_index == self.index:
            raise ConfigurationError(
                f"dead_letter_index and index are both {self.index!r}",
                hint="give the dead letters an index of their own",
            )
        if self.dead_letter_index is not None and self.validate:
            raise ConfigurationError(
                "validate=True stops the query at documents that dead_letter_index= would set aside",
                hint="choose one of the two",
            )


def duration_seconds(duration: str) -> float | None:
    """Return the seconds of a duration in Elasticsearch's notation ("60s", "1h", "-1"); None if it is invalid."""
    match = re.fullmatch(r"(-?\d+)(nanos|micros|ms|s|m|h|d)?", duration)
    return None if match is None else int(match[1]) * _UNITS[match[2] or "ms"]


def _gc_deletes(value: str) -> str:
    seconds = duration_seconds(value) if isinstance(value, str) else None
    if seconds is None:
        raise ConfigurationError(
            f"invalid gc_deletes={value!r}: expected a duration", hint='write it as "1h" or "600s"'
        )
    if seconds < LEAST_GC_DELETES:
        raise ConfigurationError(
            f"gc_deletes={value!r} is less than {LEAST_GC_DELETES:g} s: a delayed write could restore a deleted "
            "document before its driver checks whether another driver has taken over",
            hint='give gc_deletes="60s" at least; the default, "1h", tolerates longer driver pauses',
        )
    return value


def _settings(create: bool | Mapping[str, Any]) -> str:  # noqa: FBT001 - as the user wrote it
    if isinstance(create, bool):
        return "{}"
    if not isinstance(create, Mapping):
        raise ConfigurationError(
            f"invalid create={create!r}: expected True, False or the new index's settings",
            hint="for example create={'number_of_shards': 2}",
        )
    try:
        return json.dumps(arguments.mapping("create", create), sort_keys=True)
    except TypeError as error:
        raise ConfigurationError(
            f"create= has a value that is not JSON: {error}", hint="give settings as in the server's API"
        ) from None


def _options(given: Mapping[str, Any], known: frozenset[str], secrets: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    options = arguments.mapping("options", given)
    if unknown := sorted(options.keys() - known):
        raise ConfigurationError(
            f"options= has names that are not supported: {', '.join(unknown)}",
            hint=f"supported are: {', '.join(sorted(known))}",
        )
    return tuple((name, _unchangeable(options[name], secret=name in secrets)) for name in sorted(options))


def _unchangeable(value: Any, *, secret: bool) -> Any:
    """Return an option's value in a hashable form that, if it is secret, does not appear in any text."""
    if isinstance(value, Mapping):
        return tuple((name, _unchangeable(value[name], secret=secret)) for name in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(_unchangeable(each, secret=secret) for each in value)
    return credentials.Secret(value) if secret and isinstance(value, str) else value


def _split(host: str) -> SplitResult | None:
    try:
        return urlsplit(host)
    except ValueError:  # its text may quote a password
        return None


def _port(url: SplitResult) -> int | None:
    try:
        return url.port
    except ValueError:
        return None


NAME_RULE: Final = (
    r'use lower case, none of \ / * ? " < > | , # : or space, not beginning with - _ or +, '
    f"at most {_LONGEST_NAME} bytes"
)


def is_index_name(text: str) -> bool:
    """Return whether a text is a valid name of one index (`NAME_RULE`)."""
    allowed = text == text.lower() and re.fullmatch(r"[^\\/*?\"<>| ,#:\x00-\x1f]+", text)
    return bool(allowed) and text[0] not in "-_+" and text not in {".", ".."} and len(text.encode()) <= _LONGEST_NAME


def _index_name(name: str, value: str) -> str:
    text = arguments.text(name, value)
    if not is_index_name(text):
        raise ConfigurationError(f"invalid {name}={text!r}: this is not a valid name of one index", hint=NAME_RULE)
    return text
