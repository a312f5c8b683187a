"""Where a client finds its daemon when nobody says: the one copy of that rule."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOCKET = "kvstored.sock"
SYSTEM_RUNTIME_DIR = Path("/run/kvstored")
"""Where the sockets of a daemon are that the service manager, a container or root has started."""


def default_target(environ: Mapping[str, str] | None = None) -> str:
    """The target of this machine's daemon, for KVClient: "unix:///path" or "dns:///host:port".

    $KVSTORED_TARGET if it is set; else the socket of a daemon that this user has started without
    settings; else, where there is none but the system has one, the system's. Connects to nothing.
    `environ` None: os.environ. See docs/configuration.md, `listen.unix`.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get("KVSTORED_TARGET"):
        return given
    own = runtime_dir(environ)
    folder = SYSTEM_RUNTIME_DIR if not _listens(own) and _listens(SYSTEM_RUNTIME_DIR) else own
    return f"unix://{folder / SOCKET}"


def local_socket_path(unix: Path) -> Path:
    """The local session's socket, beside the gRPC one; see docs/protocol.md."""
    return unix.with_name(f"{unix.stem}-local{unix.suffix}")


def runtime_dir(environ: Mapping[str, str], uid: int | None = None) -> Path:
    """Where the sockets of a daemon are that a user has started: in the session's runtime
    directory, else in a directory of the user's own (root's is /run/kvstored).

    `uid` None: this process's.
    """
    if given := environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "kvstored"
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return SYSTEM_RUNTIME_DIR
    return Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"kvstored-{uid}"


def _listens(folder: Path) -> bool:
    """Whether there is a socket; a daemon that was killed leaves one behind."""
    try:
        return stat.S_ISSOCK((folder / SOCKET).stat().st_mode)
    except OSError:
        return False
