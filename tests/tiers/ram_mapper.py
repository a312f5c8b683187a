"""A client process for test_ram_retiring.py: maps what it is sent, unmaps when told.

ram_mapper.py SOCKET_FD: "map SIZE" with a descriptor is answered with "sum CRC32", "unmap" (all)
with "unmapped". It ends when the socket does.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import zlib


def serve(channel: socket.socket) -> None:
    """Obey until the other end is closed."""
    maps: list[mmap.mmap] = []
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 100, 1)
        if not message:
            return
        if message == b"unmap":
            for each in maps:
                each.close()
            maps.clear()
            channel.send(b"unmapped")
            continue
        mapped = mmap.mmap(fds[0], int(message.split()[1]), mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fds[0])
        maps.append(mapped)
        channel.send(b"sum %d" % zlib.crc32(mapped))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
