"""Runs the index walker as a child process and takes over what it found."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
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

    records: record.Table = field(default_factory=lambda: record.Table.of(record.from_bytes(b"")))
    names: NameTable = field(default_factory=NameTable)
    families: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    opened: dict[int, bytes] = field(default_factory=dict)
    damaged: int = 0  # records whose check failed; not among `records`
    rejected: list[tuple[bytes, bytes]] = field(default_factory=list)  # those, as they were stored


def walk(
    volume: bytes,
    environments: Sequence[tuple[Path, int]],
    timeout_s: float,
    *,
    payload: bool = False,
) -> list[Loaded]:
    """Have a child read environments, given with the most records each can have; with `payload`
    every byte of small objects too.

    Raises WalkError if any of them is not to be trusted; which, only a child of its own can tell.
    """
    fd = os.memfd_create("kvstored-walk", os.MFD_CLOEXEC)
    try:
        sizes = _run(volume, environments, fd, timeout_s, payload)
        total = os.fstat(fd).st_size
        expected = sum(record.layout(most)[1] + document for most, _, document in sizes)
        if total != expected or len(sizes) != len(environments):
            raise WalkError("the child's answer is incomplete")
        shared = memoryview(mmap.mmap(fd, total, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)
    found = []
    for most, count, document in sizes:
        _, columns = record.layout(most)
        text = bytes(shared[columns : columns + document])
        found.append(_loaded(record.table_over(shared, most, count), json.loads(text)))
        shared = shared[columns + document :]
    return found


def _run(
    volume: bytes,
    environments: Sequence[tuple[Path, int]],
    fd: int,
    timeout_s: float,
    payload: bool,
) -> list[list[int]]:
    """Spawn the child and wait; the sizes it printed."""
    command = [sys.executable, "-m", WALKER_MODULE]
    arguments = [volume.hex(), str(fd), "1" if payload else "0"]
    for directory, limit in environments:
        arguments += [str(directory), str(limit)]
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
    return [[int(most), int(count), int(size)] for most, count, size in json.loads(done.stdout)]


def _loaded(records: record.Table, document: dict[str, object]) -> Loaded:
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
        records=records,
        names=NameTable.from_saved(saved),
        families={
            (bytes.fromhex(namespace).decode(), bytes.fromhex(fingerprint)): bytes.fromhex(spec)
            for fingerprint, namespace, spec in families
        },
        opened={int(region): bytes.fromhex(bitmap) for region, bitmap in opened.items()},
        damaged=int(str(document["damaged"])),
        rejected=[(bytes.fromhex(key), bytes.fromhex(row)) for key, row in rejected],
    )
