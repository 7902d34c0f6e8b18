"""Find what sinks have left in a server, without a checkpoint, and end it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from epochsink.credentials import refuse_unencoded, without_userinfo
from epochsink.errors import ConfigurationError
from epochsink.sink import Remnant

if TYPE_CHECKING:
    from rich.console import Console


class RemnantSource(Protocol):
    """A server that remnants are looked for in."""

    def remnants(self) -> list[Remnant]:
        """Return what every sink has left."""

    def end(self, remnant: Remnant) -> None:
        """End one of them that may be ended (`Remnant.stays`)."""

    def close(self) -> None:
        """Release the connections."""


@contextmanager
def target_of(
    dsn: str | None, bootstrap_servers: str | None, hosts: str | None, opensearch: str | None, options: Path | None
) -> Iterator[RemnantSource]:
    """Yield the one server that is given, connected. Raises `ConfigurationError` if it is not one."""
    places = {"postgres": dsn, "kafka": bootstrap_servers, "elasticsearch": hosts, "opensearch": opensearch}
    given = {extra: place for extra, place in places.items() if place is not None}
    if len(given) != 1:
        raise ConfigurationError(
            "name one server to look in",
            hint="--dsn postgresql://..., --bootstrap-servers host:9092, --hosts https://host:9200 or --opensearch "
            "https://host:9200",
        )
    ((extra, place),) = given.items()
    try:
        with closing(_open(extra, place, _options(options))) as target:
            yield target
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"this server's client is not installed: no module {missing.name}",
            hint=f'pip install "epochsink[{extra}]"',
        ) from missing


def one(target: RemnantSource, name: str) -> Remnant:
    """Return the remnant of this name. Raises `ConfigurationError` if there is none, or its driver is connected."""
    remnant = next((each for each in target.remnants() if each.name == name), None)
    if remnant is None:
        raise ConfigurationError(
            f"epochsink has left nothing named {name!r} there",
            hint="leave --end out to list what there is; give the whole name",
        )
    if remnant.stays:
        raise ConfigurationError(f"{name} must stay: {remnant.stays}", hint="leave it there; it takes one document")
    if remnant.in_use:
        raise ConfigurationError(
            f"{name} belongs to a query whose driver is connected now", hint="stop that query first"
        )
    return remnant


def show(remnants: Sequence[Remnant], console: Console) -> None:
    """Print what was found, a block each that fits a narrow terminal; names are whole, to be copied."""
    if not remnants:
        console.print("epochsink has left nothing there")
        return
    for each in remnants:
        for line in lines_of(each):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(
        "\nIf its checkpoint exists, start the query, or type 'epochsink recover' or 'epochsink abandon' with it: they "
        "know what is recorded.\nIf not: the same command with --end NAME.",
        style="bold",
        highlight=False,
    )


def lines_of(remnant: Remnant) -> list[str]:
    """Return a remnant in lines: its name, whose it is, its age and what it blocks."""
    epoch = "" if remnant.epoch is None else f", epoch {remnant.epoch}"
    age = "unknown" if remnant.since is None else timedelta(seconds=max(0, int(time.time() - remnant.since)))
    facts = [
        f"{remnant.kind} of {remnant.label or remnant.key}, generation {remnant.generation}{epoch}",
        f"age {age}" + (f", owner {remnant.owner}" if remnant.owner else ""),
        *(f"blocks {held}" for held in remnant.holds),
        *([f"must stay: {remnant.stays}"] if remnant.stays else ()),
        _CONNECTED[remnant.in_use],
    ]
    return [remnant.name, *(f"  {fact}" for fact in facts)]


_CONNECTED: Final = {True: "its driver is connected now", False: "its driver is not connected", None: "driver unknown"}


def _open(extra: str, place: str, options: dict[str, Any]) -> RemnantSource:
    # imported where they are needed: each sink's client is an extra of its own
    if extra == "postgres":
        from epochsink.postgres.remnants import SweptDatabase  # noqa: PLC0415 - see above

        return SweptDatabase(place, options)
    if extra == "kafka":
        from epochsink.kafka.remnants import Brokers  # noqa: PLC0415 - see above

        return Brokers(place, options)
    option = "--hosts" if extra == "elasticsearch" else "--opensearch"
    hosts = place.split(",")
    for url in hosts:
        refuse_unencoded(option, url)
    try:
        return _search_cluster(extra, hosts, options)
    except (TypeError, ValueError) as unusable:
        # so the client says that an address has no scheme, or that it has no such option; it may quote a password
        why = "" if "@" in place else f": {unusable}"
        raise ConfigurationError(
            f"{option} {','.join(map(without_userinfo, hosts))} cannot be used{why}",
            hint=f"{option} https://host:9200; --options has the client's",
        ) from (unusable if why else None)


def _search_cluster(extra: str, hosts: list[str], options: dict[str, Any]) -> RemnantSource:
    from epochsink.elasticsearch.remnants import Node  # noqa: PLC0415 - see `_open`

    if extra == "opensearch":
        from opensearchpy import OpenSearch  # noqa: PLC0415 - see `_open`

        from epochsink.opensearch.server import OpenSearchServer  # noqa: PLC0415 - see `_open`

        return Node(OpenSearchServer(OpenSearch(hosts, **options)))
    from elasticsearch import Elasticsearch  # noqa: PLC0415 - see `_open`

    from epochsink.elasticsearch.server import ElasticsearchServer  # noqa: PLC0415 - see `_open`

    return Node(ElasticsearchServer(Elasticsearch(hosts, **options)))


def _options(path: Path | None) -> dict[str, Any]:
    """Read NAME=VALUE lines, as Kafka's own tools do: a password does not belong on a command line."""
    lines = [] if path is None else path.read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
