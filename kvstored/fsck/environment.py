"""Has a child process read an LMDB environment, and takes over what it says."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstored.fsck import ondisk
from kvstored.fsck.findings import Finding, Report

_CHILD = "kvstored.fsck.child"
KEYED = np.dtype([("key", ">u4"), ("row", ondisk.RECORD)])


@dataclass(slots=True)
class Environment:
    """What an environment holds. `rows` are of KEYED: each record behind the key it lies under."""

    rows: np.ndarray[tuple[int], np.dtype[np.void]]
    names: dict[str, dict[int, bytes]] = field(default_factory=dict)
    opened: dict[int, bytes] = field(default_factory=dict)
    families: int = 0


def read_environment(
    directory: Path, kind: str, volume: bytes, report: Report
) -> Environment | None:
    """Read `index` or `small`; None, with a finding, where it cannot be read."""
    fd = os.memfd_create("kvctl-fsck", os.MFD_CLOEXEC)
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD, kind, str(directory / kind), volume.hex(), str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            report.add(Finding(f"{kind}_unreadable", f"{kind}/data.mdb", _why(done)))
            return None
        size = os.fstat(fd).st_size
        shared = mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b""
    finally:
        os.close(fd)
    document = json.loads(done.stdout)
    _take_findings(document, report)
    return Environment(
        rows=np.frombuffer(shared, KEYED),
        names={
            kind: {int(number): bytes.fromhex(name) for number, name in names.items()}
            for kind, names in document["names"].items()
        },
        opened={int(region): bytes.fromhex(bits) for region, bits in document["opened"].items()},
        families=document["families"],
    )


def _why(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"its reader died of {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][:500] if said else f"its reader ended with {done.returncode}"


def _take_findings(document: dict[str, object], report: Report) -> None:
    """Findings and figures of the child, which is our own code and trusted to be well formed."""
    findings, counts, figures = (document[name] for name in ("findings", "counts", "figures"))
    assert isinstance(findings, list)
    assert isinstance(counts, dict)
    assert isinstance(figures, dict)
    for kind, detail, place, namespace, key in findings:
        where = f"small object {place - ondisk.SMALL_BASE}"
        known = bytes.fromhex(key) if key else None
        report.add(Finding(kind, where, detail, place, namespace, known))
    report.count(**figures)
    listed = Counter(finding[0] for finding in findings)
    for kind, number in counts.items():
        if number > listed[kind]:
            report.add_unlisted(kind, number - listed[kind])
