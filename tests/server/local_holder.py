"""A client process that holds a lease until it is killed.

local_holder.py SOCKET KEYS_HEX fork|alone    prints the pids of itself and of a forked child that
has the socket too (0: none), once the lease is held
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from server import local_serving as serving
from server.local_wire import LocalWire


def main() -> None:
    path, count, fork = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fork"
    wire = LocalWire(path)
    wire.open()
    granted = wire.acquire(serving.run(count), 1)
    assert len(granted.rows) == count
    child = os.fork() if fork else 0
    if child or not fork:
        print(os.getpid(), child, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
