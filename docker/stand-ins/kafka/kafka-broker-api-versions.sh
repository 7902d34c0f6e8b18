#!/usr/bin/python3
"""Asks a broker for the versions of its API: `--bootstrap-server HOST:PORT`; status 0 if it answers."""

import socket
import struct
import sys

host, _, port = sys.argv[sys.argv.index("--bootstrap-server") + 1].rpartition(":")
client = b"health"
request = struct.pack(">hhih", 18, 0, 1, len(client)) + client
with socket.create_connection((host, int(port)), timeout=10) as broker:
    broker.sendall(struct.pack(">i", len(request)) + request)
    answer = broker.recv(10)
sys.exit(0 if len(answer) == 10 and struct.unpack(">iih", answer)[1:] == (1, 0) else 1)
