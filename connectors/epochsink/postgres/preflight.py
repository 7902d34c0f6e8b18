"""Check that server, marker table and target are ready before the first row is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
import pyarrow as pa
from psycopg import errors, sql

from epochsink.errors import ConfigurationError
from epochsink.postgres import dead_letter, marker_table
from epochsink.postgres.catalog import TargetTable, read_target, unsafe
from epochsink.postgres.committable import Relation
from epochsink.postgres.compared import check_compared
from epochsink.postgres.config import PostgresConfig, identifier
from epochsink.postgres.ddl import add_columns, create_target, lacking, table_ddl
from epochsink.postgres.errors import ConnectionRefused, describe, failure, is_disconnected
from epochsink.postgres.prepared_transaction import SYNC_HINT
from epochsink.postgres.row_mapping import fit, unfilled, writer_schema
from epochsink.postgres.server import Connection, Server
from epochsink.postgres.types import Encoding
from epochsink.sink import only_compares, would

# since 14, pg_terminate_backend can wait for the end of a session, which the sweeps rely on
MIN_VERSION: Final = 140000
MOST_COLUMNS: Final = 1600 - 20
"""Of a table's 1,600 columns, without those that a staging table has beside the row's."""

_MARKER: Final = """
SELECT c.relkind::text, c.relpersistence::text,
       EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid
               AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
               AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_catalog.pg_attribute a
                    WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey)) <@ %s::text[]),
       row_security_active(c.oid)
FROM pg_catalog.pg_class c WHERE c.oid = to_regclass(%s)
"""
_LOOSE_COLLATIONS: Final = """
SELECT a.attname FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation AND NOT co.collisdeterministic
WHERE a.attrelid = to_regclass(%s)
"""
_PUBLICATIONS: Final = """
SELECT p.pubname, 'FOR ALL TABLES' FROM pg_catalog.pg_publication p WHERE p.puballtables ORDER BY 1
"""
_SCHEMA_PUBLICATIONS: Final = """
SELECT p.pubname, 'FOR TABLES IN SCHEMA' FROM pg_catalog.pg_publication p
JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid
JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid WHERE n.nspname = %s ORDER BY 1
"""
_SCHEMA_PUBLICATIONS_SINCE: Final = 150000
_SEQUENCES: Final = """
SELECT a.attname, s.oid::regclass::text FROM pg_catalog.pg_attrdef d
JOIN pg_catalog.pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
JOIN pg_catalog.pg_depend u ON u.classid = 'pg_attrdef'::regclass AND u.objid = d.oid
  AND u.refclassid = 'pg_class'::regclass
JOIN pg_catalog.pg_class s ON s.oid = u.refobjid
WHERE d.adrelid = to_regclass(%s) AND a.attname <> ALL (%s)
  AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE, UPDATE') ELSE false END
ORDER BY a.attnum
"""
_LACKING: Final = """
SELECT c.name FROM unnest(%s::text[]) AS c (name)
WHERE NOT has_column_privilege(to_regclass(%s), c.name, %s)
"""


def check(config: PostgresConfig, connection: Connection, row: pa.Schema) -> list[str]:
    """Compare a configuration and the rows' schema with the server; return one line for each problem found.

    Creates the marker table, its schema and, with ``create``, the target if they are missing; with ``add_columns`` adds
    columns to it; not if it `only_compares`. Raises `psycopg.Error` if the connection is lost.
    """
    # before anything is made: the server would cut a name that is too long, and make a column of another name
    unfit = [*check_server(connection), *_check_names(config, row)]
    if unfit:
        return unfit
    findings = list(check_markers(config, connection))
    relation = Relation.of(config.table)
    try:
        target = read_target(connection, relation)
        if target is None and config.create:
            if relation.schema is None:
                first = next((schema for schema in connection.schemas if not schema.startswith("pg_")), None)
                relation = Relation(first, relation.name)
            findings += create_target(config, connection, relation, row)
            target = read_target(connection, relation)
    except errors.InsufficientPrivilege as refused:
        place = sql.Identifier(relation.schema or "public").as_string(connection)
        grant = f"GRANT USAGE ON SCHEMA {place} TO {user_of(connection)};"
        return [*findings, f"table {relation}: {describe(refused)}; let its owner run: {grant}"]
    if target is None:
        is_named = config.create and (findings or only_compares())
        return findings if is_named else [*findings, _unknown_table(config, connection, row)]
    if config.add_columns and not list(check_kind(target)):
        not_added = list(add_columns(config, connection, target, row))
        if not_added:
            return findings + not_added
        if only_compares():
            # the others: a column that is added has the type that fits
            added = lacking(config, target, row)
            row = pa.schema([field for field in row if field.name not in added])
            config = config.without(added)
        target = read_target(connection, target.relation) or target
    schema = writer_schema(row, deletes=config.delete_when is not None)
    return [*findings, *_check_target(config, connection, target, schema)]


def unreachable(config: PostgresConfig, error: psycopg.Error) -> str:
    """Return the finding for a server that refuses the connection, or a question about the table."""
    # many an error of a statement is an OperationalError too
    refused = "connect to" if is_disconnected(error) or isinstance(error, ConnectionRefused) else "look into"
    known = failure(error, f"cannot {refused} {Server.of(config).database}")
    return f"{known.message}; {known.hint}"


def _check_names(config: PostgresConfig, row: pa.Schema) -> Iterator[str]:
    """Yield columns of the row that no table can have."""
    if len(row) > MOST_COLUMNS:
        yield (
            f"the row has {len(row)} columns, and a table of PostgreSQL and the sink's own staging table hold at most "
            f"{MOST_COLUMNS} of them; leave some out with select=, or combine some: a struct or map becomes one column"
        )
    for name in row.names:
        try:
            identifier(name, f"column {name!r} of the row for {Relation.of(config.table)}")
        except ConfigurationError as unfit:
            yield f"{unfit.message}; select it under another name with AS"
    for name, times in Counter(row.names).items():
        if times > 1:
            yield f"the row has {times} columns {name!r}; select each under a name of its own with AS"


def check_server(connection: Connection) -> Iterator[str]:
    """Yield why the server takes no epochs at all."""
    version = connection.info.server_version
    if version < MIN_VERSION:
        yield f"the server is PostgreSQL {version // 10000}, and epochsink needs 14 or newer; upgrade it"
    standby, fsync = connection.execute(
        "SELECT pg_is_in_recovery(), pg_catalog.current_setting('fsync')"
    ).fetchone() or (False, "on")
    if standby:
        yield (
            "the server is a standby and takes no writes; connect to the primary, or name several hosts and "
            "target_session_attrs='read-write'"
        )
    if fsync != "on":
        yield f"the server has fsync = {fsync}: a power failure may lose what it has acknowledged; {SYNC_HINT}"


def check_markers(config: PostgresConfig, connection: Connection) -> Iterator[str]:
    """Create the marker table if it is missing; yield why it cannot be used."""
    user, schema = user_of(connection), sql.Identifier(config.marker_schema).as_string(connection)
    ddl = f"CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO {user};"
    table = sql.Identifier(config.marker_schema, marker_table.TABLE).as_string(connection)
    try:
        published = list(_check_marker_publication(config, connection, table))
        if published:
            # Before the table is created: a table that exists is already published.
            yield from published
            return
        if only_compares() and (missing := missing_markers(config, connection)):
            would(f"create {' and '.join(missing)}")
            yield from _may_create(connection, config.marker_schema, ddl)
            return
        marker_table.MarkerTable(connection, config.marker_schema).create()
        if config.sets_aside:
            dead_letter.create(connection, config.marker_schema)
    except errors.InsufficientPrivilege as refused:
        yield f"markers and staging need the schema {schema}: {describe(refused)}; let the DBA run: {ddl}"
        return
    may_stage, may_mark = connection.execute(
        "SELECT has_schema_privilege(%s, 'CREATE'), has_table_privilege(%s, 'SELECT') AND "
        "has_table_privilege(%s, 'INSERT') AND has_table_privilege(%s, 'DELETE')",
        [config.marker_schema, table, table, table],
    ).fetchone() or (False, False)
    if not may_stage:
        yield f"user {user} may not create staging tables in schema {schema}; let the DBA run: {ddl}"
    yield from _check_marker_table(connection, table)
    if config.sets_aside:
        yield from dead_letter.check(connection, config.marker_schema, user)
    if not may_mark:
        yield (
            f"user {user} may not use the marker table {table}; let its owner run: "
            f"GRANT SELECT, INSERT, DELETE ON {table} TO {user};"
        )


def missing_markers(config: PostgresConfig, connection: Connection) -> list[str]:
    """Return what a start would make in the marker schema."""
    schema = sql.Identifier(config.marker_schema).as_string(connection)
    wanted = [marker_table.TABLE, *([dead_letter.TABLE] if config.sets_aside else [])]
    names = [sql.Identifier(config.marker_schema, table).as_string(connection) for table in wanted]
    has_schema, *has = connection.execute(
        "SELECT to_regnamespace(%s) IS NOT NULL" + ", to_regclass(%s) IS NOT NULL" * len(names), [schema, *names]
    ).fetchone() or (False,)
    missing = [] if has_schema else [f"schema {schema}"]
    return missing + [f"table {name}" for name, is_there in zip(names, has, strict=True) if not is_there]


def _may_create(connection: Connection, schema: str, ddl: str) -> Iterator[str]:
    """Yield what to run first if this user may not make a table in a schema, or the schema."""
    (may,) = connection.execute(
        "SELECT CASE WHEN to_regnamespace(%(quoted)s) IS NULL "
        "THEN has_database_privilege(current_database(), 'CREATE') ELSE has_schema_privilege(%(name)s, 'CREATE') END",
        {"name": schema, "quoted": sql.Identifier(schema).as_string(connection)},
    ).fetchone() or (False,)
    if not may:
        yield f"user {user_of(connection)} may not create it in schema {schema}; let the DBA run: {ddl}"


def _check_marker_table(connection: Connection, table: str) -> Iterator[str]:
    """Yield the reasons why the marker table cannot prove what is applied, after it was created or changed by hand."""
    row = connection.execute(_MARKER, [list(marker_table.KEY), table]).fetchone()
    if row is None:
        return
    kind, persistence, has_key, row_security = row
    repair = "drop it while no query runs and let epochsink create it again, or correct it by hand"
    if kind != "r":
        yield f"the marker table {table} is not an ordinary table; {repair}"
    if persistence != "p":
        yield f"the marker table {table} is UNLOGGED: a crash would empty it; ALTER TABLE {table} SET LOGGED"
    if not has_key:
        columns = ", ".join(marker_table.KEY)
        yield (
            f"the marker table {table} has no primary key ({columns}), so an epoch could be applied twice; "
            f"ALTER TABLE {table} ADD PRIMARY KEY ({columns})"
        )
    if row_security:
        yield (
            f"row security of the marker table {table} applies to this user, so applied epochs may be hidden; "
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"
        )


def _check_target(
    config: PostgresConfig, connection: Connection, target: TargetTable, schema: pa.Schema
) -> Iterator[str]:
    yield from check_kind(target)
    yield from unsafe(target, config.key, deletes=config.delete_when is not None, direct=config.is_direct)
    encodings, unfit = fit(schema, target, direct=config.is_direct)
    yield from unfit
    for column in unfilled(schema, target):
        yield (
            f"column {column.name!r} of {target.relation} is NOT NULL without a default, and the row lacks it; add it "
            "in select=, or give it a default"
        )
    yield from _check_key(config, target, schema)
    yield from check_compared(config, connection, target, encodings)
    if not config.atomic:
        yield from _check_spread(config, connection, target, encodings)
    names = [encoding.field.name for encoding in encodings if encoding.field.name in target.columns]
    yield from _check_privileges(config, connection, target, names)
    yield from _check_mode(config, target)
    if config.mode(target.max_prepared_transactions) == "staged":
        yield from check_publications(config, connection)


def check_kind(target: TargetTable) -> Iterator[str]:
    """Yield why no rows can be copied into the target."""
    if target.kind not in ("r", "p"):
        kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
        yield (
            f"{target.relation} is {kinds.get(target.kind, 'no table')}, and rows can only be copied into a table, "
            "ordinary or partitioned; name the table behind it"
        )


def _check_key(config: PostgresConfig, target: TargetTable, schema: pa.Schema) -> Iterator[str]:
    if not config.key:
        return
    absent = [name for name in config.key if name not in schema.names]
    if absent:
        yield f"key column(s) {', '.join(absent)} are not in the row ({', '.join(schema.names)}); add them in select="
        return
    for name in config.key:
        if name in target.columns and not target.columns[name].not_null:
            quoted = sql.Identifier(name).as_string()
            yield (
                f"key column {name!r} of {target.relation} is nullable, and null keys never match; "
                f"ALTER TABLE {target.relation} ALTER COLUMN {quoted} SET NOT NULL"
            )


def _check_spread(
    config: PostgresConfig, connection: Connection, target: TargetTable, encodings: Sequence[Encoding]
) -> Iterator[str]:
    """Yield key columns in which two values differ in Spark and are equal in the table.

    Two tasks would then write the same row and wait for each other.
    """
    loose = {name for (name,) in connection.execute(_LOOSE_COLLATIONS, [str(target.relation)]).fetchall()}
    for encoding in encodings:
        name = encoding.field.name
        if name not in config.key or name not in target.columns:
            continue
        column = target.columns[name]
        foreign = not column.equals.startswith("OPERATOR(pg_catalog.")
        if name in loose or foreign or encoding.cast_to or encoding.parses or column.receive == "bpcharrecv":
            yield (
                f"atomic=False spreads rows over tasks by Spark's own comparison of key column {name!r}, and "
                f"{column.declared} compares differently (case, blanks or spelling), so two tasks could write one row; "
                "use atomic=True, or a key of another type"
            )


def _check_privileges(
    config: PostgresConfig, connection: Connection, target: TargetTable, names: Sequence[str]
) -> Iterator[str]:
    needed = {"INSERT": list(names)}
    if config.key:
        # of each column whose value the upsert takes from EXCLUDED, too
        needed["SELECT"] = list(names)
        needed["UPDATE"] = [name for name in names if name not in config.key]
    user, table = user_of(connection), str(target.relation)
    for privilege, columns in needed.items():
        lacking = [name for (name,) in connection.execute(_LACKING, [columns, table, privilege]).fetchall()]
        if lacking:
            yield (
                f"user {user} lacks {privilege} on {table}, column(s) {', '.join(lacking)}; let its owner run: "
                f"GRANT {privilege} ON {table} TO {user};"
            )
    for column, sequence in connection.execute(_SEQUENCES, [table, list(names)]).fetchall():
        yield (
            f"user {user} lacks USAGE on sequence {sequence}, from which column {column!r} of {table} takes its "
            f"default; let its owner run: GRANT USAGE ON SEQUENCE {sequence} TO {user};"
        )
    if config.delete_when is not None:
        may = connection.execute("SELECT has_table_privilege(to_regclass(%s), 'DELETE')", [table]).fetchone()
        if not (may and may[0]):
            yield f"user {user} lacks DELETE on {table}; let its owner run: GRANT DELETE ON {table} TO {user};"


def _check_mode(config: PostgresConfig, target: TargetTable) -> Iterator[str]:
    if config.mode(target.max_prepared_transactions) == "prepared" and target.max_prepared_transactions == 0:
        staged = "" if config.atomic else " and atomic=True"
        yield (
            f"commit={config.commit!r} with atomic={config.atomic} needs prepared transactions, and the server has "
            "max_prepared_transactions = 0; set it to at least 10 and restart the server, or use "
            f"commit='staged'{staged}"
        )


def check_publications(config: PostgresConfig, connection: Connection) -> Iterator[str]:
    """Yield the publications that would publish staging tables."""
    for name, kind in _publications(config, connection):
        yield (
            f"publication {name} is {kind}: it would publish the logged staging tables that commit='staged' needs, and "
            "subscribers, which lack them, would stop; use commit='prepared', whose staging tables are unlogged, or "
            "list the publication's tables"
        )


def _check_marker_publication(config: PostgresConfig, connection: Connection, table: str) -> Iterator[str]:
    """Yield what to do first if the marker table would be published. The subscribers cannot be checked from here."""
    exists = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()
    if exists and exists[0]:
        return
    ddl = "; ".join(
        " ".join(statement.as_string(connection).split())
        for statement in (
            marker_table.schema_ddl(config.marker_schema),
            marker_table.table_ddl(config.marker_schema),
        )
    )
    for name, kind in _publications(config, connection):
        yield (
            f"publication {name} is {kind}: it would publish the marker table {table}, and subscribers, which lack it, "
            f"would stop; create it by hand, on every subscriber first and then here: {ddl}; or list the publication's "
            "tables"
        )


def _publications(config: PostgresConfig, connection: Connection) -> list[tuple[str, str]]:
    """Return the publications, with their kind, that include every table created in the marker schema."""
    rows = connection.execute(_PUBLICATIONS).fetchall()
    if connection.info.server_version >= _SCHEMA_PUBLICATIONS_SINCE:
        rows += connection.execute(_SCHEMA_PUBLICATIONS, [config.marker_schema]).fetchall()
    return [(str(name), str(kind)) for name, kind in rows]


def _unknown_table(config: PostgresConfig, connection: Connection, row: pa.Schema) -> str:
    near = connection.execute(
        "SELECT format('%%s.%%s', n.nspname, c.relname) FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE lower(c.relname) = lower(%s) AND c.relkind IN ('r', 'p') ORDER BY 1 LIMIT 3",
        [config.table[-1].strip('"')],
    ).fetchall()
    if near:
        hint = f"did you mean {' or '.join(name for (name,) in near)}?"
    else:
        try:
            hint = f"create it: {table_ddl(config, Relation.of(config.table), row).as_string(connection)}; or set "
        except ConfigurationError as unfit:
            hint = f"create it ({unfit.message}; {unfit.hint}), or set "
        hint += "create=True."
    place = f"{Server.of(config).database} (search_path {connection.search_path})"
    return (
        f"table {Relation.of(config.table)} does not exist in {place}; {hint} Names are literal: write them without "
        "quotes, with the table's own case, and with its schema"
    )


def user_of(connection: Connection) -> str:
    """Return the session's user, quoted."""
    return sql.Identifier(connection.info.user).as_string(connection)
