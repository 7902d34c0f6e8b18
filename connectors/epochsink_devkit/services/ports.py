"""Find loopback ports that stay free while a service restarts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from epochsink.errors import ServiceError

LOOPBACK = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000
_ATTEMPTS = 200
# of the operating system's own: a process that seeds `random`, as tests do, would get the same ports again
_CHOOSE = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return an unused loopback port outside the range of outgoing connections.

    The system never gives a port below the ephemeral range to a client's connection. So a service can restart on its
    port, and no client connects to itself while the service is down. No port is given twice in one process: what asked
    for the first one may not listen on it yet.
    """
    low, high = _candidates()
    for _ in range(_ATTEMPTS):
        port = _CHOOSE.randint(low, high)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise ServiceError(f"no free port found on {LOOPBACK} between {low} and {high}")


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def answers(port: int, timeout: float = 1.0) -> bool:
    """Whether something accepts connections on this loopback port."""
    try:
        socket.create_connection((LOOPBACK, port), timeout).close()
    except OSError:
        return False
    return True


def _candidates() -> tuple[int, int]:
    try:
        first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = 32_768
    if first_ephemeral > _LOWEST + _ATTEMPTS:
        return _LOWEST, first_ephemeral - 1
    return _LOWEST, 65_535  # the ephemeral range leaves too few ports: use any port
