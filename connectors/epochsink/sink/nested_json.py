"""How every sink renders nested values as JSON."""

from __future__ import annotations


def json_text(expression: str) -> str:
    """Return the SQL that renders a struct, map or array as JSON: microseconds, in UTC, null fields, all digits."""
    time = "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS"  # by default Spark cuts to milliseconds
    options = f"'timeZone', 'UTC', 'timestampFormat', '{time}XXX', 'timestampNTZFormat', '{time}'"
    return f"to_json({expression}, map({options}, 'ignoreNullFields', 'false'))"
