"""One stream of files into all three sinks, every type in it. Run as ``python pipeline.py SPEC.json``.

It runs in an environment as users have it: nothing but the installed package, no Kafka source, no development tools.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from epochsink import Elasticsearch, ExactlyOnce, Kafka, Postgres

SCHEMA: Final = """
    id long, price decimal(20,6), at timestamp, wall timestamp_ntz, day date, flag boolean, tiny byte, small short,
    count int, ratio float, exact double, word string, blob string, tags array<string>, seconds array<int>,
    address struct<street: string, since: timestamp, floors: array<struct<name: string>>>, scores map<string, double>
"""
SELECT: Final = ["*", "unhex(blob) AS bytes", "CAST(make_dt_interval(1, 2, 3, 4.5) AS STRING) AS waited"]


def main(spec: dict[str, str]) -> None:
    """Process all input that there is."""
    # neither UTC nor the machine's: a timestamp that is taken for local time comes out hours away
    spark = SparkSession.builder.config("spark.sql.session.timeZone", "America/New_York").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(spec["input"])
    exactly_once = ExactlyOnce(
        checkpoint=spec["checkpoint"],
        sinks={
            "topic": Kafka(bootstrap_servers=spec["kafka"], topic=spec["name"], key="id", select=SELECT),
            "table": Postgres(spec["postgres"], table=spec["name"], key=["id"], select=SELECT),
            "search": Elasticsearch(spec["elasticsearch"], index=spec["name"], key="id", select=SELECT),
        },
    )
    exactly_once.start(rows.writeStream.trigger(availableNow=True)).awaitTermination()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
