"""What the proxy of the request faults takes for the end of a reply."""

from __future__ import annotations

import socket
import struct
from collections import deque

import pytest

from request_faults.framings import Postgres
from request_faults.wire import Fate, Request, Strike


@pytest.mark.parametrize("fate", [Fate.HELD, Fate.DIES_AFTER])
def test_a_login_that_was_held_ends_with_the_question_that_a_dead_driver_does_not_answer(fate: Fate) -> None:
    """The proxy waited 30 s for more, in each such plan."""
    question = struct.pack(">cii", b"R", 8 + 5, 10) + b"SASL\0"
    login = Request(b"", "connect", strike=Strike("connect", 0, fate))
    server, proxy = socket.socketpair()
    with server, proxy:
        server.sendall(question)
        server.shutdown(socket.SHUT_WR)
        assert list(Postgres().replies(proxy, deque([login]))) == [(question, login, fate is Fate.HELD)]
