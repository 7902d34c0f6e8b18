"""Keeps passwords out of kafka-python's debug log, which writes down every request as it is sent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kafka.protocol.sasl import SaslAuthenticateRequest

from epochsink.kafka.client_options import SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGGERS: Final = ("kafka.net.connection", "kafka.protocol.parser", "kafka.net.transport")


class _Silence(logging.Filter):
    """Drops records about a request that authenticates, and those with the bytes of a known secret."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[bytes] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(self._tells(argument) for argument in arguments)

    def _tells(self, argument: object) -> bool:
        if isinstance(argument, (bytes, bytearray)):
            return any(secret in argument for secret in self.secrets)
        return isinstance(argument, SaslAuthenticateRequest)


_silence: Final = _Silence()


def add(options: Mapping[str, str]) -> None:
    """Keep the secrets among these options out of the log from now on."""
    _silence.secrets |= {value.encode() for name, value in options.items() if name in SECRETS and value}
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_silence)
