"""Listening sockets: stale Unix sockets are replaced, live ones and taken ports refused."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from kvstored.config import TcpAddress
from kvstored.errors import KvstoredError

BACKLOG = 64


class ListenError(KvstoredError):
    """An address cannot be listened on."""


def prepare_directory(path: Path) -> None:
    """Make a directory for sockets, or check that it is safe to use one that exists.

    Raises ListenError where others could put a socket of their own in our place: it must belong to
    this user or root, and only its owner (and group, as systemd's RuntimeDirectory may) may write.
    A sticky directory, such as /tmp, will do for a path that the operator chose.
    """
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ListenError(
            f"the directory {path} for sockets cannot be made: {error.strerror}",
            "set listen.unix to a path in a directory of yours",
        ) from error
    if found.st_uid not in (0, os.geteuid()):
        raise ListenError(
            f"the directory {path} for sockets belongs to user {found.st_uid}",
            "remove it, or set listen.unix to a path in a directory of yours",
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ListenError(f"everybody may write in {path}", f"chmod o-w {path}")


def refuse_live_socket(path: Path) -> None:
    """Raise ListenError when something answers on a Unix socket, or the path is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is not a socket", "remove it, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # stale: its process is gone
        except OSError as error:
            # A full backlog and the like: somebody is there.
            raise ListenError(f"the socket {path} is in use: {error}", "stop its owner") from error
    raise ListenError(
        f"another process listens on {path}", "stop it, or set another path for this daemon"
    )


def listen_unix(path: Path, mode: int = 0o660) -> socket.socket:
    """A listening Unix socket, in place of a stale one. Raises ListenError.

    It is bound under a name of its own and renamed: it never stands there with another mode.
    """
    prepare_directory(path.parent)
    refuse_live_socket(path)
    draft = path.with_name(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(draft))
        draft.chmod(mode)
        listener.listen(BACKLOG)
        draft.rename(path)
    except OSError as error:
        listener.close()
        draft.unlink(missing_ok=True)
        raise ListenError(
            f"cannot listen on {path}: {error.strerror}", "set another path"
        ) from error
    return listener


def listen_tcp(address: TcpAddress) -> socket.socket:
    """A listening TCP socket. Raises ListenError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: {error.strerror or error}", "set another address"
        ) from error
