"""systemd's notification protocol: datagrams of `NAME=value` lines to $NOTIFY_SOCKET.

Source: sd_notify(3) and sd_watchdog_enabled(3). Outside systemd every method does nothing.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger("kvstored.sdnotify")

_SEND_TIMEOUT_S = 0.5


class Notifier:
    """Tells the service manager what the daemon is doing.

    A manager that does not listen, or not in time, costs a log line and nothing else: the daemon's
    work does not depend on it.
    """

    def __init__(self, address: str = "", watchdog_interval_s: float = 0.0) -> None:
        """`address`: NOTIFY_SOCKET; "" for none. `watchdog_interval_s`: 0 for none."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_interval_s = watchdog_interval_s

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], pid: int | None = None) -> Notifier:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID.

        The interval is half of what the manager allows, as sd_watchdog_enabled(3) recommends. A
        watchdog meant for another process is not ours to feed.
        """
        address = environ.get("NOTIFY_SOCKET", "")
        usec, for_pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        ours = not for_pid or for_pid == str(os.getpid() if pid is None else pid)
        interval_s = int(usec) / 2e6 if ours and usec.isdecimal() else 0.0
        return cls(address, interval_s if address else 0.0)

    def ready(self, status: str) -> None:
        """READY=1: the daemon serves."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """STOPPING=1: the daemon is on its way out."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """STATUS=...: one line for `systemctl status`."""
        self._send(f"STATUS={status}")

    def watchdog(self) -> None:
        """WATCHDOG=1: still alive."""
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """EXTEND_TIMEOUT_USEC: a start or stop that makes progress may take that much longer."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_SEND_TIMEOUT_S)
                sock.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning(
                "the service manager could not be told",
                extra={"fields": {"message": message.split("\n")[0], "error": str(error)}},
            )
