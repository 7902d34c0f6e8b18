"""The servers on hosts of their own."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from nemesis.services import Server

if TYPE_CHECKING:
    from pathlib import Path

    from nemesis.hosts import Host


def test_the_password_is_known_while_a_server_becomes_a_copy_of_another(tmp_path: Path) -> None:
    """A driver may be started in that moment."""
    (tmp_path / "primary").mkdir()
    (tmp_path / "primary" / "password").write_text("secret")
    primary = cast("Server", SimpleNamespace(home=tmp_path / "primary"))
    host = cast("Host", SimpleNamespace(folder=tmp_path, address="127.0.0.1", name="postgres1"))
    server = Server(host, "", [])
    server.home_of_copy(primary)
    assert "secret" in server.dsn
    shutil.rmtree(server.home)
    assert "secret" in server.dsn
