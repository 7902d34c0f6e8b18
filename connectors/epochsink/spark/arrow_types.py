"""The Arrow form of Spark's schemas, by the one private module of PySpark that needs no JVM."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.pandas import types

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

# 4.0 and 4.1 always use UTC, later versions need it as an argument
_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(types.to_arrow_schema).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a frame's, with timestamps in UTC. Raises PySparkException for a type without one."""
    return types.to_arrow_schema(schema, **_UTC)
