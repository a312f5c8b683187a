"""Removes what a benchmark made once nobody uses it any longer, however that came about.

Usage: python -m kvstored.bench.leftovers PATH...

Waits until its standard input ends, which is when everyone who holds the other end of the pipe is
gone, killed or not; then removes directory trees, and control groups (directories under
/sys/fs/cgroup), which only their removal can undo.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_EMPTY_S = 30.0


@contextlib.contextmanager
def removed(paths: Sequence[Path]) -> Iterator[int]:
    """Have the paths removed at the end. Gives a descriptor that keeps them for whoever inherits
    it; the removal waits for all of those.
    """
    reading, writing = os.pipe()
    try:
        # A session of its own: what interrupts the benchmark's terminal does not stop it.
        remover = subprocess.Popen(
            [sys.executable, "-m", "kvstored.bench.leftovers", *map(str, paths)],
            stdin=reading,
            start_new_session=True,
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
        remover.wait()


def remove(path: Path) -> None:
    """Remove a directory tree or a control group; what is not there is no matter."""
    if path.is_relative_to(CGROUPS):
        _remove_group(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove_group(path: Path) -> None:
    end = time.monotonic() + _EMPTY_S
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # Its last process is not quite gone; version 1 has nothing that would tell.
            if error.errno != errno.EBUSY or time.monotonic() > end:
                sys.stderr.write(f"{path} could not be removed: {error}\n")
                return
            time.sleep(0.02)
        else:
            return


def main() -> None:
    """See the module."""
    sys.stdin.buffer.read()
    for word in sys.argv[1:]:
        remove(Path(word))


if __name__ == "__main__":
    main()
