"""Processes that connect for a test and do no more than live, so that a daemon can see them die.

As a script it is what makes them: for each path that it is sent it forks a child, which connects
there and sends its pid and its socket back. All of them end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PID = struct.Struct("i")


@dataclass(frozen=True)
class Process:
    """One that has connected. Its socket is with the test, its life is its own."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        """End it by SIGKILL. Call it once."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)


class Peers:
    """Makes such processes."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._maker = subprocess.Popen(
                [sys.executable, "-IS", __file__, str(fd)], pass_fds=[fd]
            )

    def connect(self, path: Path) -> tuple[socket.socket, Process]:
        """A socket that another process has connected, and that process."""
        self._channel.send(str(path).encode())
        message, (fd,), _, _ = socket.recv_fds(self._channel, 64, 1)
        (pid,) = _PID.unpack(message)
        return socket.socket(fileno=fd), Process(pid, os.pidfd_open(pid))

    def close(self) -> None:
        """End all that still live."""
        self._channel.close()
        self._maker.wait()


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    alive, kept = os.pipe()
    while path := channel.recv(4096):
        if os.fork() == 0:
            os.close(kept)
            with channel, socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                socket.send_fds(channel, [_PID.pack(os.getpid())], [connection.fileno()])
            os.read(alive, 1)  # until the maker has ended
            os._exit(0)


if __name__ == "__main__":
    main()
