"""Make samples of checkpoints as the installed PySpark writes them: what epochsink reads of them is a contract.

    python spark_samples.py FOLDER      # in an environment with PySpark, without anything of this project

writes FOLDER/<version of PySpark>.json: for each format that this version can write, the files of a checkpoint by name.
Twelve epochs of a file source, of which Spark keeps the logs of the last ones: it purges old entries, and puts ten
entries of the source's log into one file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark.sql import SparkSession

EPOCHS: Final = 12
_STATE: Final = "spark.sql.streaming.stateStore"
_EVOLUTION: Final = "spark.sql.streaming.queryEvolution"
_ROCKS: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_SINCE_4_2: Final = (4, 2)
FORMS: Final[dict[str, tuple[tuple[int, ...], dict[str, str]]]] = {
    "as it is": ((), {}),
    "state": ((), {}),
    "state checkpoints of format 2": (
        (),
        {f"{_STATE}.checkpointFormatVersion": "2", f"{_STATE}.providerClass": _ROCKS},
    ),
    "offset log of version 2": (_SINCE_4_2, {"spark.sql.streaming.offsetLog.formatVersion": "2"}),
    "named source": (_SINCE_4_2, {f"{_EVOLUTION}.enableSourceEvolution": "true"}),
    "named sink": (_SINCE_4_2, {f"{_EVOLUTION}.enableSinkEvolution": "true"}),
}
"""For each, the first version of PySpark that can write it, and the settings for it."""


def checkpoint(spark: SparkSession, folder: Path, form: str) -> dict[str, str]:
    """Run a query to its end; return the files of its checkpoint that epochsink reads."""
    reader: Any = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
    rows = (reader.name("orders") if form == "named source" else reader).json(str(folder / "input"))
    if form.startswith("state"):
        rows = rows.groupBy("id").count()
    writer = rows.writeStream.format("noop").outputMode("update" if form.startswith("state") else "append")
    place = folder / form
    if form == "named sink":
        # PySpark has no method for it yet
        writer._jwrite.name("orders")
    query = writer.trigger(availableNow=True).option("checkpointLocation", str(place)).start()
    query.awaitTermination()
    names = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()]
    read = [name for name in names if name.parts[0] in ("metadata", "offsets", "commits", "sources")]
    # where it was made does not matter
    return {
        str(name): (place / name).read_text().replace(str(folder), "/sample") for name in read if name.name[0] != "."
    }


def main(to: Path) -> None:
    """Write the samples of this version."""
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    spark = SparkSession.builder.config("spark.sql.streaming.minBatchesToRetain", "2").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    samples = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "input").mkdir()
        for number in range(EPOCHS):
            (folder / "input" / f"{number:02}.json").write_text(json.dumps({"id": number}))
        for form, (since, settings) in FORMS.items():
            if version >= since:
                for key, value in settings.items():
                    spark.conf.set(key, value)
                samples[form] = checkpoint(spark, folder, form)
                for key in settings:
                    spark.conf.unset(key)
    (to / f"{pyspark.__version__}.json").write_text(json.dumps(samples, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
