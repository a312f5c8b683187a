"""`make bench-striping`: four throttled volumes against bare reads of all four.

Usage: python -m kvstored.bench.striping [--json] [--directory DIR] ... (root; docs/benchmarks.md)

The process that is started makes a directory and a cgroup, and has them removed in the end; its
child joins the cgroup, makes the disks and measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstored.bench import disk, throttle
from kvstored.bench.diskshape import default_directory, disk_there_is
from kvstored.bench.leftovers import removed
from kvstored.bench.payloads import MIB
from kvstored.bench.processes import BenchError, tied
from kvstored.bench.report import Case, report, table

SPEEDS = ((100, 100, 100, 100), (50, 100, 150, 200))
"""Of the four disks, in MB/s."""

MOST_DISK_BYTES = 4 << 30
_OVERHEAD = 1.1  # the file system's own, and the parts of a cap that are not data


def main() -> int:
    """See the module; the exit status."""
    args = _arguments()
    try:
        if os.geteuid():
            raise BenchError("make bench-striping makes loop devices and a cgroup: it needs root")
        if args.inside is not None:
            cases = _inside(args)
        else:
            return _outside(args)
    except (BenchError, OSError) as error:
        sys.stderr.write(f"striping: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    found = json.dumps(report("striping", cases)) if args.json else table(cases)
    sys.stdout.write(found + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvstored.bench.striping")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="what the disks are made of")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="at least 5 (7)")
    parser.add_argument("--chunks", type=int, default=64, metavar="N", help="of the prefix (64)")
    parser.add_argument("--object-mib", default="4", metavar="N,N", help="of objects (4)")
    parser.add_argument(
        "--speeds",
        type=_speeds,
        action="append",
        metavar="N,N,N,N",
        help="of the disks, in MB/s; repeatable (100,100,100,100 and 50,100,150,200)",
    )
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)  # the cgroup's version
    return parser.parse_args()


def _speeds(words: str) -> tuple[int, ...]:
    found = tuple(map(int, words.split(",")))
    if len(found) != len(SPEEDS[0]) or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{words}: four numbers of at least 1")
    return found


def _outside(args: argparse.Namespace) -> int:
    where = args.directory or default_directory(Path(tempfile.gettempdir()))
    disk_there_is(where)
    directory = Path(tempfile.mkdtemp(prefix="kvbench-", dir=where))
    group = throttle.throttle(directory.name)
    with removed([directory, group.path]) as keep:
        group.make()
        words = ["--rounds", str(args.rounds), "--chunks", str(args.chunks)]
        words += ["--object-mib", args.object_mib, "--directory", str(directory)]
        words += ["--inside", str(group.version), *(["--json"] if args.json else [])]
        for speeds in args.speeds or SPEEDS:
            words += ["--speeds", ",".join(map(str, speeds))]
        command = tied([sys.executable, "-m", "kvstored.bench.striping", *words])
        return subprocess.run(command, pass_fds=(keep,), check=False).returncode


def _inside(args: argparse.Namespace) -> list[Case]:
    directory: Path = args.directory
    group = throttle.throttle(directory.name)
    group.join()
    throttle.own_mounts()
    disk_bytes = min(MOST_DISK_BYTES, disk_there_is(directory))
    size = int(disk_bytes * _OVERHEAD) + 64 * MIB
    disks = [throttle.disk(directory, f"disk{n}", size) for n in range(len(SPEEDS[0]))]
    cases: list[Case] = []
    for speeds in args.speeds:
        _say(f"four disks of {', '.join(map(str, speeds))} MB/s")
        group.limit(disks, [speed * 1_000_000 for speed in speeds])
        settings = disk.Settings(
            object_bytes=tuple(int(word) << 20 for word in args.object_mib.split(",")),
            prefix_chunks=args.chunks,
            rounds=args.rounds,
            directories=tuple(each.mounted for each in disks),
            weights=tuple(map(float, speeds)),
            disk_bytes=disk_bytes,
            params={"throttle_mb_per_s": list(speeds), "cgroup": group.version},
            puts=False,
        )
        cases += disk.run(settings, _say)
    return cases


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
