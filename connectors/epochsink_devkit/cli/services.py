"""`epochsink services`: start, show and stop Kafka, PostgreSQL and Elasticsearch."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from epochsink.cli.console import ATTENTION, AsJson, VerbOutput, answering
from epochsink.errors import ConfigurationError, ServiceError
from epochsink_devkit.services.artifacts import spark_packages
from epochsink_devkit.services.cache import cache_folder
from epochsink_devkit.services.kinds import SINKS, ServiceKind, make, prefetch
from epochsink_devkit.services.service import Service
from epochsink_devkit.services.state import Group, ProcessId, RunningServices, ServiceRecord

app = typer.Typer(
    help="Kafka, PostgreSQL, Elasticsearch and others on free loopback ports, without Docker or with it.",
    no_args_is_help=True,
    add_completion=False,
)
Name = Annotated[
    str | None,
    typer.Option(help="Services of this name, or of the folder with this path, in place of those of this folder."),
]
_console = Console()
_UP_SECONDS = 300
_DOWN_SECONDS = 90


@app.command()
def up(
    names: Annotated[
        list[ServiceKind] | None,
        typer.Argument(help="Which services; without a name Kafka, PostgreSQL and Elasticsearch."),
    ] = None,
    *,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave them running in the background.")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="Run containers instead of plain processes.")] = False,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Start the services that do not run yet, and keep them until Ctrl-C; data goes away with them.

    They belong to this folder, or to --name: 'status' and 'down' know no others. --json needs --detach.
    """
    chosen = list(dict.fromkeys(names or SINKS))
    with answering(as_json=as_json) as answer:
        if as_json and not detach:
            raise ConfigurationError("--json says what runs, and without --detach nothing stays", hint="add --detach")
        group = Group.of(name)
        running = {record.name for record in _records(group)}
        absent = [kind for kind in chosen if kind not in running]
        if present := [kind for kind in chosen if kind in running]:
            answer.say(f"Up already: {', '.join(present)}.")
        if not detach:
            if absent:
                _up_in_foreground(group, absent, docker=docker)
            return
        if absent:
            _up_detached(group, absent, docker=docker)
        _show(_records(group), answer)
        answer.say(f"They stay up until: epochsink services down{_option(name)}")


@app.command()
def status(*, name: Name = None, as_json: AsJson = False) -> None:
    """Show what runs, and where; status 3 when a service is not ready."""
    with answering(as_json=as_json) as answer:
        group = Group.of(name)
        records = _records(group)
        if not records:
            answer.values["services"] = []
            answer.say(
                f"No services are up for {group.title}. Start them: epochsink services up --detach{_option(name)}"
            )
            _say_others(group, answer)
            return
        _show(records, answer)
        if not all(record.ready for record in records):
            raise typer.Exit(ATTENTION)


@app.command()
def down(*, name: Name = None, as_json: AsJson = False) -> None:
    """Stop what `up` has started, and delete its data."""
    with answering(as_json=as_json) as answer:
        answer.values["stopped"] = []
        group = Group.of(name)
        states = group.states()
        if not states:
            group.forget_ended()
            answer.say(f"No services were up for {group.title}.")
            _say_others(group, answer)
            return
        owners = [owner for state in states if (owner := state.owner.process())]
        for owner in owners:
            owner.terminate()
        _, late = psutil.wait_procs(owners, _DOWN_SECONDS)
        for owner in late:
            owner.kill()  # the supervisors end the services
            answer.say(f"Process {owner.pid} did not stop within {_DOWN_SECONDS} s and was killed.")
        _wait_until_gone(states)
        group.forget_ended()
        answer.values["stopped"] = [record.name for state in states for record in state.services]
        answer.say(f"Stopped {', '.join(answer.values['stopped']) or 'services whose list is lost'}.")


@app.command("fetch")
def fetch_all(
    names: Annotated[
        list[ServiceKind] | None,
        typer.Argument(help="Which services; without a name Kafka, PostgreSQL and Elasticsearch."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Fetch all that services and Spark need, so that later starts need no network."""
    with answering(as_json=as_json) as answer:
        prefetch(list(dict.fromkeys(names or SINKS)))
        spark_packages()
        answer.values["folder"] = str(cache_folder())
        answer.say(f"Fetched into {cache_folder()}")


def _up_in_foreground(group: Group, kinds: list[ServiceKind], *, docker: bool) -> None:
    ended = _end_on_signals()
    services = [make(kind, docker=docker) for kind in kinds]
    with contextlib.ExitStack() as stack:
        # claimed before anything starts: of two at the same moment, one would forget the other's services
        stack.enter_context(group.claimed(kinds))
        if not docker:
            prefetch(kinds)
        for service in services:
            stack.callback(service.close)
        with _console.status(f"starting {', '.join(kinds)}"), ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), services))
        state = RunningServices(
            ProcessId.of(psutil.Process().pid), tuple(_record(service, docker) for service in services)
        )
        group.save(state)
        _show(state.services, VerbOutput())
        _console.print("Ctrl-C stops them.")
        while not ended.wait(1):
            for service in services:
                if not service.running:
                    raise ServiceError(f"{service.name} has ended by itself; the end of its log:\n{service.logs(20)}")


def _up_detached(group: Group, kinds: list[ServiceKind], *, docker: bool) -> None:
    if not docker:
        prefetch(kinds)
    log = group.folder / f"{'-'.join(kinds)}.log"
    command = [sys.executable, "-m", "epochsink_devkit.cli.services", "up", *kinds, "--name", group.title]
    with log.open("wb") as output:
        owner = subprocess.Popen(
            [*command, *(["--docker"] if docker else [])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with _console.status(f"starting {', '.join(kinds)}"):
        _wait_until_up(group, owner, log)


def _wait_until_up(group: Group, owner: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline:
        if any(state.owner.pid == owner.pid for state in group.states()):
            owner.returncode = 0  # it is left running on purpose: no warning about that
            return
        if owner.poll() is not None:
            said = log.read_text().strip().removeprefix("error: ")
            raise ServiceError(said or f"the services ended with status {owner.returncode}")
        time.sleep(0.1)
    owner.terminate()
    owner.wait(_DOWN_SECONDS)
    raise ServiceError(f"the services were not up within {_UP_SECONDS} s:\n{log.read_text().strip()}")


def _wait_until_gone(states: Sequence[RunningServices]) -> None:
    processes = [record.process for state in states for record in state.services if record.process]
    deadline = time.monotonic() + _DOWN_SECONDS
    while any(process.process() for process in processes):
        if time.monotonic() > deadline:
            raise ServiceError(f"a service still runs {_DOWN_SECONDS} s after its owner has ended")
        time.sleep(0.05)


def _records(group: Group) -> list[ServiceRecord]:
    return [record for state in group.states() for record in state.services]


def _say_others(group: Group, answer: VerbOutput) -> None:
    for other in group.others():
        names = ", ".join(record.name for record in _records(other))
        answer.say(f"Up for {other.title}: {names}; to name them from here: {_option(other.title).strip()}")


def _option(name: str | None) -> str:
    return f" --name {shlex.quote(name)}" if name else ""


def _record(service: Service, docker: bool) -> ServiceRecord:
    process = None if docker else ProcessId.of(service.pid)
    return ServiceRecord(service.name, service.version, service.address, service.port, str(service.log_path), process)


def _show(records: Sequence[ServiceRecord], answer: VerbOutput) -> None:
    answer.values["services"] = [{**asdict(record), "ready": record.ready} for record in records]
    if answer.as_json:
        return
    table = Table("service", "version", "pid", "ready")
    for record in records:
        pid = str(record.process.pid) if record.process else "container"
        table.add_row(record.name, record.version, pid, "yes" if record.ready else "[red]no[/red]")
    _console.print(table)
    for record in records:  # a line each, whole: to be copied
        _console.print(record.address, soft_wrap=True, highlight=False)


def _end_on_signals() -> threading.Event:
    """Return an event that Ctrl-C, SIGTERM and SIGHUP set; the stack of services is then unwound in order."""
    ended = threading.Event()

    def end(_signum: int, _frame: FrameType | None) -> None:
        ended.set()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    return ended


if __name__ == "__main__":
    app()
