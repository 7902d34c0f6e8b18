"""Run an S3 API on loopback: moto's server, which keeps everything in memory and accepts any credentials."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Mapping
from importlib import metadata, util
from typing import Final, Self

from epochsink.errors import ServiceError
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.ports import LOOPBACK, answers

BUCKET: Final = "lake"


class LocalS3(LocalService):
    """One S3 API with the bucket `lake`. It loses all data when it stops."""

    name = "s3"
    listens_on = LOOPBACK

    @property
    def version(self) -> str:
        return metadata.version("moto")

    @property
    def endpoint(self) -> str:
        """For S3 clients."""
        return f"http://{self.listens_on}:{self.port}"

    @property
    def address(self) -> str:
        """The endpoint."""
        return self.endpoint

    @property
    def spark_settings(self) -> Mapping[str, str]:
        """The settings that a Spark session needs to reach it."""
        return {
            "spark.hadoop.fs.s3a.endpoint": self.endpoint,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": "anyone",
            "spark.hadoop.fs.s3a.secret.key": "anything",
        }

    def start(self) -> Self:
        super().start()
        self.make_bucket(BUCKET)
        return self

    def make_bucket(self, name: str) -> None:
        """Create a bucket if it does not exist."""
        connection = http.client.HTTPConnection(self.listens_on, self.port, timeout=10)
        try:
            connection.request("PUT", f"/{name}")
            answer = connection.getresponse()
            if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.CONFLICT):
                raise ServiceError(f"s3 did not create bucket '{name}': {answer.status} {answer.read()!r}")
        finally:
            connection.close()

    def _prepare(self) -> None:
        if any(util.find_spec(module) is None for module in ("moto", "flask", "flask_cors")):
            raise ServiceError(
                "the S3 API for development is moto's server, which is not installed",
                hint="pip install 'moto[s3]' flask flask-cors",
            )

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", self.listens_on, "-p", str(self.port)]

    def _is_ready(self) -> bool:
        return answers(self.port)
