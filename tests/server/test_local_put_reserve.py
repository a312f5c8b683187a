"""Reserve and Commit: in place, once, whatever is written afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest
from local_put_support import LIMITS, MIB, Rig, cut, header, lengths_of, rigged

from kvstored.errors import BadRequest, DeadlineExceeded, Draining, ResourceExhausted, TooLarge
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local import carrying, filling, staging
from kvstored.tiers.base import padded_bytes
from kvstored_client.proto import kvstore_pb2 as pb


def fill(rig: Rig, reply: pb.ReserveReply, objects: dict[int, bytes]) -> None:
    """Write the wanted objects where they are to be."""
    area = rig.session.areas[reply.area_id].memory
    for index, state in enumerate(reply.states):
        if state == pb.WANTED:
            at = reply.offsets_bytes[index]
            area[at : at + len(objects[index])] = objects[index]


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_written_in_place_is_stored(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [*lengths_of(rng, 9, 2 * MIB), MIB, MIB + 1, 4096]
    objects = cut(rng.randbytes(sum(lengths)), lengths)
    async with rigged() as rig:
        reply = await rig.reserve(lengths, 1)
        assert list(reply.states) == [pb.WANTED] * len(lengths)
        assert all(offset % 4096 == 0 for offset in reply.offsets_bytes)
        assert rig.session.charged_bytes == sum(map(padded_bytes, lengths))
        fill(rig, reply, objects)
        assert await rig.commit(1) == bytes([pb.STORED]) * len(lengths)
        assert rig.session.charged_bytes == 0
        area = rig.session.areas[reply.area_id].memory
        area[:] = b"\xff" * len(area)
        assert await rig.stored(header(lengths).run) == objects


async def test_thousands_of_objects_in_one_reservation() -> None:
    lengths = [4096 + i % 5 for i in range(3000)]
    objects = cut(random.Random(1).randbytes(sum(lengths)), lengths)
    async with rigged() as rig:
        fill(rig, await rig.reserve(lengths, 1), objects)
        assert await rig.commit(1) == bytes([pb.STORED]) * len(lengths)
        assert await rig.stored(header(lengths).run) == objects


async def test_objects_that_are_not_named_are_given_up() -> None:
    lengths = [100_000] * 4
    objects = cut(random.Random(2).randbytes(sum(lengths)), lengths)
    async with rigged() as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        fill(rig, await rig.reserve(lengths, 1), objects)
        states = await rig.commit(1, [0, 2])
        assert list(states) == [pb.STORED, pb.NOT_OFFERED, pb.STORED, pb.NOT_OFFERED]
        assert rig.ram.namespace_usage("default").charged_bytes == used + 2 * padded_bytes(100_000)
        assert await rig.stored(header(lengths).run) == {0: objects[0], 2: objects[2]}


async def test_only_wanted_objects_have_a_place() -> None:
    lengths = [100_000] * 3
    objects = cut(random.Random(3).randbytes(sum(lengths)), lengths)
    async with rigged() as rig:
        await rig.put(header(lengths[:2]), objects[0] + objects[1])
        reply = await rig.reserve(lengths, 1)
        assert list(reply.states) == [pb.EXISTED, pb.EXISTED, pb.WANTED]
        assert rig.session.charged_bytes == padded_bytes(100_000)
        fill(rig, reply, objects)
        with pytest.raises(BadRequest, match="not wanted"):
            await rig.commit(1, [1, 2])
        assert list(await rig.commit(1, [2])) == [pb.EXISTED, pb.EXISTED, pb.STORED]
        nothing = await rig.reserve(lengths, 2)
        assert (nothing.area_id, list(nothing.offsets_bytes)) == (0, [0, 0, 0])
        assert list(await rig.commit(2)) == [pb.EXISTED] * 3


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [2], [0, 1 << 20]])
async def test_indices_that_cannot_be_are_refused_and_the_reservation_stays(
    indices: list[int],
) -> None:
    async with rigged() as rig:
        await rig.reserve([5000, 5000], 1)
        with pytest.raises(BadRequest, match="indices"):
            await rig.commit(1, indices)
        with pytest.raises(BadRequest, match="durability"):
            await rig.commit(1, durability=77)
        assert list(await rig.commit(1)) == [pb.STORED] * 2


async def test_an_id_is_committed_once_and_not_after_release() -> None:
    async with rigged() as rig:
        with pytest.raises(BadRequest, match="no reservation"):
            await rig.commit(1)
        await rig.reserve([5000], 1)
        await rig.commit(1)
        with pytest.raises(BadRequest, match="no reservation"):
            await rig.commit(1)
        assert not rig.puts.release(1)
        used = rig.ram.namespace_usage("default").charged_bytes
        await rig.reserve([5000], 2, salt=b"2")
        with pytest.raises(BadRequest, match="in use"):
            await rig.reserve([5000], 2, salt=b"3")
        with pytest.raises(BadRequest, match="in use"):
            await rig.reserve([5000], 0)
        assert rig.puts.release(2)
        assert not rig.puts.release(2)
        with pytest.raises(BadRequest, match="no reservation"):
            await rig.commit(2)
        assert rig.session.charged_bytes == 0
        await rig.puts.close()
        assert rig.ram.namespace_usage("default").charged_bytes == used


async def test_an_area_is_used_again_and_not_while_a_reservation_has_it() -> None:
    async with rigged() as rig:
        first = await rig.reserve([300_000], 1)
        second = await rig.reserve([300_000], 2, salt=b"2")
        assert first.area_id != second.area_id
        rig.puts.release(1)
        third = await rig.reserve([300_000], 3, salt=b"3")
        assert third.area_id == first.area_id
        await rig.commit(2)
        fourth = await rig.reserve([300_000], 4, salt=b"4")
        assert fourth.area_id == second.area_id
        assert rig.session.retiring == []


async def test_areas_beyond_what_is_kept_are_retired_and_count_until_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "KEPT_BYTES", MIB)
    async with rigged() as rig:
        small = await rig.reserve([MIB], 1)
        large = await rig.reserve([MIB] * 3, 2, salt=b"2")
        assert rig.staging.footprint_bytes == 4 * MIB
        await rig.commit(1)
        assert rig.session.retiring == []
        await rig.commit(2)
        assert rig.session.retiring == [small.area_id, large.area_id]
        assert rig.staging.footprint_bytes == 4 * MIB
        rig.puts.area_retired(999)
        rig.puts.area_retired(large.area_id)
        rig.puts.area_retired(large.area_id)
        await rig.staging.settled()
        assert rig.staging.footprint_bytes == MIB


async def test_budgets_of_a_session_a_namespace_and_all() -> None:
    local = LocalLimits(ring_bytes=MIB, max_staging_bytes=4 * MIB, max_total_staging_bytes=13 * MIB)
    async with rigged(Limits(local=local)) as rig:
        with pytest.raises(TooLarge):
            await rig.reserve([MIB] * 5, 1)
        await rig.reserve([MIB] * 3, 1)
        with pytest.raises(ResourceExhausted, match="this session"):
            await rig.reserve([MIB] * 2, 2, salt=b"2")
        other = rig.new_session()
        await other.reserve([MIB] * 3, 1, salt=b"3")
        third = rig.new_session()
        with pytest.raises(ResourceExhausted, match="which may have half"):
            await third.reserve([MIB] * 3, 1, salt=b"4")
        await other.session_over()
        await third.reserve([MIB] * 3, 1, salt=b"4")
        await third.session_over()
        assert rig.session.charged_bytes == 3 * MIB


async def test_kept_areas_give_way_to_a_larger_one() -> None:
    local = LocalLimits(max_staging_bytes=4 * MIB)
    async with rigged(Limits(local=local)) as rig:
        await rig.reserve([MIB] * 2, 1)
        await rig.commit(1)
        with pytest.raises(ResourceExhausted):  # nobody unmaps it
            await asyncio.wait_for(rig.reserve([MIB] * 4, 2, salt=b"2"), 10)
        assert len(rig.session.retiring) == 1
        asyncio.get_running_loop().call_later(
            0.05, lambda: rig.puts.area_retired(rig.session.retiring[0])
        )
        reply = await rig.reserve([MIB] * 4, 3, salt=b"2")
        assert list(reply.states) == [pb.WANTED] * 4


async def test_a_reservation_beyond_what_a_session_may_lease_is_refused() -> None:
    async with rigged() as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        rig.session.cap_bytes = 2 * MIB
        with pytest.raises(ResourceExhausted, match="may cover"):
            await rig.reserve([MIB] * 3, 1)
        assert rig.session.charged_bytes == 0
        assert rig.ram.namespace_usage("default").charged_bytes == used
        assert len(await rig.stored(header([MIB] * 3).run)) == 0


async def test_a_reservation_outlives_the_deadline_of_its_call() -> None:
    request = pb.Context(deadline_ms=400)
    async with rigged() as rig:
        await rig.puts.reserve(
            pb.ReserveRequest(ctx=request, run=header([MIB]).run, lease_id=1, lengths_bytes=[MIB]),
            rig.caller(),
        )
        await asyncio.sleep(0.45)  # the deadline passes; that is what is tested
        assert list(await rig.commit(1)) == [pb.STORED]


async def test_durability_is_the_commits() -> None:
    async with rigged() as rig:  # without a persistent tier nothing is durable
        await rig.reserve([5000], 1)
        assert list(await rig.commit(1, durability=pb.DURABLE)) == [pb.STORED_NOT_DURABLE]


async def test_release_before_the_answer_ends_the_reserve() -> None:
    async with rigged(cap_bytes=8 * MIB) as rig:
        await rig.reserve([2 * MIB] * 3, 1)
        waiting = asyncio.create_task(
            rig.puts.reserve(
                pb.ReserveRequest(
                    run=header([4 * MIB] * 2, salt=b"2").run,
                    lease_id=2,
                    lengths_bytes=[4 * MIB] * 2,
                    when_full=pb.WAIT,
                ),
                rig.caller(),
            )
        )
        for _ in range(3):
            await asyncio.sleep(0)
        assert rig.puts.release(2)
        with pytest.raises(BadRequest, match="released"):
            await waiting
        assert rig.session.charged_bytes == 6 * MIB


class SlowCopies:
    """Holds the mover in the midst of a copy until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = asyncio.Event()
        self.at_work = 0
        self._repeat = True
        loop = asyncio.get_running_loop()
        memmove = filling.ctypes.memmove

        def slow(to: int, source: int, nbytes: int) -> None:
            self.at_work += 1
            loop.call_soon_threadsafe(self.entered.set)
            for _ in range(300 if self._repeat else 1):
                memmove(to, source, nbytes)
            self.at_work -= 1

        monkeypatch.setattr(filling.ctypes, "memmove", slow)


async def test_a_session_that_ends_in_the_midst_of_a_commit_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rigged() as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        await rig.reserve([4 * MIB] * 4, 1)
        copies = SlowCopies(monkeypatch)
        committing = asyncio.create_task(rig.commit(1))
        await copies.entered.wait()
        assert not rig.puts.release(1)  # too late
        await rig.puts.close()
        assert not copies.at_work
        with pytest.raises(Draining):
            await committing
        assert rig.ram.namespace_usage("default").charged_bytes == used


async def test_a_commit_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged() as rig:
        await rig.reserve([4 * MIB] * 4, 1)
        SlowCopies(monkeypatch)
        request = pb.CommitRequest(ctx=pb.Context(deadline_ms=30), lease_id=1)
        with pytest.raises(DeadlineExceeded):
            await rig.puts.commit(request, rig.caller())
        assert rig.session.charged_bytes == 0


async def test_draining_refuses_commits_and_reserves() -> None:
    async with rigged() as rig:
        await rig.reserve([5000], 1)
        rig.dispatcher.start_draining()
        with pytest.raises(Draining):
            await rig.commit(1)
        with pytest.raises(Draining):
            await rig.reserve([5000], 2)


async def test_two_hundred_ends_at_random_leave_nothing() -> None:
    rng = random.Random(7)
    async with rigged(Limits(local=LIMITS.local, max_running_streams=64)) as rig:
        used = rig.ram.namespace_usage("default").charged_bytes
        for turn in range(200):
            session = rig.new_session()
            salt = turn.to_bytes(2, "little")
            works: list[asyncio.Task[object]] = []
            if rng.random() < 0.8:
                put = session.start_put(header(lengths_of(rng, 3, MIB), salt=salt + b"p"))
                works.append(put.task)
                if rng.random() < 0.8:
                    await put.plan()
                    put.tell(rng.randrange(4096, 12_288))
            if rng.random() < 0.8:
                lengths = lengths_of(rng, 3, MIB)
                reserving = asyncio.create_task(session.reserve(lengths, 1, salt=salt + b"r"))
                works.append(reserving)
                if rng.random() < 0.8:
                    await reserving
                    if rng.random() < 0.5:
                        works.append(asyncio.create_task(session.commit(1)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            for work in works:
                if rng.random() < 0.3:
                    work.cancel()
            if rng.random() < 0.3:
                session.puts.release(1)
            await session.session_over()
            for ended in await asyncio.gather(*works, return_exceptions=True):
                assert not isinstance(ended, AssertionError)
            assert session.session.charged_bytes == 0
            assert session.session.failed == []
            await rig.dispatcher.idle()
            run = header([4096] * 3, salt=salt + b"r").run
            await rig.store.delete(rig.dispatcher.run_of(run, pb.Context()))
        assert rig.ram.namespace_usage("default").charged_bytes == used
        assert rig.ram.leased_bytes == 0


async def test_waiting_for_the_mover_is_not_cut_short() -> None:
    ended: asyncio.Future[carrying.Ending] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(carrying.settled(ended))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    ended.set_result(carrying.Ending())
    with pytest.raises(asyncio.CancelledError):
        await waiting
