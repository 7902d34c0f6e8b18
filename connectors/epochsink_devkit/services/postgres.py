"""Run PostgreSQL as plain processes."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.accounts import Account, refuse_nameless_user, unprivileged_account
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.cache import build_once, cache_folder, world_readable_cache_folder
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.ports import LOOPBACK, answers
from epochsink_devkit.services.service import PostgresService

# fsync stays on, because tests with SIGKILL check that committed epochs survive.
DEFAULTS: dict[str, str | int | bool] = {
    "max_prepared_transactions": 64,
    "max_connections": 200,
    "unix_socket_directories": "",
    "log_line_prefix": "%m [%p] ",
}


_KEPT_IN = "password"


class LocalPostgres(LocalService, PostgresService):
    """A PostgreSQL server; `settings` are configuration parameters, as in postgresql.conf."""

    version = versions.POSTGRES
    _stop_signal = signal.SIGINT  # "fast": clients are disconnected, a checkpoint is written

    @property
    def password(self) -> str:
        # Kept next to the data, so that the next object on the same folder can use it.
        return (self.home / _KEPT_IN).read_text()

    def _account(self) -> Account | None:
        return unprivileged_account()

    def _prepare(self) -> None:
        account = self._account()
        if account is None:
            refuse_nameless_user()
        self._make_password(account)
        self.data.mkdir(mode=0o700)
        if account:
            os.chown(self.data, account.uid, account.gid)
            if not account.can_enter(self.home):
                raise ServiceError(
                    f"PostgreSQL runs as {account.name} and cannot enter {self.home}",
                    hint="choose a folder that other accounts may pass through (chmod o+x)",
                )
        command = [
            *(str(_program("initdb", account)), "--pgdata", str(self.data), "--username", "postgres"),
            *("--auth", "scram-sha-256", "--pwfile", str(self.home / _KEPT_IN)),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env=self._environment(),
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
        if done.returncode != 0:
            raise ServiceError(f"initdb failed with status {done.returncode}:\n{done.stdout}{done.stderr}")

    def _make_password(self, account: Account | None) -> None:
        path = self.home / _KEPT_IN
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
        if account:  # initdb runs as this account and reads the file; this process is root and can read it anyway
            os.chown(path, account.uid, account.gid)

    def _command(self) -> list[str]:
        settings = {**DEFAULTS, **self.settings, "listen_addresses": LOOPBACK, "port": self.port}
        options = [f"--{name}={self._with_port(value)}" for name, value in settings.items()]
        return [str(_program("postgres", self._account())), "-D", str(self.data), *options]

    def _is_ready(self) -> bool:
        # As pg_ctl --wait does: line 1 is the postmaster's pid, line 8 its state.
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        ready = len(lines) > 7 and int(lines[0]) == self.pid and lines[7].strip() == "ready"  # noqa: PLR2004
        return ready and answers(self.port)


def _program(name: str, account: Account | None) -> Path:
    """Return the path of a PostgreSQL program, unpacked where the account that runs it can reach it."""
    caches: list[Callable[[], Path]] = [cache_folder]
    if account:
        caches.append(world_readable_cache_folder)
    for cache in caches:
        folder = cache()
        if account is None or account.can_enter(folder):
            return build_once(folder / "programs" / f"postgres-{versions.POSTGRES}", unpack) / "bin" / name
    raise ServiceError(
        f"{account.name if account else 'this account'} can enter none of the cache folders",
        hint="let EPOCHSINK_CACHE name a folder that other accounts may pass through",
    )


def unpack(target: Path) -> None:
    """Unpack the programs into an empty folder."""
    bundle = versions.postgres_bundle()
    jar = fetch(bundle) / bundle.artifacts[0].file_name
    archive = target / "postgres.txz"
    with zipfile.ZipFile(jar) as packed:
        inner = next(entry for entry in packed.namelist() if entry.endswith(".txz"))
        with packed.open(inner) as source, archive.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    with tarfile.open(archive) as programs:
        # As an attribute, because Python before 3.11.4 does not have the argument.
        programs.extraction_filter = getattr(tarfile, "data_filter", None)
        programs.extractall(target)  # noqa: S202 - the jar around it has the recorded digest
    archive.unlink()
