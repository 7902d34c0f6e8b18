"""Names and users' expressions, as parts of Spark's SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return a name as Spark's SQL takes it, with any characters in it."""
    return "`" + name.replace("`", "``") + "`"


def operand(expression: str) -> str:
    """Return a user's expression as an operand of a larger one; a comment at its end ends with its line."""
    return f"({expression}\n)"
