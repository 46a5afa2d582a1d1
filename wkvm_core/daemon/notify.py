"""sd_notify: what a service tells systemd, one datagram each."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends to `NOTIFY_SOCKET`; does nothing when there is none. (Protocol: sd_notify(3).)"""

    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address

    @classmethod
    def from_environment(cls) -> Notifier:
        """As systemd set it for this process."""
        return cls(os.environ.get("NOTIFY_SOCKET"))

    def ready(self, status: str) -> None:
        """Start-up is over."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`; while loading it also asks for more time."""
        self._send(f"STATUS={status}\nEXTEND_TIMEOUT_USEC=60000000")

    def stopping(self) -> None:
        """Shutdown has begun."""
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """The step loop made progress."""
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            try:
                out.sendto(text.encode(), self._address)
            except OSError:
                return  # nobody listens: the service manager went away, and the service goes on
