"""Choose the account for a server that refuses to run as root."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from epochsink.errors import ServiceError

_CANDIDATES = ("postgres", "nobody")


@dataclass(frozen=True)
class Account:
    """A user id and its group id."""

    name: str
    uid: int
    gid: int

    def can_enter(self, folder: Path) -> bool:
        """Whether this account may enter `folder` and every folder above it."""
        return all(self._may_search(part.stat()) for part in (folder, *folder.resolve().parents))

    def _may_search(self, facts: os.stat_result) -> bool:
        if facts.st_uid == self.uid:
            return bool(facts.st_mode & stat.S_IXUSR)
        if facts.st_gid == self.gid:
            return bool(facts.st_mode & stat.S_IXGRP)
        return bool(facts.st_mode & stat.S_IXOTH)


def unprivileged_account() -> Account | None:
    """Return the account to switch to if this process is root, else None.

    Raises `ServiceError` if none of the candidates exists.
    """
    if os.geteuid() != 0:
        return None
    for name in _CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ServiceError(
        f"PostgreSQL refuses to run as root and none of the accounts {', '.join(_CANDIDATES)} exists",
        hint="run as an ordinary user, or add one of them: useradd --system postgres",
    )


def refuse_nameless_user() -> None:
    """Raise `ServiceError` if this process' user id has no name, as in a container started with a numeric user.

    initdb always looks up the name, and its own message does not say what to do.
    """
    uid = os.geteuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        raise ServiceError(
            f"the user id {uid} has no name on this machine, and PostgreSQL's initdb needs one",
            hint=f"add one (echo 'dev:x:{uid}:{os.getegid()}::/tmp:/bin/sh' >> /etc/passwd, as root), or run as a user "
            "that has one",
        ) from None
