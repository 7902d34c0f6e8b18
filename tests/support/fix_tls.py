"""A search server that speaks TLS, with a certificate that no authority has signed."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest
from http_proxy import Answer, Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_MARKER = Answer(404, b'{"found":false}')


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate for 127.0.0.1, signed by itself, with its key in the same file."""
    program = shutil.which("openssl")
    assert program is not None, "these tests make a certificate with openssl"
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + path.with_name("server.pem.crt").read_bytes())
    return path


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[Proxy]:
    proxy = Proxy(None, lambda _: NO_MARKER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    proxy.server.socket = context.wrap_socket(proxy.server.socket, server_side=True)
    with proxy:
        yield proxy
