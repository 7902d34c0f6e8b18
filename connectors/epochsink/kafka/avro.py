"""Render rows as Avro with the id of their schema before them, as consumers with a schema registry expect them.

A message is the byte 0, the schema's id in four bytes, and the Avro body. Spark's `to_avro` makes the body in the JVM;
the id is looked up once for each schema, and is a constant in the SQL.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import pyarrow as pa

from epochsink import arguments
from epochsink.credentials import is_loopback, refuse_unencoded, without_userinfo
from epochsink.errors import ConfigurationError
from epochsink.sink import only_compares, would
from epochsink.sink.sql import field_of, literal

log = logging.getLogger("epochsink.kafka")

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRETS: Final = frozenset({"basic.auth.user.info", "bearer.auth.token", "bearer.auth.client.secret"})
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_PLAIN: Final = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_int8(kind) or pa.types.is_int16(kind) or pa.types.is_int32(kind), "int"),
    (pa.types.is_int64, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "string"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
)


@arguments.checked_names
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Avro:
    """The value or the key of a Kafka message in Avro, with its schema in a schema registry.

    The schema follows from the columns: a nullable column becomes a union with null, whose default is null. A schema
    that the subject has is used; any other one is registered, if the subject's compatibility allows it.

    Args:
        registry: the registry's URL, with the API of Confluent's registry below it.
        subject: the subject, usually the topic's name with '-value' or '-key'.
        columns: a list of columns makes a record of these; the name of one column, its bare value; None, all columns.
        name: the record's name, with its namespace; None for the subject's name without '-value' or '-key'.
        options: settings of the registry's client in confluent-kafka's names, e.g. {"basic.auth.user.info": "u:p"}.

    Raises ConfigurationError.
    """

    registry: str
    subject: str
    columns: str | Sequence[str] | None = None
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for url in re.split(",(?=https?://)", arguments.text("registry", self.registry)):
            refuse_unencoded("registry=", url)
        arguments.text("subject", self.subject)
        arguments.optional_text("name", self.name)
        object.__setattr__(self, "options", arguments.mapping("options", self.options))
        if self.columns is not None and not isinstance(self.columns, str):
            object.__setattr__(self, "columns", arguments.expressions("columns", self.columns))
        wrong = [part for part in self._record.split(".") if not _NAME.fullmatch(part)]
        if wrong:
            raise ConfigurationError(
                f"invalid name={self._record!r}: {wrong[0]!r} is not a name in Avro",
                hint="letters, digits and _, with dots between the parts, for example name='com.example.Order'",
            )

    def __repr__(self) -> str:
        # without the options, which may have passwords
        return f"Avro(registry={without_userinfo(self.registry)!r}, subject={self.subject!r})"

    @property
    def _record(self) -> str:
        """The name of the record of a row."""
        if self.name is not None:
            return self.name
        plain = re.sub(r"\W", "_", re.sub(r"-(key|value)$", "", self.subject), flags=re.ASCII)
        return plain if _NAME.fullmatch(plain) else f"_{plain}"

    def refuse_readable_password(self) -> None:
        """Raise ConfigurationError if a password would be sent unencrypted."""
        scheme, _, rest = self.registry.partition("://")
        host = re.sub(r"(:\d+)?(/.*)?$", "", rest.rpartition("@")[2])
        if scheme != "https" and not is_loopback(host) and ("@" in rest or not _SECRETS.isdisjoint(self.options)):
            raise ConfigurationError(
                f"the password for the schema registry {without_userinfo(self.registry)} would be sent unencrypted",
                hint="use https://, or allow_insecure=True if nobody else can read this network",
            )

    def begin_run(self) -> None:
        """Forget what the registry has answered: it may have been set back or replaced since the run before."""
        for key in [key for key in _ids if key[:2] == (self.registry, self.subject)]:
            del _ids[key]

    def sql(self, row: str, schema: pa.Schema) -> str:
        """Return the SQL of the message's bytes; the first call of a run for a schema asks the registry.

        ``row`` names the struct with the fields of ``schema``. Raises ConfigurationError.
        """
        wanted = (self.columns,) if isinstance(self.columns, str) else self.columns or tuple(schema.names)
        if missing := [name for name in wanted if name not in schema.names]:
            raise ConfigurationError(
                f"{self!r}: the rows have no column {', '.join(map(repr, missing))}",
                hint=f"name one of {', '.join(schema.names)}, or add it with select=",
            )
        if isinstance(self.columns, str):
            # a null renders as null, and so as no key or as a tombstone
            value, said = field_of(row, self.columns), _type(schema.field(self.columns).type, self.columns)
        else:
            parts = ", ".join(f"{literal(name)}, {field_of(row, name)}" for name in wanted)
            value = f"named_struct({parts})"
            said = _record(self._record, "", [schema.field(name) for name in wanted])
        text = json.dumps(said)
        key = (self.registry, self.subject, text)
        if only_compares():
            # asked anew, as a start does; the plan does not depend on the number
            number = _schema_id(self, text)
        else:
            if key not in _ids:
                _ids[key] = _schema_id(self, text)
            number = _ids[key]
        # the framing of Confluent's serializers: a zero byte, the schema's id in four, then the Avro
        # of bytes alone, concat makes a text if spark.sql.function.concatBinaryAsString is on
        return f"CAST(concat(X'00{number:08X}', to_avro({value}, {literal(text)})) AS BINARY)"


def _record(name: str, where: str, fields: Sequence[pa.Field]) -> dict[str, Any]:
    """Return the schema of a record. ``where`` names the column that it is in."""
    rendered = []
    for one in fields:
        if not _NAME.fullmatch(one.name):
            raise ConfigurationError(
                f"column '{where}{one.name}' cannot be written as Avro: its name is not a name in Avro",
                hint="rename it in select= to letters, digits and _",
            )
        kind = _nullable(one, f"{where}{one.name}", f"{name}.{one.name}")
        rendered.append({"name": one.name, "type": kind, **({"default": None} if one.nullable else {})})
    return {"type": "record", "name": name, "fields": rendered}


def _nullable(one: pa.Field, where: str, name: str) -> Any:
    kind = _type(one.type, where, name)
    return ["null", kind] if one.nullable else kind


def _type(kind: pa.DataType, where: str, name: str = "key") -> Any:
    """Return the Avro type that Spark's `to_avro` makes of a column. Raises ConfigurationError."""
    for fits, plain in _PLAIN:
        if fits(kind):
            return plain
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": f"{'' if kind.tz else 'local-'}timestamp-micros"}
    if pa.types.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_struct(kind):
        return _record(name, f"{where}.", list(kind))
    if pa.types.is_list(kind):
        return {"type": "array", "items": _nullable(kind.value_field, where, name)}
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return {"type": "map", "values": _nullable(kind.item_field, where, name)}
    raise ConfigurationError(
        f"column '{where}' cannot be written as Avro: it is of type {kind}",
        hint="cast it in select=, for example to a string",
    )


def _is_compatible(client: Any, subject: str, schema: Any, refusal: type[Any]) -> bool:
    try:
        return bool(client.test_compatibility(subject, schema))
    except refusal as unknown:
        if unknown.http_status_code != _NOT_FOUND:
            raise
        return True  # the first schema of the subject


_NOT_REGISTERED: Final = 0
"""Stands for the id of a schema that a start would register."""
_ids: Final[dict[tuple[str, str, str], int]] = {}
"""The ids that registries have answered in this run, by registry, subject and schema."""


def _schema_id(of: Avro, text: str) -> int:
    """Return the id of a subject's schema, which is registered if it is new. Raises ConfigurationError.

    If it `only_compares`, a schema that the registry would take is not registered, and has the id `_NOT_REGISTERED`.
    """
    shown = f"the schema registry {without_userinfo(of.registry)}"
    try:
        client_of: Any = import_module("confluent_kafka.schema_registry")
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"Avro(...) needs the module {missing.name}, which this Python lacks",
            hint='pip install "epochsink[avro]" on the driver',
        ) from missing
    schema = client_of.Schema(text, "AVRO")
    try:
        client = client_of.SchemaRegistryClient({"url": of.registry, **of.options})
        try:
            return int(client.lookup_schema(of.subject, schema).schema_id)
        except client_of.error.SchemaRegistryError as unknown:
            if unknown.http_status_code != _NOT_FOUND:
                raise
        if would(f"register a schema under subject '{of.subject}' of {shown}: {text}"):
            if not _is_compatible(client, of.subject, schema, client_of.error.SchemaRegistryError):
                raise client_of.error.SchemaRegistryError(_CONFLICT, _CONFLICT, "incompatible with the newest schema")
            return _NOT_REGISTERED
        number = int(client.register_schema(of.subject, schema))
    except client_of.error.SchemaRegistryError as refused:
        if refused.http_status_code == _CONFLICT:
            hint = (
                f"make the rows fit the subject's newest schema with select=, name= and casts, write to another "
                f"subject, or relax the compatibility of '{of.subject}'"
            )
        else:
            hint = f"register it under '{of.subject}' yourself, or give the user of options= the right to do so"
        raise ConfigurationError(
            f"{shown} refuses the schema of the rows for subject '{of.subject}': {refused.error_message}; "
            f"the schema is {text}",
            hint=hint,
        ) from refused
    except Exception as failure:
        # which errors a network's failure raises depends on the client's version
        raise ConfigurationError(
            f"{shown} does not answer: {failure}",
            hint="correct registry= and options=, or start the registry; a run asks it once, before the first row",
        ) from failure
    log.info("registered under subject %s as schema %d: %s", of.subject, number, text)
    return number
