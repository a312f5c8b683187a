"""A client that tries to change the segment it was given. Prints what went, as JSON.

local_intruder.py SOCKET UID DAEMON_PID DAEMON_FD    UID: who it becomes once it is connected
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from server import local_serving as serving
from server.local_wire import LocalWire
from tiers import ram_seal_trial as trial


def main() -> None:
    path, (uid, daemon_pid, daemon_fd) = Path(sys.argv[1]), map(int, sys.argv[2:])
    wire = LocalWire(path)
    wire.open()
    wire.keep_fds = True
    granted = wire.acquire(serving.run(4), 1)
    ((segment_id, fd),) = wire.segment_fds.items()
    trial.SIZE_BYTES = len(wire.segments[segment_id])
    trial.become(uid)
    done = []
    for name, attempt in trial.attempts(fd, daemon_pid, daemon_fd).items():
        try:
            attempt()
        except OSError:
            continue
        done.append(name)
    wrong = [r[0] for r in granted.rows if wire.bytes_of(r) != serving.content(r[0])]
    print(json.dumps({"done": done, "wrong": wrong, "rows": len(granted.rows)}))


if __name__ == "__main__":
    main()
