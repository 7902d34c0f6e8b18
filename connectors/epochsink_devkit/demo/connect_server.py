"""A server of Spark Connect as a process of its own, and a session on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import SparkSession

CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_SECONDS: Final = 120.0
LOOPBACK: Final = "127.0.0.1"
STDERR: Final = 2


def start_server(settings: Mapping[str, str], jvm_options: str = "") -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; return its process, which the caller ends, and its URL, at which it answers.

    ``settings`` add to or replace Spark's settings.
    """
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    given = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": jvm_options,
        **settings,
    }
    options = [word for name, value in given.items() for word in ("--conf", f"{name}={value}")]
    submit = Path(pyspark.__file__).with_name("bin") / "spark-submit"
    process = subprocess.Popen(
        [str(submit), *options, "--class", CLASS, "spark-internal"],
        stdin=subprocess.DEVNULL,
        # Spark prints a line for each batch, and the standard output is the caller's: stderr takes it
        stdout=STDERR,
        env={"PYSPARK_PYTHON": sys.executable, **os.environ},
    )
    deadline = time.monotonic() + START_SECONDS
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"the server of Spark Connect did not start (status {process.poll()})")
        time.sleep(0.05)
    return process, f"sc://{LOOPBACK}:{port}"


def connect(url: str) -> SparkSession:
    """Return a session on a server."""
    return SparkSession.builder.remote(url).getOrCreate()


def _answers(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
