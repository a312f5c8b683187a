"""The parts of the tier of many volumes that decide: breaker, registry, tables."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tiers.nvme_volumes_helpers import PATIENCE

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import Recovered
from kvstored.tiers.nvme import merging
from kvstored.tiers.nvme.away import Away
from kvstored.tiers.nvme.breaker import Breaker, BreakerState, Seen
from kvstored.tiers.nvme.registry import MOST_TOMBSTONES, Known, Registry, Tombstone
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable

# ---- breaker ------------------------------------------------------------------------------------


def test_breaker_from_errors_to_trust() -> None:
    breaker = Breaker(PATIENCE, "write")
    breaker.look(0.0, Seen(failures=2, error="EIO"))
    assert breaker.state is BreakerState.CLOSED
    breaker.look(1.0, Seen(failures=3, error="EIO"))
    assert breaker.state is BreakerState.OPEN
    assert "3 writes in a row failed, the last: EIO" in breaker.detail
    assert not breaker.probe_due(1.0)
    assert breaker.probe_due(1.02)
    breaker.probed(1.02, Seen(), "still EIO")
    assert not breaker.probe_due(1.05), "pauses grow"
    assert breaker.probe_due(1.07)
    breaker.probed(1.07, Seen(successes=5), "")
    assert breaker.state is BreakerState.TRIAL
    breaker.look(1.1, Seen(failures=1, successes=5, error="EIO"))
    assert breaker.state is BreakerState.OPEN, "on trial one error is enough"
    assert breaker.opened_at == 1.0, "it has not been trusted since"
    breaker.probed(2.0, Seen(successes=5), "")
    breaker.look(2.1, Seen(successes=6))
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.detail


def test_breaker_of_a_silent_device() -> None:
    breaker = Breaker(PATIENCE, "read")
    breaker.look(0.0, Seen(oldest_s=PATIENCE.stuck_after_s - 0.01))
    assert breaker.closed
    breaker.look(0.1, Seen(oldest_s=PATIENCE.stuck_after_s))
    assert breaker.stuck
    breaker.probed(1.0, Seen(oldest_s=PATIENCE.stuck_after_s + 0.9), "")
    assert not breaker.closed, "the call that is stuck still is"
    breaker.probed(2.0, Seen(), "")
    assert breaker.closed
    assert not breaker.stuck


def test_breaker_of_no_device() -> None:
    breaker = Breaker(PATIENCE, "read")
    breaker.look(0.0, Seen(failures=1, gone=True, error="ENODEV"))
    assert breaker.gone
    assert not breaker.closed


# ---- registry -----------------------------------------------------------------------------------

KNOWN = Known("ab" * 16, "/mnt/nvme0", "nvme0", read_bytes_per_s=1e9)


def stones(count: int, through: int = 7) -> list[Tombstone]:
    return [Tombstone("ns", b"f" * 32, i.to_bytes(32, "little"), through) for i in range(count)]


def reopened(directory: Path) -> tuple[Registry, list[Tombstone]]:
    registry = Registry(RealFiles(), directory)
    found = registry.load()
    return registry, found.get(KNOWN.uuid, [])


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    made = Registry(FaultyFiles(RealFiles()), tmp_path / "deep" / "volumes")
    assert made.load() == {}
    made.put(KNOWN)
    return made


def test_registry_remembers(registry: Registry) -> None:
    registry.append(KNOWN.uuid, stones(3))
    registry.append(KNOWN.uuid, stones(2))
    again, found = reopened(registry.directory)
    assert again.known == {KNOWN.uuid: KNOWN}
    assert found == stones(3) + stones(2)
    again.clear(KNOWN.uuid)
    assert reopened(registry.directory)[1] == []
    again.drop(KNOWN.uuid)
    assert reopened(registry.directory)[0].known == {}


@pytest.mark.parametrize("left", range(1, 40, 3))
def test_torn_note_was_never_acknowledged(registry: Registry, left: int) -> None:
    registry.append(KNOWN.uuid, stones(3))
    path = registry.directory / f"{KNOWN.uuid}.deleted"
    whole = path.read_bytes()
    registry.append(KNOWN.uuid, stones(1))
    path.write_bytes(path.read_bytes()[: len(whole) + left])
    again, found = reopened(registry.directory)
    assert found == stones(3)
    again.append(KNOWN.uuid, stones(5))
    assert reopened(registry.directory)[1] == stones(3) + stones(5)


def test_damaged_notes_empty_the_volume(registry: Registry) -> None:
    registry.append(KNOWN.uuid, stones(3))
    path = registry.directory / f"{KNOWN.uuid}.deleted"
    whole = len(path.read_bytes())
    registry.append(KNOWN.uuid, stones(1))
    data = bytearray(path.read_bytes())
    data[whole // 2] ^= 1
    path.write_bytes(data)
    again, found = reopened(registry.directory)
    assert found == []
    assert again.known[KNOWN.uuid].empty
    assert "damaged" in again.problems[0]


def test_too_many_notes_empty_the_volume(registry: Registry) -> None:
    registry.append(KNOWN.uuid, stones(MOST_TOMBSTONES))
    assert not registry.known[KNOWN.uuid].empty
    registry.append(KNOWN.uuid, stones(1))
    again, found = reopened(registry.directory)
    assert again.known[KNOWN.uuid].empty
    assert found == []
    again.append(KNOWN.uuid, stones(1))  # nothing more is needed
    assert sorted(p.name for p in registry.directory.iterdir()) == ["known.json"]


def test_damaged_registry_is_set_aside(registry: Registry) -> None:
    path = registry.directory / "known.json"
    path.write_bytes(path.read_bytes().replace(b"nvme0", b"nvme1"))
    again, _ = reopened(registry.directory)
    assert again.known == {}
    assert "checksum" in again.problems[0]
    again.put(KNOWN)
    assert reopened(registry.directory)[0].known == {KNOWN.uuid: KNOWN}


async def test_note_that_cannot_be_made(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    away = Away(files, tmp_path / "volumes", 5)
    await away.load()
    await away.remember(KNOWN)
    files.inject(Fault("fdatasync", "*.deleted", error=errno.EIO, times=1))
    with pytest.raises(DeleteNotDurable, match="delete once more"):
        await away.add(KNOWN.uuid, stones(1))
    assert away.pending(KNOWN.uuid) == stones(1), "it holds in this run"
    await away.add(KNOWN.uuid, stones(2))
    away.close()
    assert reopened(tmp_path / "volumes")[1] == stones(2)


# ---- tables -------------------------------------------------------------------------------------


def table(namespace: str, keys: list[int], sequence: list[int]) -> Recovered:
    count = len(keys)
    zeros = np.zeros(count, np.uint32)
    return Recovered(
        namespaces=["other", namespace],
        families=[b"f" * 32],
        parts=["kv"],
        tenants=["t"],
        namespace_id=zeros + 1,
        family_id=zeros,
        part_id=zeros,
        tenant_id=zeros,
        keys=np.frombuffer(b"".join(k.to_bytes(32, "little") for k in keys), np.uint8).reshape(
            -1, 32
        ),
        parents=np.zeros((count, 32), np.uint8),
        depth=zeros,
        end_token=np.zeros(count, np.uint64),
        expires_ms=np.zeros(count, np.uint64),
        length_bytes=np.full(count, 5000, np.uint64),
        checksums=np.zeros((count, 16), np.uint8),
        place=np.arange(count, dtype=np.uint64),
        sequence=np.array(sequence, np.uint64),
        dropped={"x": 1},
    )


def test_tables_of_volumes_become_one() -> None:
    parts = [table("a", [1, 2], [10, 20]), table("b", [3, 4], [1, 2])]
    whole = merging.merged([merging.numbered(p, n) for n, p in enumerate(parts)])
    assert [whole.namespaces[i] for i in whole.namespace_id] == ["a", "a", "b", "b"]
    assert whole.place.tolist() == [0, 1, 1 << 56, (1 << 56) + 1]
    assert whole.sequence.tolist() == [1, 3, 2, 4], "halves of each volume's life meet"
    assert whole.dropped == {"x": 2}
    assert len(merging.merged([]).place) == 0


def test_doomed_by_identity_and_sequence() -> None:
    found = table("ns", [0, 1, 2, 1], [5, 7, 5, 8])
    assert merging.doomed(found, stones(2)).tolist() == [True, True, False, False]
    assert not merging.doomed(table("else", [0, 1], [5, 5]), stones(2)).any()
    assert not merging.doomed(found, []).any()
