"""`make prove ONLY=stores`: a pipeline with its checkpoint on HDFS or S3, killed at random many times, then compared.

Not a test of every build: Spark needs hadoop-aws and its SDK (530 MB) for its own files on S3. Prints its seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import folder_pipeline
from bench_checkpoint import s3a_packages
from fix_spark import end_session, spark_settings, start_session
from rich.console import Console
from streams import SCHEMA, Stream

from epochsink_devkit.services import LocalHdfs, LocalS3

ROWS = 5
PAUSE_SECONDS = 0.5
START_SECONDS, BUSY_SECONDS, PROGRESS_SECONDS = 15.0, 4.0, 120.0
console = Console()


def main() -> int:
    """Run on each store, in a process of its own, as a session ends with its process; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", default="hdfs,s3", help="which, with commas (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    stores = given.stores.split(",")
    if len(stores) > 1:
        command = [sys.executable, "-m", "proof.stores", f"--kills={given.kills}", f"--seed={given.seed}"]
        return max(subprocess.call([*command, f"--stores={store}"]) for store in stores)
    console.print(f"seed {given.seed}")
    chance = random.Random(given.seed)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory(prefix="epochsink-kills-") as folder:
        if stores == ["hdfs"]:
            with LocalHdfs() as hdfs:
                return prove(
                    "hdfs", hdfs.url, dict(hdfs.spark_settings), Path(folder), chance=chance, kills=given.kills
                )
        with LocalS3() as s3:
            settings = {**s3.spark_settings, "spark.hadoop.fs.s3a.connection.ssl.enabled": "false"}
            settings["spark.jars"] = ",".join(map(str, s3a_packages()))
            return prove("s3", "s3a://lake", settings, Path(folder), chance=chance, kills=given.kills)


def prove(store: str, root: str, settings: dict[str, str], folder: Path, *, chance: random.Random, kills: int) -> int:
    """Kill a pipeline again and again while input comes; let another process finish; return 1 if rows differ."""
    url = f"{root}/{uuid.uuid4().hex}"
    session = start_session("local[2]", {**spark_settings(folder), **settings})
    try:
        stream = Stream(session, folder, url)
        environment = {**os.environ, "CHECKPOINT": url, "SPARK_SETTINGS": json.dumps(settings)}
        files = epochs = 0
        for number in range(kills):
            process = subprocess.Popen(
                [sys.executable, folder_pipeline.__file__, str(folder), "never"],
                env=environment,
                start_new_session=True,
            )
            # every fourth one dies in its start, the others when an epoch of theirs is visible
            seen = len(stream.sink.values())
            until = time.monotonic() + (chance.uniform(1, START_SECONDS) if number % 4 == 3 else PROGRESS_SECONDS)
            while time.monotonic() < until and process.poll() is None:
                stream.put(range(files * ROWS, (files + 1) * ROWS))
                files += 1
                if len(stream.sink.values()) > seen and until > time.monotonic() + BUSY_SECONDS:
                    until = time.monotonic() + chance.uniform(0, BUSY_SECONDS)
                time.sleep(PAUSE_SECONDS)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            seen = len(stream.sink.values())
            console.print(f"{store}: kill {number + 1}, {files} files, {seen} rows visible")
            epochs = seen // ROWS
        # what is left of the input in a few large epochs
        rest = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 100).json(str(stream.input))
        stream.run(frame=rest)
        values = stream.sink.values()
        right = values == list(range(files * ROWS)) and stream.sink.prepared() == []
        console.print(
            f"{store}: {kills} kills, {epochs} epochs before the last start, {files} files, {len(values)} rows, "
            f"{'no row lost or doubled, nothing left prepared' if right else 'WRONG'}"
        )
        stream.end()
    finally:
        end_session(session)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
