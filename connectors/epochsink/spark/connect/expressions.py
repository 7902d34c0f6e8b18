"""Find what SQL expressions depend on, by Spark's analysis of small plans. None of these plans runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

_CHANGEABLE: Final = "INVALID_NON_DETERMINISTIC_EXPRESSIONS"
_NO_KEY: Final = "MISSING_AGGREGATION"
_OTHER: Final = "__epochsink_other"
_WITHOUT_TEXT: Final = ("array", "map", "struct", "variant")
"""Types of which different values may have the same text."""

_OF_THE_MOMENT: Final = re.compile(
    r"\b(current_(?:catalog|database|date|schema|time|timestamp|timezone|user)|localtimestamp|now|session_user|user)\b"
    r"(?!\s*\.)",
    re.IGNORECASE,
)
"""What time or session decide: Spark takes these for constants, which they are within one query."""


def changeable(frame: DataFrame, expressions: Sequence[str]) -> list[str]:
    """Return those SQL expressions over a frame that may give another result each time, such as ``rand()``."""
    # Spark refuses them in the condition of a join, and says so
    other = frame.sparkSession.range(0).selectExpr(f"id AS {_OTHER}")
    return [each for each in expressions if _refusal(frame.join(other, F.expr(each).isNotNull())) == _CHANGEABLE]


def loose_parts(frame: DataFrame, expression: str, key: Sequence[str]) -> list[str]:
    """Return what the value of an expression over a frame depends on besides the values of ``key``.

    These are the SQL of columns, of what may give another result each time, and of what time or session decide.
    """
    fields = frame.selectExpr(*key).schema.fields if key else []
    # The key is a text, and different structs, arrays and maps may have the same one.
    decided = [
        F.expr(each)
        for each, field in zip(key, fields, strict=True)
        if not field.dataType.typeName().startswith(_WITHOUT_TEXT)
    ]
    if changeable(frame, [expression]):
        return [expression]
    # in an aggregation by the key, Spark refuses what is not the same for all rows of a group
    grouped = frame.groupBy(*decided, F.lit("all")).agg(F.expr(expression).alias("value"))
    loose = _condition(grouped, _NO_KEY)
    text = re.sub(r"'(?:[^'\\]|\\.)*'", "''", expression)
    return [*loose, *dict.fromkeys(found[0] for found in _OF_THE_MOMENT.finditer(text))]


def _refusal(frame: DataFrame) -> str | None:
    """Return the condition by which Spark refuses to plan a frame; None if it does not."""
    try:
        _ = frame.schema
    except AnalysisException as refused:
        return refused.getCondition()
    return None


def _condition(frame: DataFrame, condition: str) -> list[str]:
    """Return the expression that Spark refuses by a condition, in a list; an empty one if it does not."""
    try:
        _ = frame.schema
    except AnalysisException as refused:
        if refused.getCondition() != condition:
            raise
        told: dict[str, Any] = dict(refused.getMessageParameters() or {})
        return [str(told.get("expression", "a column")).strip('"')]
    return []
