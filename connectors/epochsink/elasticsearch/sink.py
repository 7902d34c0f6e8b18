"""The configuration of an Elasticsearch sink.

A task that only spools needs no client, and importing it takes each of Spark's Python workers more than a second of
processor time: it is imported where it is used.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

from epochsink.elasticsearch import row_mapping
from epochsink.elasticsearch.client_options import check_options, shown_host, shown_options
from epochsink.elasticsearch.duration import seconds
from epochsink.elasticsearch.writer import ElasticsearchWriter
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import elasticsearch
    import pyarrow as pa

    from epochsink.elasticsearch.bulk_request import Poster
    from epochsink.elasticsearch.committer import ElasticsearchCommitter
    from epochsink.sink import Task

_LONGEST_NAME: Final = 255
_DEFAULT_TIMEOUT: Final = 60.0


class Elasticsearch:
    """Documents of one index, applied epoch by epoch from the spool after the checkpoint.

    ``hosts`` is a URL or a list of them, ``index`` an index or an alias of exactly one.

    ``id`` is a column, an SQL expression, or a list of them (then the ``_id`` is their JSON array): a row whose id is
    stored already replaces the document. Within an epoch the row of the highest ``order_by`` wins; without it the
    later row of a task, and rows of one id in several tasks are refused. Without ``id`` documents are append-only
    and get an ``_id`` from the query, the sink, the epoch and their position.

    ``select`` gives SQL expressions for the document, ``where`` which rows become one, ``delete_when`` which rows
    delete theirs. The versions of deleted documents are kept for ``gc_deletes``: after a longer pause a driver's stale
    write could bring one back.

    ``on_rejected``: documents that the server refuses for good stop the query ("stop"; the epoch stays pending), or
    are written to ``dead_letter_index`` ("dead_letter"). ``validate`` has every task ask the server before the
    checkpoint, at the price of the server parsing each document twice.

    ``refresh`` makes an epoch searchable at the end of its commit. ``epoch_visibility`` also holds back all
    other refreshes (``index.refresh_interval`` of -1), so that searches see an epoch all at once but for the
    moment in which one shard is refreshed and the next is not. Not held back: reads by ``_id``, which
    see each document at once; a refresh that somebody else asks for; a shard that moves or restarts.

    ``create_index`` lets `check` create a missing index, with ``settings``, from the row's schema. ``accept_index``
    is the uuid of an index that was created anew or restored, and is nevertheless the right one to go on with.

    ``bulk_bytes`` is the size of a request, ``threads`` how many are sent at once, ``patience`` the seconds
    without any success after which a commit gives up (the epoch stays pending). ``options`` go to the
    vendor's client: ``api_key``, ``basic_auth``, ``ca_certs``, ``ssl_assert_fingerprint``, ``http_compress``, ...
    Credentials over http to another machine need ``allow_insecure``.

    Raises `ConfigurationError`.
    """

    def __init__(
        self,
        hosts: str | Sequence[str],
        *,
        index: str,
        id: str | Sequence[str] | None = None,  # noqa: A002 - the field's own term
        select: Sequence[str] = ("*",),
        where: str | None = None,
        delete_when: str | None = None,
        order_by: str | None = None,
        on_rejected: Literal["stop", "dead_letter"] = "stop",
        dead_letter_index: str | None = None,
        validate: bool = False,
        refresh: bool = False,
        epoch_visibility: bool = False,
        create_index: bool = True,
        settings: Mapping[str, Any] | None = None,
        accept_index: str | None = None,
        gc_deletes: str = "1h",
        bulk_bytes: int = 2_500_000,
        threads: int = 2,
        patience: float = 120.0,
        allow_insecure: bool = False,
        **options: Any,
    ) -> None:
        if find_spec("elasticsearch") is None:
            raise ConfigurationError(
                "the Elasticsearch sink needs the package elasticsearch, which is not installed here",
                hint="install epochsink[elasticsearch] on the driver (and on every executor for validate=True)",
            )
        self.hosts = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        self.index = index
        self.key = () if id is None else (id,) if isinstance(id, str) else tuple(id)
        self.select = tuple(select)
        self.where = where
        self.delete_when = delete_when
        self.order_by = order_by
        self.dead_letter_index = dead_letter_index
        self.validate = validate
        self.refresh = refresh or epoch_visibility
        self.epoch_visibility = epoch_visibility
        self.create_index = create_index
        self.settings = dict(settings or {})
        self.accept_index = accept_index
        self.gc_deletes = gc_deletes
        self.bulk_bytes = bulk_bytes
        self.threads = threads
        self.patience = patience
        self.allow_insecure = allow_insecure
        self._options = {"request_timeout": _DEFAULT_TIMEOUT, **options}
        check_options(self.hosts, options, allow_insecure=allow_insecure)
        self._check_rows(empty_key=id is not None and not self.key)
        self._check_rejects(on_rejected)
        self._check_numbers()

    @property
    def spool(self) -> Literal[True]:
        """Always: the spool is the redo log."""
        return True

    @property
    def distribute_by(self) -> tuple[str, ...]:
        """Nothing: rows of one id may lie in any tasks if they have an order."""
        return ()

    @property
    def shown_hosts(self) -> list[str]:
        """The hosts without credentials."""
        return [shown_host(host) for host in self.hosts]

    def columns(self, row: str, schema: pa.Schema) -> list[str]:
        """Return the expressions that render action lines' ends and documents. Raises `ConfigurationError`."""
        return row_mapping.columns(row, schema, key=self.key, delete_when=self.delete_when, order_by=self.order_by)

    def writer(self, task: Task) -> ElasticsearchWriter:
        """Make the writer of one task attempt; it connects only to validate."""
        return ElasticsearchWriter(task, self._validator() if self.validate else None, self.bulk_bytes)

    def committer(self) -> ElasticsearchCommitter:
        """Make the driver's side; does not connect yet."""
        from epochsink.elasticsearch.committer import ElasticsearchCommitter  # noqa: PLC0415 - imports the client

        return ElasticsearchCommitter(self)

    def connect(self) -> elasticsearch.Elasticsearch:
        """Make a client; nothing is sent yet."""
        from epochsink.elasticsearch.connection import connect  # noqa: PLC0415 - imports the client

        return connect(self.hosts, self._options, self.threads + 1)

    def _validator(self) -> Poster:
        from epochsink.elasticsearch.bulk_request import Poster  # noqa: PLC0415 - imports the client

        return Poster(self.connect(), self.index, self.patience)

    def __repr__(self) -> str:
        shown = {"id": list(self.key) or None, **shown_options(self._options)}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"Elasticsearch({self.shown_hosts!r}, index={self.index!r}, {options})"

    def _check_rows(self, *, empty_key: bool) -> None:
        for name in filter(None, (self.index, self.dead_letter_index)):
            _check_name(name)
        if not self.index:
            raise ConfigurationError("index is empty", hint="name an index or an alias")
        if empty_key:
            raise ConfigurationError("id is an empty list", hint="leave it out for append-only documents")
        for option, value in (("delete_when", self.delete_when), ("order_by", self.order_by)):
            if value is not None and not self.key:
                raise ConfigurationError(
                    f"{option}={value!r} needs an id: without one no two rows concern the same document",
                    hint="give id= (a column, an SQL expression or a list)",
                )
        if seconds(self.gc_deletes) is None:
            raise ConfigurationError(
                f"gc_deletes={self.gc_deletes!r} is no duration", hint='write it as "1h" or "600s"'
            )

    def _check_rejects(self, on_rejected: str) -> None:
        if on_rejected not in {"stop", "dead_letter"}:
            raise ConfigurationError(f"on_rejected={on_rejected!r}", hint='choose "stop" or "dead_letter"')
        if (on_rejected == "dead_letter") != (self.dead_letter_index is not None):
            raise ConfigurationError(
                f"on_rejected={on_rejected!r} and dead_letter_index={self.dead_letter_index!r} do not go together",
                hint='give both on_rejected="dead_letter" and dead_letter_index=, or neither',
            )
        if self.dead_letter_index == self.index:
            raise ConfigurationError(
                f"dead_letter_index and index are both {self.index!r}",
                hint="give the dead letters an index of their own",
            )
        if self.dead_letter_index is not None and self.validate:
            raise ConfigurationError(
                "validate=True stops at what dead_letter_index= would set aside", hint="choose one of the two"
            )

    def _check_numbers(self) -> None:
        for option, value, lowest in (
            ("bulk_bytes", self.bulk_bytes, 1),
            ("threads", self.threads, 1),
            ("patience", self.patience, 0),
        ):
            if value < lowest:
                raise ConfigurationError(f"{option}={value!r} is below {lowest}", hint=f"give at least {lowest}")


def _check_name(name: str) -> None:
    allowed = re.fullmatch(r"[^A-Z\\/*?\"<>| ,#:\x00-\x1f]+", name)
    if allowed is None or name[0] in "-_+" or name in {".", ".."} or len(name.encode()) > _LONGEST_NAME:
        raise ConfigurationError(
            f"{name!r} cannot be the name of one index",
            hint=r'use lower case, none of \ / * ? " < > | , # : or space, not beginning with - _ or +, '
            f"at most {_LONGEST_NAME} bytes",
        )
