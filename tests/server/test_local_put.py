"""Put through the ring: bytes, hashes, order, ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import socket
import types

import pytest
import xxhash
from local_put_support import (
    LIMITS,
    MIB,
    RING_BYTES,
    cut,
    header,
    lengths_of,
    rigged,
)

from kvstored.errors import BadRequest, DeadlineExceeded, Draining
from kvstored.server.auth import Caller, Transport
from kvstored.server.limits import Limits
from kvstored.server.local import filling, works
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import ABANDONED, POSITION


@pytest.mark.parametrize("seed", range(6))
async def test_objects_of_odd_sizes_arrive_whole_with_their_hashes(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [4096, *lengths_of(rng, 7, 3 * MIB), MIB, MIB + 100, 512 << 10, 2 * MIB]
    rng.shuffle(lengths)
    payload = rng.randbytes(sum(lengths))
    async with rigged() as rig:
        step = rng.choice([5_000, 65_536, 300_001, RING_BYTES])
        states = await rig.put(header(lengths), payload, step)
        assert states == bytes([pb.STORED]) * len(lengths)
        assert await rig.stored(header(lengths).run) == cut(payload, lengths)


async def test_thousands_of_small_objects_in_one_put() -> None:
    lengths = [4096 + i % 7 for i in range(3000)]
    payload = random.Random(1).randbytes(sum(lengths))
    async with rigged() as rig:
        states = await rig.put(header(lengths), payload, 512 << 10)
        assert states == bytes([pb.STORED]) * len(lengths)
        assert await rig.stored(header(lengths).run) == cut(payload, lengths)


async def test_several_puts_use_one_ring_and_only_what_is_wanted_is_sent() -> None:
    rng = random.Random(2)
    async with rigged() as rig:
        first = rng.randbytes(2 * 300_000)
        await rig.put(header([300_000] * 2), first)
        ring = rig.session.ring
        put = rig.start_put(header([300_000] * 4))
        plan = await put.plan()
        assert list(plan.states) == [pb.EXISTED, pb.EXISTED, pb.WANTED, pb.WANTED]
        assert plan.payload_bytes == 600_000
        second = rng.randbytes(600_000)
        await put.send(second, 100_000)
        assert list(await put.states()) == [pb.EXISTED, pb.EXISTED, pb.STORED, pb.STORED]
        assert rig.session.ring is ring
        stored = await rig.stored(header([300_000] * 4).run)
        assert stored == cut(first + second, [300_000] * 4)
        nothing = rig.start_put(header([300_000] * 4))
        assert (await nothing.plan()).payload_bytes == 0
        assert list(await nothing.states()) == [pb.EXISTED] * 4


async def test_announced_checksums_are_held_against_the_daemons_copy() -> None:
    payload = bytes(range(256)) * 400
    asked = header([51_200] * 2)
    good = xxhash.xxh3_128_digest(payload[:51_200])
    asked.checksums = good + bytes(16)
    async with rigged() as rig:
        assert list(await rig.put(asked, payload)) == [pb.STORED, pb.REFUSED_CHECKSUM]


async def test_what_is_written_to_the_ring_later_changes_nothing() -> None:
    payload = random.Random(3).randbytes(600_000)
    async with rigged() as rig:
        await rig.put(header([300_000] * 2), payload)
        assert rig.session.ring is not None
        rig.session.ring.memory[:] = b"\xff" * RING_BYTES
        assert await rig.stored(header([300_000] * 2).run) == cut(payload, [300_000] * 2)


async def test_what_is_hashed_is_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [2 * MIB + 5, 100_000, 2 * MIB]
    payload = random.Random(6).randbytes(sum(lengths))
    memmove = ctypes.memmove

    def copy_and_scribble(to: int, source: int, nbytes: int) -> None:
        memmove(to, source, nbytes)
        ctypes.memset(source, 0xEE, nbytes)  # as a client may, between the copy and the hash

    async with rigged() as rig:
        with monkeypatch.context() as patched:
            patched.setattr(filling.ctypes, "memmove", copy_and_scribble)
            assert list(await rig.put(header(lengths), payload)) == [pb.STORED] * 3
        assert await rig.stored(header(lengths).run) == cut(payload, lengths)


@pytest.mark.parametrize(
    "positions",
    [[100_000, 100_000], [200_000, 100_000], [0], [3 * MIB + 1], [RING_BYTES + 1], [ABANDONED]],
    ids=["same", "falling", "zero", "beyond payload", "beyond ring", "abandoned"],
)
async def test_a_position_that_cannot_be_ends_the_session(positions: list[int]) -> None:
    async with rigged() as rig:
        put = rig.start_put(header([3 * MIB]))
        await put.plan()
        for position in positions:
            put.tell(position)
        with pytest.raises(BadRequest):
            await put.states()
        assert len(rig.session.failed) == 1
        while await put.hear() != ABANDONED:
            pass
        assert await rig.stored(header([3 * MIB]).run) == {}


@pytest.mark.parametrize("size", [1, 15, 17, 4096])
async def test_a_message_of_another_size_ends_the_session(size: int) -> None:
    async with rigged() as rig:
        await rig.put(header([4096]), bytes(4096))
        assert rig.session.channel is not None
        rig.session.channel.send(bytes(size))
        await asyncio.wait_for(rig.session.failing.wait(), 10)


async def test_messages_about_other_puts_are_passed_over() -> None:
    payload = random.Random(4).randbytes(MIB)
    async with rigged() as rig:
        await rig.put(header([4096], salt=b"x"), bytes(4096))
        put = rig.start_put(header([MIB]))
        await put.plan()
        assert rig.session.channel is not None
        for other in (0, put.request_id - 1, put.request_id + 1):
            rig.session.channel.send(POSITION.pack(other, 1 << 40))
        await put.send(payload, 100_000)
        assert list(await put.states()) == [pb.STORED]
        assert rig.session.failed == []


async def test_a_position_beyond_a_payload_that_fits_the_ring_ends_the_session() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([100_000]))
        await put.plan()
        put.tell(100_001)
        with pytest.raises(BadRequest, match="of 100000 bytes"):
            await put.states()
        assert len(rig.session.failed) == 1


async def test_positions_of_a_put_that_has_ended_are_passed_over() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([100_000]))
        await put.plan()
        await put.send(bytes(100_000), 100_000)
        await put.states()
        assert await put.hear() == 100_000
        put.tell(1)
        await rig.put(header([4096], salt=b"2"), bytes(4096))  # the mover has passed it
        assert rig.session.channel is not None
        told = [POSITION.unpack(rig.session.channel.recv(64))]
        with contextlib.suppress(BlockingIOError):
            while True:
                told.append(POSITION.unpack(rig.session.channel.recv(64)))
        assert put.request_id not in dict(told)
        assert rig.session.failed == []


async def test_a_client_that_never_reads_positions_it_needs_is_ended() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([4 * MIB]))
        await put.plan()
        for position in range(1, RING_BYTES):  # each is answered unless the mover finds several
            if rig.session.failed:
                break
            with contextlib.suppress(BlockingIOError):
                put.tell(position)
            await asyncio.sleep(0)
        with pytest.raises(BadRequest, match="were not read"):
            await put.states()
        assert len(rig.session.failed) == 1


async def test_a_client_that_closes_its_channel_ends_its_puts_alone() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([MIB]))
        await put.plan()
        assert rig.session.channel is not None
        rig.session.channel.close()
        with pytest.raises(BadRequest, match="closed the data channel"):
            await put.states()
        again = rig.start_put(header([MIB]))
        with pytest.raises(BadRequest, match="closed the data channel"):
            await again.states()
        assert rig.session.failed == []


async def test_a_client_that_stands_still_is_ended_and_its_room_is_free_again() -> None:
    limits = Limits(stall_timeout_s=0.2, local=LIMITS.local)
    async with rigged(limits) as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        put = rig.start_put(header([MIB]))
        await put.plan()
        put.tell(1000)
        with pytest.raises(DeadlineExceeded):
            await put.states()
        assert rig.ram.namespace_usage("default").charged_bytes == used
        while await put.hear() != ABANDONED:
            pass
        assert list(await rig.put(header([MIB]), bytes(MIB))) == [pb.STORED]


async def test_a_deadline_ends_a_put() -> None:
    async with rigged() as rig:
        asked = header([MIB])
        asked.ctx.deadline_ms = 200
        put = rig.start_put(asked)
        await put.plan()
        with pytest.raises(DeadlineExceeded):
            await put.states()
        assert await rig.stored(asked.run) == {}


async def test_a_second_put_is_refused_while_one_runs() -> None:
    payload = bytes(MIB)
    async with rigged() as rig:
        put = rig.start_put(header([MIB]))
        await put.plan()
        second = rig.start_put(header([MIB], salt=b"2"))
        with pytest.raises(BadRequest, match="one Put runs at a time"):
            await second.states()
        await put.send(payload, 100_000)
        assert list(await put.states()) == [pb.STORED]


async def test_cancel_in_the_midst_of_a_copy_gives_the_room_back() -> None:
    async with rigged() as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        put = rig.start_put(header([4 * MIB] * 4))
        await put.plan()
        put.tell(RING_BYTES)
        await put.hear()
        put.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put.states()
        assert rig.ram.namespace_usage("default").charged_bytes == used
        assert list(await rig.put(header([4096]), bytes(4096))) == [pb.STORED]


async def test_close_in_the_midst_of_a_copy_leaves_nobody_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()
    copying: list[int] = []
    memmove = filling.ctypes.memmove

    def watched_memmove(to: int, source: int, nbytes: int) -> None:
        copying.append(1)
        loop.call_soon_threadsafe(entered.set)
        for _ in range(200):
            memmove(to, source, nbytes)
        copying.pop()

    monkeypatch.setattr(filling.ctypes, "memmove", watched_memmove)
    async with rigged() as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        put = rig.start_put(header([4 * MIB] * 4))
        await put.plan()
        put.tell(RING_BYTES)
        await entered.wait()
        await rig.puts.close()
        assert not copying
        monkeypatch.undo()
        with pytest.raises(Draining):
            await put.states()
        assert rig.ram.namespace_usage("default").charged_bytes == used
        late = rig.start_put(header([MIB]))
        with pytest.raises(Draining):
            await late.states()


async def test_a_refused_plan_is_raised_and_leaves_nothing() -> None:
    async with rigged() as rig:
        bad = header([100])
        with pytest.raises(Exception, match="lengths_bytes"):
            await rig.puts.put(bad, 1, Caller(Transport.LOCAL), lambda body, last: None)
        assert rig.dispatcher.open_payload_calls == 0


async def test_two_sessions_put_at_once() -> None:
    rng = random.Random(5)
    first, second = rng.randbytes(6 * MIB), rng.randbytes(6 * MIB)
    async with rigged() as rig:
        other = rig.new_session()
        lengths = [2 * MIB] * 3
        await asyncio.gather(
            rig.put(header(lengths, salt=b"1"), first),
            other.put(header(lengths, salt=b"2"), second),
        )
        assert await rig.stored(header(lengths, salt=b"1").run) == cut(first, lengths)
        assert await rig.stored(header(lengths, salt=b"2").run) == cut(second, lengths)
        await other.session_over()


async def test_movers_that_stop_end_what_is_under_way() -> None:
    async with rigged() as rig:
        put = rig.start_put(header([MIB]))
        await put.plan()
        rig.movers.stop()
        with pytest.raises(Draining):
            await put.states()
        late = rig.start_put(header([MIB]))
        with pytest.raises(Draining):
            await late.states()


async def test_a_channel_that_cannot_be_watched_fails_its_puts_alone() -> None:
    async with rigged() as rig:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = works.Channel(ours, 0, RING_BYTES, lambda ending: None)
        mover = rig.movers.take()
        mover.attach(channel)
        mover.attach(channel)  # the kernel refuses
        work = works.RingWork(filling.Filling([]), types.SimpleNamespace(moves=0), channel, 1, 1)
        mover.begin(work)
        assert "cannot be read" in str((await work.ended).cause)
        await mover.detach(channel)
        ours.close()
        theirs.close()
        assert list(await rig.put(header([MIB]), bytes(MIB))) == [pb.STORED]
