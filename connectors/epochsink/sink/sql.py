"""Names, users' expressions and nested values, as parts of Spark's SQL that mean the same in every session.

Settings of the session decide how Spark reads a backslash in a literal, backticks in an expression, the type TIMESTAMP,
a cast that overflows, and the text of a decimal. So no SQL of a sink has these: it is made of the functions here.
"""

from __future__ import annotations

from typing import Final


def quoted(name: str) -> str:
    """Return a name as what follows ``AS``, with any characters in it; a column of a row is a `field_of`."""
    return "`" + name.replace("`", "``") + "`"


def operand(expression: str) -> str:
    """Return a user's expression as an operand of a larger one; a comment at its end ends with its line."""
    return f"({expression}\n)"


def literal(text: str) -> str:
    """Return a text as a constant, with any characters in it."""
    if "'" in text or "\\" in text:
        # spark.sql.parser.escapedStringLiterals decides what a backslash is, and so how a quote can be written
        return f"CAST(X'{text.encode().hex()}' AS STRING)"
    return _constant(text)


def _constant(text: str) -> str:
    # Spark joins the parts, and takes the whole for a reference to a setting (spark.sql.variable.substitute)
    return "'" + text.replace("${", "$' '{") + "'"


def field_of(struct: str, name: str) -> str:
    """Return a field of a struct."""
    if "'" in name or "\\" in name:
        return f"{struct}.{quoted(name)}"
    # backticks would be a regular expression under spark.sql.parser.quotedRegexColumnNames
    return f"{struct}[{_constant(name)}]"


def text_of(expression: str) -> str:
    """Return the SQL of the text of a value."""
    # CAST writes a small decimal as 0E-18 if spark.sql.ansi.enabled is off, and TRY_CAST never does
    return f"TRY_CAST({expression} AS STRING)"


def converted(expression: str, kind: str, what: str) -> str:
    """Return the SQL of a value as one of another type. A value that does not fit fails the task; NULL stays NULL.

    A cast alone would overflow or make NULL if spark.sql.ansi.enabled is off. ``what`` names the value in the error.
    """
    refused = f"raise_error({literal(f'a value of {what} is not of type {kind}, or is out of its range')})"
    return f"COALESCE(TRY_CAST({expression} AS {kind}), IF({expression} IS NULL, NULL, {refused}))"


_WALL: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
"""By default Spark cuts to milliseconds."""
_JSON: Final = (
    f"map('timeZone', 'UTC', 'timestampFormat', {literal(f'{_WALL}XXX')}, "
    f"'timestampNTZFormat', {literal(_WALL)}, 'ignoreNullFields', 'false')"
)


def json_text(expression: str) -> str:
    """Return the SQL that renders a struct, map or array as JSON: microseconds, in UTC, null fields, all digits."""
    return f"to_json({expression}, {_JSON})"
