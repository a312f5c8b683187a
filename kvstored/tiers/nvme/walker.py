"""Runs the index walker as a child process and takes over what it found."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvstored.tiers.nvme import record
from kvstored.tiers.nvme.index import NameTable

WALKER_MODULE = "kvstored.tiers.nvme.walk"
_MESSAGE_BYTES = 500


class WalkError(Exception):
    """The child died, complained or took too long: the environment is not to be trusted."""


@dataclass(slots=True)
class Loaded:
    """What one environment holds."""

    records: record.Records = field(default_factory=lambda: record.from_bytes(b""))
    names: NameTable = field(default_factory=NameTable)
    families: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    opened: dict[int, bytes] = field(default_factory=dict)
    damaged: int = 0  # records whose check failed; not among `records`
    rejected: list[tuple[bytes, bytes]] = field(default_factory=list)  # those, as they were stored


def walk(directory: Path, volume: bytes, limit: int, timeout_s: float) -> Loaded:
    """Have a child read an environment of at most `limit` records. Raises WalkError."""
    fd = os.memfd_create("kvstored-walk", os.MFD_CLOEXEC)
    try:
        sizes = _run(directory, volume, limit, fd, timeout_s)
        total = os.fstat(fd).st_size
        if total != sum(sizes) or not total:
            raise WalkError("the child's answer is incomplete")
        shared = memoryview(mmap.mmap(fd, total, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)
    document = json.loads(bytes(shared[sizes[0] :]))
    return _loaded(shared[: sizes[0]], document)


def _run(directory: Path, volume: bytes, limit: int, fd: int, timeout_s: float) -> list[int]:
    """Spawn the child and wait; the sizes it printed."""
    command = [sys.executable, "-m", WALKER_MODULE]
    arguments = [str(directory), volume.hex(), str(limit), str(fd)]
    try:
        done = subprocess.run(
            command + arguments,
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WalkError(f"no answer within {timeout_s:g} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-_MESSAGE_BYTES:]
        died = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise WalkError(f"{died}: {said}" if said else died)
    sizes = json.loads(done.stdout)
    return [int(size) for size in sizes]


def _loaded(rows: memoryview, document: dict[str, object]) -> Loaded:
    """Values from the child's JSON, which is trusted: it is our own code on checked data."""
    names, families = document["names"], document["families"]
    opened, rejected = document["opened"], document["rejected"]
    assert isinstance(names, dict)
    assert isinstance(families, list)
    assert isinstance(opened, dict)
    assert isinstance(rejected, list)
    saved = {
        kind: {int(number): bytes.fromhex(name) for number, name in table.items()}
        for kind, table in names.items()
    }
    return Loaded(
        records=record.from_bytes(rows),
        names=NameTable.from_saved(saved),
        families={
            (bytes.fromhex(namespace).decode(), bytes.fromhex(fingerprint)): bytes.fromhex(spec)
            for fingerprint, namespace, spec in families
        },
        opened={int(region): bytes.fromhex(bitmap) for region, bitmap in opened.items()},
        damaged=int(str(document["damaged"])),
        rejected=[(bytes.fromhex(key), bytes.fromhex(row)) for key, row in rejected],
    )
