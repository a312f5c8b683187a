"""Memory for clients to write: what they can do with it, and that it comes back."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import types

import pytest
from local_put_support import LIMITS, MIB, RING_BYTES, header, open_fds, rigged, staging_maps

from kvstored.errors import ResourceExhausted
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local import staging
from kvstored.server.local.staging import Memory, Staging
from kvstored_client.proto import kvstore_pb2 as pb

PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def test_it_can_be_neither_shrunk_nor_grown_nor_unsealed() -> None:
    memory = Memory(MIB)
    try:
        fd = memory.descriptor
        attempts = [
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, MIB - 1),
            lambda: os.ftruncate(fd, 2 * MIB),
            lambda: os.posix_fallocate(fd, 0, 2 * MIB),
            lambda: os.pwrite(fd, b"x", MIB),
            lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
        ]
        for attempt in attempts:
            with pytest.raises(PermissionError, match="Operation not permitted"):
                attempt()
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & staging.SEALS == staging.SEALS
        found = os.fstat(fd)
        assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, MIB)
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
    finally:
        memory.close()


def test_all_pages_are_there_from_the_start_and_gone_at_the_end() -> None:
    maps, fds = staging_maps(), open_fds()
    memory = Memory(2 * MIB)
    client = mmap.mmap(memory.descriptor, 2 * MIB)
    other = os.dup(memory.descriptor)
    assert os.fstat(other).st_blocks * 512 == 2 * MIB
    assert staging_maps() == maps + 2
    client[:5] = b"bytes"
    assert ctypes.string_at(memory.address, 5) == b"bytes"
    memory.forget_descriptor()
    memory.close()
    memory.close()
    assert os.fstat(other).st_blocks == 0  # although a client still has it
    client.close()
    os.close(other)
    assert (staging_maps(), open_fds()) == (maps, fds)


async def test_a_hole_that_a_client_punches_reads_as_zeros() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([RING_BYTES]))
        await put.plan()
        ring = rig.session.ring
        assert ring is not None
        ring.memory[:] = b"\xff" * RING_BYTES
        assert _fallocate(ring.fd, PUNCH, 0, RING_BYTES) == 0
        put.tell(RING_BYTES)
        assert list(await put.states()) == [pb.STORED]
        assert await rig.stored(header([RING_BYTES]).run) == {0: bytes(RING_BYTES)}


CLIENT = """
import mmap, os, sys
fd = int(sys.argv[1])
if sys.argv[2]:
    os.setuid(int(sys.argv[2]))
for attempt in (lambda: os.ftruncate(fd, 0), lambda: os.truncate(f"/proc/self/fd/{fd}", 0)):
    try:
        attempt()
    except PermissionError:
        continue
    sys.exit("it was truncated")
mmap.mmap(fd, os.fstat(fd).st_size)[:4] = b"mine"
"""


@pytest.mark.parametrize("user", ["", "65534"], ids=["same user", "another user"])
def test_another_process_can_write_it_and_no_more(user: str) -> None:
    if user and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    memory = Memory(MIB)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", CLIENT, str(memory.descriptor), user],
            pass_fds=[memory.descriptor],
            capture_output=True,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert ctypes.string_at(memory.address, 4) == b"mine"
    finally:
        memory.close()


async def test_footprint_counts_what_exists_and_rings_have_a_bound() -> None:
    limits = LocalLimits(ring_bytes=MIB // 4, max_total_staging_bytes=MIB)
    shared = Staging(limits)
    one, two = await shared.make_ring("default"), await shared.make_ring("default")
    assert shared.footprint_bytes == MIB // 2
    with pytest.raises(ResourceExhausted):
        await shared.make_ring("default")
    shared.free("default", one)
    await shared.settled()
    assert shared.footprint_bytes == MIB // 4
    shared.free("default", two)
    await shared.close()
    assert shared.footprint_bytes == 0


async def test_making_that_is_given_up_leaves_nothing() -> None:
    maps, fds = staging_maps(), open_fds()
    shared = Staging(LocalLimits(max_total_staging_bytes=128 * MIB))
    makings = [asyncio.create_task(shared.make_area("default", 8 * MIB)) for _ in range(8)]
    await asyncio.sleep(0)
    for making in makings:
        making.cancel()
    await asyncio.wait(makings)
    made = await shared.make_ring("default")  # the pool makes one after the other: those are made
    shared.free("default", made)
    await shared.settled()
    assert (shared.footprint_bytes, staging_maps(), open_fds()) == (0, maps, fds)
    area = await shared.make_area("default", 64 * MIB)  # its half is free again
    shared.free("default", area)
    await shared.close()


async def test_a_kernel_that_has_no_memory_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, fds = staging_maps(), open_fds()

    def refuse(address: int, size_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no")

    async with rigged() as rig:
        none_left = types.SimpleNamespace(**{**vars(staging.pages), "populate": refuse})
        monkeypatch.setattr(staging, "pages", none_left)
        with pytest.raises(ResourceExhausted):
            await rig.reserve([MIB], 1)
        assert rig.session.charged_bytes == 0
        put = rig.start_put(header([MIB]))
        with pytest.raises(ResourceExhausted):
            await put.states()
        assert rig.staging.footprint_bytes == 0
        monkeypatch.undo()
        await rig.reserve([MIB], 1)
    assert (staging_maps(), open_fds()) == (maps, fds)


async def test_the_daemon_keeps_no_descriptor_of_what_it_sent() -> None:
    async with rigged(Limits(local=LIMITS.local)) as rig:
        await rig.reserve([MIB], 1)
        await rig.put(header([4096], salt=b"p"), bytes(4096))
        rig.session.gone()  # the client's descriptors
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in _fds()]
        assert not [link for link in links if "kvstored-staging" in link]


def _fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
