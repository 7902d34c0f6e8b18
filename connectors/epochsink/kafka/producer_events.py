"""Handle librdkafka's events: undelivered rows, errors, statistics, log lines."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import time
from typing import Final

from epochsink.kafka import errors, librdkafka
from epochsink.kafka.librdkafka import OK, Library, Message, NativeError

log = logging.getLogger("librdkafka")
if log.level == logging.NOTSET:
    # while no broker answers it repeats one line twenty times a second, and the error that is raised has the reason
    log.setLevel(logging.CRITICAL)

_GOT_PRODUCER: Final = b"GETPID"
_PRODUCER: Final = re.compile(rb"(?:Acquired|->) PID\{Id:(\d+),Epoch:(\d+)\}")
"""The facility, and the end, of the line of librdkafka's log (``debug=eos``) that has the producer's id and epoch."""


class Events:
    """Handles the events of one producer's main queue, a ``rd_kafka_queue_t *``.

    ``undelivered`` is the first row that was not delivered. ``unanswered`` says that such a row was sent, and that no
    answer came: a broker may still read it. ``trouble`` is the last connection error; a permanent error is not
    replaced. ``producer`` is the producer id and producer epoch, None until they are known: a line of the log has them
    at once, the statistics some time later.
    """

    ENABLED = librdkafka.EVENT_DELIVERY | librdkafka.EVENT_ERROR | librdkafka.EVENT_STATISTICS | librdkafka.EVENT_LOG

    def __init__(self, rdkafka: Library, queue: int) -> None:
        self._rdkafka = rdkafka
        self._queue = queue
        self.undelivered: NativeError | None = None
        self.unanswered = False
        self.trouble: NativeError | None = None
        self.trouble_since = 0.0
        self.producer: tuple[int, int] | None = None

    def serve(self, wait_ms: int) -> None:
        """Handle all waiting events; wait up to ``wait_ms`` for the first."""
        while event := self._rdkafka.queue_poll(self._queue, wait_ms):
            wait_ms = 0
            try:
                self._take(event)
            finally:
                self._rdkafka.event_destroy(event)

    def _take(self, event: int) -> None:
        kind = self._rdkafka.event_type(event)
        if kind == librdkafka.EVENT_STATISTICS:
            if self.producer is None:
                known = json.loads(self._rdkafka.event_stats(event))["eos"]
                # negative in statistics that were made before it was known
                if known["producer_id"] >= 0:
                    self.producer = int(known["producer_id"]), int(known["producer_epoch"])
        elif kind == librdkafka.EVENT_DELIVERY:
            self._note_undelivered(event)
        elif kind == librdkafka.EVENT_ERROR:
            text = self._rdkafka.event_error_string(event).decode(errors="replace")
            trouble = NativeError(self._rdkafka.event_error(event), text)
            # keep a permanent error: the later "all brokers are down" does not say why
            if self.trouble is None or not errors.is_permanent(self.trouble.code):
                self.trouble = trouble
                self.trouble_since = time.monotonic()
        elif kind == librdkafka.EVENT_LOG:
            self._log(event)

    def _note_undelivered(self, event: int) -> None:
        while report := self._rdkafka.event_message_next(event):
            message: Message = report.contents
            if message.err != OK and self._rdkafka.message_status(report) == librdkafka.POSSIBLY_PERSISTED:
                self.unanswered = True
            if self.undelivered is None and message.err != OK:
                topic = self._rdkafka.topic_name(message.topic).decode()
                size = message.len + message.key_len
                # the broker refuses whole batches, and does not say which of the rows is the reason
                self.undelivered = NativeError(
                    message.err,
                    f"a batch of rows for topic '{topic}', partition {message.partition}, was not delivered (its first "
                    f"row has {size} bytes): {self._rdkafka.describe(message.err)}",
                )

    def _log(self, event: int) -> None:
        facility, text = ctypes.c_char_p(), ctypes.c_char_p()
        severity = ctypes.c_int()
        self._rdkafka.event_log(event, ctypes.byref(facility), ctypes.byref(text), ctypes.byref(severity))
        if facility.value == _GOT_PRODUCER and (producer := _PRODUCER.search(text.value or b"")):
            self.producer = int(producer[1]), int(producer[2])
        syslog = {3: logging.ERROR, 4: logging.WARNING, 5: logging.INFO, 6: logging.INFO}
        level = logging.DEBUG if severity.value > 6 else syslog.get(severity.value, logging.ERROR)  # noqa: PLR2004 - syslog
        log.log(level, "%s: %s", (facility.value or b"").decode(), (text.value or b"").decode(errors="replace"))
