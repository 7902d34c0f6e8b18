"""`epochsink services`: start, show and stop Kafka, PostgreSQL and Elasticsearch."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from epochsink.cli.console import ATTENTION, Answer, AsJson, answering
from epochsink.devkit.services.artifacts import spark_packages
from epochsink.devkit.services.cache import cache_folder
from epochsink.devkit.services.kinds import SINKS, Kind, make, prefetch
from epochsink.devkit.services.state import ProcessId, ServiceRecord, State
from epochsink.errors import ConfigurationError, ServiceError

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from epochsink.devkit.services.service import Service

app = typer.Typer(
    help="Kafka, PostgreSQL and Elasticsearch on free loopback ports, without Docker or with it.", no_args_is_help=True
)
_console = Console()
_UP_SECONDS = 300
_DOWN_SECONDS = 90


@app.command()
def up(
    names: Annotated[
        list[Kind] | None, typer.Argument(help="Which services; without a name Kafka, PostgreSQL and Elasticsearch.")
    ] = None,
    *,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave them running in the background.")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="Run containers instead of plain processes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the services and keep them until Ctrl-C; data goes away with them. --json needs --detach."""
    chosen = list(dict.fromkeys(names or SINKS))
    with answering(as_json=as_json) as answer:
        if as_json and not detach:
            raise ConfigurationError("--json says what runs, and without --detach nothing stays", hint="add --detach")
        if state := State.load():
            raise ServiceError(
                f"services are up already, started by process {state.owner.pid}", hint="epochsink services down"
            )
        if detach:
            _show(_up_detached(chosen, docker=docker), answer)
            answer.say("They stay up until: epochsink services down")
        else:
            # claimed before anything starts: of two at the same moment, one would forget the other's services
            with State.claimed():
                _up_in_foreground(chosen, docker=docker)


@app.command()
def status(*, as_json: AsJson = False) -> None:
    """Show what runs, and where; status 3 when a service is not ready."""
    with answering(as_json=as_json) as answer:
        state = State.load()
        if state is None:
            answer.values["services"] = []
            answer.say("No services are up. Start them: epochsink services up --detach")
            return
        _show(state, answer)
        if not all(record.ready for record in state.services):
            raise typer.Exit(ATTENTION)


@app.command()
def down(*, as_json: AsJson = False) -> None:
    """Stop what `up` has started."""
    with answering(as_json=as_json) as answer:
        answer.values["stopped"] = []
        state = State.load()
        owner = state.owner.process() if state else None
        if state is None or owner is None:
            State.remove()
            answer.say("No services were up.")
            return
        owner.terminate()
        try:
            owner.wait(_DOWN_SECONDS)
        except psutil.TimeoutExpired:
            owner.kill()  # the supervisors end the services
            answer.say(f"Process {owner.pid} did not stop within {_DOWN_SECONDS} s and was killed.")
        _wait_until_gone(state)
        State.remove()
        answer.values["stopped"] = [record.name for record in state.services]
        answer.say(f"Stopped {', '.join(answer.values['stopped']) or 'services whose list is lost'}.")


@app.command("fetch")
def fetch_all(
    names: Annotated[
        list[Kind] | None, typer.Argument(help="Which services; without a name Kafka, PostgreSQL and Elasticsearch.")
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


def _up_in_foreground(kinds: list[Kind], *, docker: bool) -> None:
    ended = _end_on_signals()
    services = [make(kind, docker=docker) for kind in kinds]
    if not docker:
        prefetch(kinds)
    with contextlib.ExitStack() as stack:
        for service in services:
            stack.callback(service.close)
        with _console.status(f"starting {', '.join(kinds)}"), ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), services))
        state = State(ProcessId.of(psutil.Process().pid), tuple(_record(service, docker) for service in services))
        state.save()
        stack.callback(State.remove)
        _show(state, Answer())
        _console.print("Ctrl-C stops them.")
        while not ended.wait(1):
            for service in services:
                if not service.running:
                    raise ServiceError(f"{service.name} has ended by itself; the end of its log:\n{service.logs(20)}")


def _up_detached(kinds: list[Kind], *, docker: bool) -> State:
    if not docker:
        prefetch(kinds)
    log = State.folder() / "services.log"
    command = [sys.executable, "-m", "epochsink.cli.services", "up", *kinds, *(["--docker"] if docker else [])]
    with log.open("wb") as output:
        owner = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    with _console.status(f"starting {', '.join(kinds)}"):
        return _wait_until_up(owner, log)


def _wait_until_up(owner: subprocess.Popen[bytes], log: Path) -> State:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline:
        if (state := State.load()) and state.owner.pid == owner.pid:
            owner.returncode = 0  # it is left running on purpose: no warning about that
            return state
        if owner.poll() is not None:
            said = log.read_text().strip().removeprefix("error: ")
            raise ServiceError(said or f"the services ended with status {owner.returncode}")
        time.sleep(0.1)
    owner.terminate()
    owner.wait(_DOWN_SECONDS)
    raise ServiceError(f"the services were not up within {_UP_SECONDS} s:\n{log.read_text().strip()}")


def _wait_until_gone(state: State) -> None:
    deadline = time.monotonic() + _DOWN_SECONDS
    while any(record.process and record.process.process() for record in state.services):
        if time.monotonic() > deadline:
            raise ServiceError(f"a service still runs {_DOWN_SECONDS} s after its owner has ended")
        time.sleep(0.05)


def _record(service: Service, docker: bool) -> ServiceRecord:
    process = None if docker else ProcessId.of(service.pid)
    return ServiceRecord(service.name, service.version, service.address, service.port, str(service.log_path), process)


def _show(state: State, answer: Answer) -> None:
    answer.values["services"] = [{**asdict(record), "ready": record.ready} for record in state.services]
    if answer.as_json:
        return
    table = Table("service", "version", "pid", "ready")
    for record in state.services:
        pid = str(record.process.pid) if record.process else "container"
        table.add_row(record.name, record.version, pid, "yes" if record.ready else "[red]no[/red]")
    _console.print(table)
    for record in state.services:  # a line each, whole: to be copied
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
