"""Find what sinks have left in a server, without a checkpoint, and end it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol, Self

from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from epochsink.identity import Remnant


class Target(Protocol):
    """A server that remnants are looked for in."""

    def remnants(self) -> list[Remnant]:
        """Return what every sink has left."""

    def end(self, remnant: Remnant) -> None:
        """End one of them."""

    def close(self) -> None:
        """Release the connections."""


class Search:
    """The servers to look in, each given or not."""

    def __init__(self, dsn: str | None, bootstrap_servers: str | None, hosts: str | None, options: Path | None) -> None:
        if (dsn, bootstrap_servers, hosts).count(None) != 2:  # noqa: PLR2004 - all but one
            raise ConfigurationError(
                "name one server to look in",
                hint="--dsn postgresql://..., --bootstrap-servers host:9092 or --hosts https://host:9200",
            )
        self._target = self._open(dsn, bootstrap_servers, hosts, _options(options))

    def find(self) -> list[Remnant]:
        """Return what is left there."""
        return self._target.remnants()

    def one(self, name: str) -> Remnant:
        """Return the remnant of this name. Raises `ConfigurationError` if there is none, or its driver is connected."""
        found = next((one for one in self.find() if one.name == name), None)
        if found is None:
            raise ConfigurationError(
                f"nothing here is named {name!r}", hint="leave --end out to list what there is; give the whole name"
            )
        if found.in_use:
            raise ConfigurationError(
                f"{name} belongs to a query whose driver is connected now", hint="stop that query first"
            )
        return found

    def end(self, remnant: Remnant) -> None:
        """End it."""
        self._target.end(remnant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._target.close()

    @staticmethod
    def _open(dsn: str | None, bootstrap_servers: str | None, hosts: str | None, options: dict[str, str]) -> Target:
        # imported where they are needed: each sink's client is an extra of its own
        try:
            if dsn is not None:
                from epochsink.postgres.remnants import Database  # noqa: PLC0415 - see above

                return Database(dsn, options)
            if bootstrap_servers is not None:
                from epochsink.kafka.remnants import Brokers  # noqa: PLC0415 - see above

                return Brokers(bootstrap_servers, options)
            from epochsink.elasticsearch.remnants import Node  # noqa: PLC0415 - see above

            return Node((hosts or "").split(","), options)
        except ModuleNotFoundError as missing:
            extra = "postgres" if dsn else "kafka" if bootstrap_servers else "elasticsearch"
            raise ConfigurationError(
                f"this server's client is not installed: no module {missing.name}",
                hint=f'pip install "epochsink[{extra}]"',
            ) from missing


def show(remnants: Sequence[Remnant], console: Console) -> None:
    """Print what was found, a block each that fits a narrow terminal; names are whole, to be copied."""
    if not remnants:
        console.print("nothing of epochsink's is left there")
        return
    for one in remnants:
        epoch = "" if one.epoch is None else f", epoch {one.epoch}"
        facts = [f"{one.kind} of {one.label or one.key}, generation {one.generation}{epoch}"]
        facts.append(f"age {_age(one.since)}" + (f", owner {one.owner}" if one.owner else ""))
        facts += [f"blocks {held}" for held in one.holds]
        facts.append(_CONNECTED[one.in_use])
        for line in (one.name, *(f"  {fact}" for fact in facts)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(
        "\nIf its checkpoint exists, type epochsink recover or epochsink abandon with it: they know what is recorded.\n"
        "If not: the same command with --end NAME.",
        style="bold",
        highlight=False,
    )


_CONNECTED: Final = {True: "its driver is connected now", False: "its driver is not connected", None: "driver unknown"}


def _age(since: float | None) -> str:
    if since is None:
        return "unknown"
    seconds = max(0, int(time.time() - since))
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s"


def _options(path: Path | None) -> dict[str, str]:
    """Read NAME=VALUE lines, as Kafka's own tools do: a password does not belong on a command line."""
    lines = [] if path is None else path.read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
