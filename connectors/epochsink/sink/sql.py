"""Names, users' expressions and nested values, as parts of Spark's SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return a name as Spark's SQL takes it, with any characters in it."""
    return "`" + name.replace("`", "``") + "`"


def operand(expression: str) -> str:
    """Return a user's expression as an operand of a larger one; a comment at its end ends with its line."""
    return f"({expression}\n)"


def json_text(expression: str) -> str:
    """Return the SQL that renders a struct, map or array as JSON: microseconds, in UTC, null fields, all digits."""
    time = "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS"  # by default Spark cuts to milliseconds
    options = f"'timeZone', 'UTC', 'timestampFormat', '{time}XXX', 'timestampNTZFormat', '{time}'"
    return f"to_json({expression}, map({options}, 'ignoreNullFields', 'false'))"
