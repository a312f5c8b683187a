"""Rings are bounded per namespace, and small ones leave room for many sessions."""

from __future__ import annotations

import pytest
from local_put_support import MIB, header, rigged

from kvstored.errors import ResourceExhausted
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local.staging import LEAST_RING_BYTES, Memory, Staging, most_area_bytes
from kvstored_client.proto import kvstore_pb2 as pb


async def all_rings(shared: Staging, namespace: str) -> list[Memory]:
    rings: list[Memory] = []
    try:
        while len(rings) < 200:
            rings.append(await shared.make_ring(namespace))
            rings[-1].forget_descriptor()
    except ResourceExhausted:
        pass
    return rings


async def test_rings_of_one_namespace_leave_the_others_theirs() -> None:
    shared = Staging(LocalLimits(max_total_staging_bytes=32 * MIB))
    greedy = await all_rings(shared, "default")
    sizes = [ring.size_bytes for ring in greedy]
    assert sum(sizes) <= 16 * MIB
    assert sizes[:2] == [4 * MIB] * 2
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) == LEAST_RING_BYTES
    with pytest.raises(ResourceExhausted, match="which may have half"):
        await shared.make_area("default", MIB)
    other = await all_rings(shared, "other")
    assert [ring.size_bytes for ring in other[:2]] == [4 * MIB] * 2
    for namespace, rings in (("default", greedy), ("other", other)):
        for ring in rings:
            shared.free(namespace, ring)
    await shared.settled()
    assert shared.footprint_bytes == 0
    again = await shared.make_ring("default")
    assert again.size_bytes == 4 * MIB
    shared.free("default", again)
    await shared.close()


@pytest.mark.parametrize(("total", "fit"), [(16 * MIB, 17), (128 * MIB, 76)])
async def test_as_many_sessions_fit_as_the_documentation_says(total: int, fit: int) -> None:
    shared = Staging(LocalLimits(max_total_staging_bytes=total))
    rings = await all_rings(shared, "default")
    assert len(rings) == fit
    for ring in rings:
        shared.free("default", ring)
    await shared.close()


def test_the_largest_reservation_leaves_room_for_a_ring() -> None:
    assert most_area_bytes(LocalLimits()) == 256 * MIB
    assert most_area_bytes(LocalLimits(max_total_staging_bytes=16 * MIB)) == 4 * MIB
    assert most_area_bytes(LocalLimits(max_total_staging_bytes=2 * MIB)) == MIB - LEAST_RING_BYTES


async def test_a_put_goes_through_a_small_ring() -> None:
    limits = LocalLimits(max_total_staging_bytes=2 * MIB)
    async with rigged(Limits(local=limits)) as rig:
        payload = bytes(range(256)) * (MIB // 256)
        states = await rig.put(header([MIB]), payload)
        assert list(states) == [pb.STORED]
        assert rig.staging.footprint_bytes == LEAST_RING_BYTES
        assert await rig.stored(header([MIB]).run) == {0: payload}
