"""Unix sockets that appear with the right permissions and in one step."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from kvstored.errors import KvstoredError

_MAX_PATH_BYTES = 107  # sun_path of unix(7), less its NUL


class ListenError(KvstoredError):
    """An address cannot be listened on."""


def admin_socket_path(unix_path: Path) -> Path:
    """The operators' socket beside the engines' one."""
    return unix_path.with_name(f"{unix_path.stem}-admin{unix_path.suffix}")


class UnixSocket:
    """One listening path. Bind at `address`, then `publish`; `remove` at the end.

    Raises ListenError when the path cannot be used.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ListenError(
                f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes",
                "set listen.unix to a shorter path",
            )
        _refuse_unusable(path)
        try:
            # Nobody else can enter it, so that no one connects before `publish`.
            self._private = Path(tempfile.mkdtemp(prefix=".k", dir=path.parent))
        except OSError as error:
            raise ListenError(
                f"cannot make a directory in {path.parent}: {error.strerror}",
                "set listen.unix to a path in a directory of yours",
            ) from error
        self._bound = self._private / "s"
        self._identity: tuple[int, int] | None = None

    @property
    def address(self) -> str:
        """For gRPC."""
        return f"unix:{self._bound}"

    def publish(self) -> None:
        """Give the listening socket its mode and its name, replacing a stale one."""
        self._bound.chmod(self._mode)
        found = self._bound.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._bound.rename(self._path)
        self._private.rmdir()

    def remove(self) -> None:
        """Take the path away if it is still this socket."""
        if self._identity is None:
            self._bound.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._private.rmdir()
            return
        with contextlib.suppress(FileNotFoundError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self._path.unlink()


def _refuse_unusable(path: Path) -> None:
    """Raise ListenError unless the path is free or holds a stale socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"{path} cannot be used: {error.strerror}", "set another path") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenError(f"{path} exists and is not a socket", "remove it, or set another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # stale: its process is gone
        except OSError as error:
            # A full backlog and the like: somebody is there.
            raise ListenError(f"{path} is in use: {error}", "stop its owner") from error
    raise ListenError(f"another process listens on {path}", "stop it, or set another path")
