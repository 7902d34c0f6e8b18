"""Find SQL expressions that may change, by Spark's analysis of small plans. None of these plans runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CHANGEABLE: Final = "INVALID_NON_DETERMINISTIC_EXPRESSIONS"
_OTHER: Final = "__epochsink_other"


def changeable(frame: DataFrame, expressions: Sequence[str]) -> list[str]:
    """Return those SQL expressions over a frame that may give another result each time, such as ``rand()``."""
    # Spark refuses them in the condition of a join, and says so
    other = frame.sparkSession.range(0).selectExpr(f"id AS {_OTHER}")
    return [each for each in expressions if _refusal(frame.join(other, F.expr(each).isNotNull())) == _CHANGEABLE]


def _refusal(frame: DataFrame) -> str | None:
    """Return the condition by which Spark refuses to plan a frame; None if it does not."""
    try:
        _ = frame.schema
    except AnalysisException as refused:
        return refused.getCondition()
    return None
