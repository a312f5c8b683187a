"""Who is at the other end of a local session, and how the daemon learns of its death.

Constants: linux/socket.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5


class PeerGoneError(OSError):
    """The process that connected has ended already."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, whoever holds its socket now.

    `pid` 0: it lives in a pid namespace that this process cannot see into. `pidfd` becomes readable
    when it ends; it is the owner's to close. None: nobody can tell, and only the socket's end ends
    the session.
    """

    pid: int
    uid: int
    gid: int
    pidfd: int | None


def identify(connection: socket.socket) -> Peer:
    """The process that connected a Unix stream socket.

    Raises PeerGoneError when it has ended, OSError when there is no descriptor left for it.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid, gid, _pidfd(connection, pid))


def _pidfd(connection: socket.socket, pid: int) -> int | None:
    # The kernel's own names the very process that connected; by number it might be a later one.
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if not pid:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise PeerGoneError(f"process {pid} has ended") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None  # no pidfds here
