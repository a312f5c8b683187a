"""How much of a file is still to be written for the first time: the file system's extent map."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_FS_IOC_FIEMAP = 0xC020660B  # linux/fiemap.h, as what follows
_HEAD = struct.Struct("=QQLLLL")  # start, length, flags, mapped extents, room for extents, 0
_EXTENT = struct.Struct("=QQQQQLLLL")  # offset, physical offset, length, 0, 0, flags, 0, 0, 0
_SYNC = 0x1
_LAST = 0x1
_UNWRITTEN = 0x800
_AT_ONCE = 256


def unwritten_bytes(path: Path) -> int | None:
    """Bytes of allocated extents that read as zeros because nothing was written there.

    None where the file system does not tell. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        total = at = 0
        while True:
            extents = _extents(fd, at)
            total += sum(length for _, length, flags in extents if flags & _UNWRITTEN)
            if not extents or extents[-1][2] & _LAST:
                return total
            at = extents[-1][0] + extents[-1][1]
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
            return None
        raise
    finally:
        os.close(fd)


def _extents(fd: int, start: int) -> list[tuple[int, int, int]]:
    """Offset, length and flags of the next extents."""
    answer = bytearray(_HEAD.size + _AT_ONCE * _EXTENT.size)
    _HEAD.pack_into(answer, 0, start, (1 << 64) - 1 - start, _SYNC, 0, _AT_ONCE, 0)
    fcntl.ioctl(fd, _FS_IOC_FIEMAP, answer)
    found: list[tuple[int, int, int]] = []
    for row in range(_HEAD.unpack_from(answer)[3]):
        extent = _EXTENT.unpack_from(answer, _HEAD.size + row * _EXTENT.size)
        found.append((extent[0], extent[2], extent[5]))
    return found
