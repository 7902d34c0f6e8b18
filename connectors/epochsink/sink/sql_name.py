"""Names of columns in Spark's SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return a name as Spark's SQL takes it, whatever it holds."""
    return "`" + name.replace("`", "``") + "`"
