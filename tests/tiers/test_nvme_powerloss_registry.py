"""Power cut while deletes are remembered for volumes that are away: none is forgotten."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvstored.io.base import Files, RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Nothing, Survival, Torn
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.nvme.registry import Known, Registry, Tombstone

UUIDS = ("aa" * 16, "bb" * 16)


def tombstone(number: int) -> Tombstone:
    return Tombstone("default", b"f" * 32, number.to_bytes(32, "big"), number)


def opened(files: Files, root: Path) -> tuple[Registry, dict[str, list[Tombstone]]]:
    registry = Registry(files, root / "data" / "volumes")
    return registry, registry.load()


def remember(files: CrashFiles, root: Path) -> None:
    """Two volumes, deletes for each, restarts, one that failed, and one that is told of all."""
    for start in range(3):
        registry, _ = opened(files, root)
        for uuid in UUIDS:
            registry.put(Known(uuid, f"/mnt/{uuid}", uuid[:2]))
            files.mark(("known", uuid, 0))
        for number in range(10 * start, 10 * start + 10):
            uuid = UUIDS[number % 2]
            try:
                registry.append(uuid, [tombstone(number)])
            except OSError:
                continue
            files.mark(("deleted", uuid, number))
    files.mark(("clearing", UUIDS[0], 0))
    registry.clear(UUIDS[0])
    registry.append(UUIDS[0], [tombstone(100)])
    files.mark(("deleted", UUIDS[0], 100))


def check(files: CrashFiles, at: int, survival: Survival, target: Path) -> None:
    files.restore(target, at, survival)
    registry, found = opened(RealFiles(), target)
    notes: Iterable[tuple[str, str, int]] = [n for n in files.marks(at) if isinstance(n, tuple)]
    must: dict[str, set[int]] = {}
    for what, uuid, number in notes:
        if what == "known":
            assert uuid in registry.known
        elif what == "clearing":
            must.pop(uuid)
        else:
            must.setdefault(uuid, set()).add(number)
    for uuid, numbers in must.items():
        held = {t.through for t in found.get(uuid, ())}
        assert numbers <= held or registry.known[uuid].empty, f"{at}: {numbers - held} forgotten"


@pytest.mark.parametrize("operation", ["none", "pwritev", "fdatasync"])
def test_no_delete_is_forgotten(tmp_path: Path, operation: str) -> None:
    """Also where the first of a volume failed."""
    (tmp_path / "root").mkdir()
    faults = FaultyFiles(RealFiles())
    for uuid in UUIDS:
        faults.inject(Fault(operation, f"*{uuid}*", error=errno.EIO, times=1))
    files = CrashFiles(faults, tmp_path / "root")
    remember(files, tmp_path / "root")
    assert len(files.sync_points) > 30
    since = 0
    for at in [*files.sync_points, files.now]:
        check(files, at, Nothing(), tmp_path / f"{at}")
        check(files, at, Torn(at), tmp_path / f"{at}-torn")
        check(files, since + 1, Nothing(), tmp_path / f"{at}-early")
        since = at
