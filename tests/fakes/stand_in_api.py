"""Stands in for wkvm-api: answers on the socket it inherits, ready while the core's file is there."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
print("flags", *sys.argv[1:], file=sys.stderr, flush=True)
core = Path(flags["--core"].removeprefix("ipc://"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("pid", os.getpid(), file=sys.stderr, flush=True)
listener = socket.socket(fileno=int(flags["--fd"]))
while True:
    connection, _ = listener.accept()
    with connection:
        request = connection.recv(65536).decode()
        route = request.split(" ")[1]
        status, body = "404 Not Found", ""
        if route == "/ready":
            status = "200 OK" if core.exists() else "503 Service Unavailable"
        elif route == "/v1/models":
            status, body = "200 OK", json.dumps({"data": [{"id": core.read_text()}]})
        elif route == "/metrics":
            status, body = "200 OK", f"wkvm_api_pid {os.getpid()}\n"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
