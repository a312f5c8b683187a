"""KVClient on the daemon's own node: every verb over the local session, against a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from local_clients import FAMILY, MIB, OBJECT_BYTES, LocalServed, chunks, client_of, local_serving

from kvstored.server.limits import Limits, LocalLimits
from kvstored_client import (
    ChunkState,
    GroupRule,
    Iov,
    KVFamily,
    KVPart,
    NotLeasedError,
    PutState,
    Rows,
)
from kvstored_client.local import copying

PREFIX = FAMILY.prefix(range(64 * 16))
DATA = chunks(16)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving(cap_bytes=64 * MIB) as running:
        yield running


def test_every_verb_goes_by_the_local_session(served: LocalServed) -> None:
    with client_of(served) as client:
        assert "local" in client.hello().features
        assert client.put(PREFIX, DATA).stored == 16
        assert client.put(PREFIX, DATA).existed == 16
        assert client.match(PREFIX).chunks == 16
        out = np.zeros_like(DATA)
        got = client.get(PREFIX, out)
        assert (got.chunks, got.reason, got.bytes_by_tier) == (16, "", {"ram": DATA.nbytes})
        assert (out == DATA).all()
        assert client.touch(PREFIX).chunks == client.prefetch(PREFIX).chunks == 16
        assert client.pin(PREFIX, stop=4).chunks == client.unpin(PREFIX, stop=4).chunks == 4
        assert len(list(client.list(page_entries=5))) == 16
        assert client.usage().tenants[0].charged_bytes == DATA.nbytes
        assert client.delete(PREFIX, start=8).chunks == 8
        got = client.get(PREFIX, out)
        assert (got.chunks, got.reason) == (8, "deleted")
        assert served.figures.sessions == 1
        assert client.delete(PREFIX).chunks == 8
    served.becomes(lambda: served.server.figures().sessions == 0 and served.nothing_held())


def test_scattered_memory_and_parts_that_vary(served: LocalServed) -> None:
    family = KVFamily(
        "local varying", "w", "float32", parts=[KVPart("a", 5000), KVPart("b", max_nbytes=9000)]
    )
    prefix = family.prefix(range(64 * 3))
    rng = np.random.default_rng(3)
    sizes = [5000, 9000, 5000, 4097, 5000, 8192]
    views = [rng.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    with client_of(served) as client:
        assert client.put(prefix, views).stored == 3
        pool = np.zeros((8, 3, 3000), np.uint8)
        assert client.get(prefix, Rows(pool, [7, 2, 0, 5, 1, 3])).chunks == 3
        for row, view in zip([7, 2, 0, 5, 1, 3], views, strict=True):
            assert (pool[row].ravel()[: len(view)] == view).all()
        out = np.zeros(6 * 9000, np.uint8)
        cuts = [1000] * 9 * 6
        starts = out.ctypes.data + np.arange(9 * 6) * 1000
        assert client.get(prefix, Iov(starts[::-1].copy(), cuts, [9] * 6)).chunks == 3
        whole = out.reshape(6 * 9, 1000)[::-1].reshape(6, 9000)
        for row, view in zip(whole, views, strict=True):
            assert (row[: len(view)] == view).all()
        with client.acquire(prefix) as lease:
            assert bytes(lease[1, "b"]) == views[3].tobytes()
            with pytest.raises(NotLeasedError, match="several parts"):
                lease[1]


def test_a_get_is_cut_into_windows_that_fit_a_session(
    served: LocalServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WINDOW_BYTES", 3 * OBJECT_BYTES)
    prefix = FAMILY.prefix(range(1, 64 * 16 - 20))  # a short last chunk
    with client_of(served) as client:
        assert client.put(prefix, DATA).stored == 16
        out = np.zeros_like(DATA)
        with ThreadPoolExecutor(4) as threads:
            outs = [np.zeros_like(DATA) for _ in range(12)]
            results = list(threads.map(lambda out: client.get(prefix, out), outs))
        assert [got.chunks for got in results] == [16] * 12
        assert all((out == DATA).all() for out in outs)
        holed = FAMILY.prefix(range(4, 4 + 64 * 16))
        views = [None if i == 4 else DATA[i] for i in range(16)]
        assert client.put(holed, views).stored == 15
        out[:] = 0
        got = client.get(holed, out)
        assert got.chunks == 4
        assert got.states[4] is ChunkState.MISS_NEVER_STORED
        assert (out[5:] == DATA[5:]).all(), "what lies behind a gap is read too"
    served.becomes(served.nothing_held)


def test_groups_that_look_back_are_not_cut(
    served: LocalServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WINDOW_BYTES", OBJECT_BYTES)
    family = KVFamily(
        "local window",
        "w",
        "float32",
        groups={"full": GroupRule.all(), "window": GroupRule.trailing(100)},
        parts=[KVPart("f", OBJECT_BYTES, group="full"), KVPart("w", OBJECT_BYTES, group="window")],
    )
    prefix = family.prefix(range(64 * 8))
    data = chunks(16, seed=4)
    with client_of(served) as client:
        assert client.put(prefix, data).stored == 8
        out = np.zeros((10, OBJECT_BYTES), np.uint8)
        got = client.get(prefix, out)
        assert got.chunks == 8
        wanted = [*range(0, 12, 2), 12, 13, 14, 15]
        assert (out == data[wanted]).all()
        with client.acquire(prefix) as lease:
            assert len(lease) == 8
            assert bytes(lease[7, "w"]) == data[15].tobytes()
            with pytest.raises(NotLeasedError, match="not needed"):
                lease[0, "w"]


@pytest.mark.parametrize("ring_bytes", [64 << 10, 256 << 10, 9 << 18])
def test_uploads_take_turns_and_wrap_around_the_ring(ring_bytes: int) -> None:
    limits = Limits(local=LocalLimits(ring_bytes=ring_bytes))
    with local_serving(limits, cap_bytes=64 * MIB) as small, client_of(small) as client:
        sets = [chunks(50, seed=i) for i in range(6)]
        prefixes = [FAMILY.prefix(range(i, i + 64 * 50)) for i in range(6)]
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(client.put, prefixes, sets))
        assert [(put.stored, put.reason) for put in results] == [(50, "")] * 6
        for prefix, data in zip(prefixes, sets, strict=True):
            out = np.zeros_like(data)
            assert client.get(prefix, out).chunks == 50
            assert (out == data).all()


def test_slots_are_written_in_place_and_readable_only_after_commit(served: LocalServed) -> None:
    prefix = FAMILY.prefix(range(2, 2 + 64 * 6))
    data = chunks(6, seed=5)
    with client_of(served) as client:
        with client.reserve(prefix) as slots:
            assert (slots.states == 0).all()
            assert slots.reason == ""
            for i in range(6):
                slots[i][:] = data[i].tobytes()
            view = slots[0]
            assert client.match(prefix).chunks == 0
            put = slots.commit(indices=[0, 1, 2, 5])
        assert [o.outcome for o in put.outcomes] == ["stored"] * 3 + ["not_offered"] * 2 + [
            "stored"
        ]
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
        out = np.zeros_like(data)
        got = client.get(prefix, out)
        assert got.chunks == 3
        assert (out[[0, 1, 2, 5]] == data[[0, 1, 2, 5]]).all()
        with client.reserve(prefix) as slots:
            states = slots.states.ravel().tolist()
            assert states == [PutState.EXISTED] * 3 + [0, 0, PutState.EXISTED]
            with pytest.raises(NotLeasedError, match="no slot"):
                slots[0]
            array = np.asarray(slots[3])
            array[:] = data[3]
            assert slots.commit([3], durability="accepted").stored == 1
        assert client.get(prefix, out).chunks == 4
        assert (out[3] == data[3]).all()
        with client.reserve(FAMILY.prefix(range(3, 70))) as slots:
            slots[0][0] = 1
        assert client.match(FAMILY.prefix(range(3, 70))).chunks == 0, "given up"


def test_a_durable_commit_says_what_is_not_durable_of_what_existed(served: LocalServed) -> None:
    prefix = FAMILY.prefix(range(44, 44 + 64 * 3))
    data = chunks(3, seed=6)
    with client_of(served) as client:  # of a daemon that has nothing but RAM
        assert client.put(prefix, data).stored == 3
        with client.reserve(prefix) as slots:
            assert slots.wanted == []
            put = slots.commit(durability="durable")
        assert set(put.outcomes) == {PutState.STORED_NOT_DURABLE}
        with client.reserve(prefix) as slots:
            assert set(slots.commit().outcomes) == {PutState.EXISTED}
        client.delete(prefix, start=1, stop=2)
        client.delete(prefix, start=2, stop=3)
        with client.reserve(prefix) as slots:
            for chunk in slots.wanted:
                slots[chunk][:] = data[chunk].tobytes()
            put = slots.commit([1], durability="durable")
        kept = PutState.STORED_NOT_DURABLE
        assert put.outcomes == (kept, kept, PutState.NOT_OFFERED)
        with client.reserve(prefix) as slots:
            put = slots.commit([], durability="durable")
        assert put.outcomes == (kept, kept, PutState.NOT_OFFERED)


def test_a_hold_protects_until_it_is_released(served: LocalServed) -> None:
    prefix = FAMILY.prefix(range(5, 5 + 64 * 4))
    with client_of(served) as client:
        assert client.put(prefix, chunks(4)).stored == 4
        match = client.match(prefix, hold=True)
        assert match.chunks == 4
        assert match.hold is not None
        namespace = served.store.namespaces["default"]
        assert served.look(lambda: bool(namespace.holds))
        match.hold.release()
        served.becomes(lambda: not namespace.holds)
        match = client.match(prefix, hold=True)
        assert match.hold is not None
        served.becomes(lambda: bool(namespace.holds))
        del match  # dropped, not released
        served.becomes(lambda: not namespace.holds)
        assert client.match(FAMILY.prefix(range(6, 100)), hold=True).hold is None


def test_jobs_run_over_the_session_and_can_be_cancelled(served: LocalServed) -> None:
    prefix = FAMILY.prefix(range(7, 7 + 64 * 8))
    data = chunks(8, seed=7)
    with client_of(served) as client:
        assert client.submit_put(prefix, data).result().stored == 8
        outs = [np.zeros_like(data) for _ in range(20)]
        jobs = [client.submit_get(prefix, out) for out in outs]
        ended = [job.cancel() for job in jobs[10:]]
        assert all(job.result().chunks == 8 for job in jobs[:10])
        assert all((out == data).all() for out in outs[:10])
        for cancelled, job in zip(ended, jobs[10:], strict=True):
            assert job.result().reason == ("cancelled" if cancelled else "")
        assert client.drain(10)


def test_threads_share_one_session(served: LocalServed) -> None:
    with client_of(served) as client:
        assert client.put(PREFIX, DATA).reason == ""
        begun = threading.Barrier(8)

        def work(seed: int) -> None:
            begun.wait()
            out = np.zeros_like(DATA)
            for i in range(20):
                kind = (seed + i) % 4
                if kind == 0:
                    assert client.match(PREFIX).chunks == 16
                elif kind == 1:
                    assert client.get(PREFIX, out).chunks == 16
                    assert (out == DATA).all()
                elif kind == 2:
                    with client.acquire(PREFIX) as lease:
                        assert bytes(lease[seed]) == DATA[seed].tobytes()
                else:
                    assert client.touch(PREFIX).chunks == 16

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert served.figures.sessions == 1
    served.becomes(served.nothing_held)


def test_no_grpc_and_no_torch_are_loaded_on_the_same_node(served: LocalServed) -> None:
    script = f"""
import sys
from kvstored_client import KVClient, KVFamily, KVPart
family = KVFamily("local clients", "w", "float32", parts=[KVPart("kv", {OBJECT_BYTES})])
client = KVClient("unix://{served.path.with_name("k.sock")}")
prefix = family.prefix(range(11, 11 + 64 * 2))
data = bytearray(range(256)) * ({OBJECT_BYTES} // 128)
assert client.put(prefix, data).stored == 2
into = bytearray(len(data))
assert client.get(prefix, into).chunks == 2 and into == data
with client.acquire(prefix) as lease, client.reserve(prefix) as slots:
    assert bytes(lease[1]) == bytes(data[{OBJECT_BYTES}:]) and slots.reason == ""
assert client.submit_get(prefix, into).result().chunks == 2
assert client.match(prefix, hold=True).hold is not None
assert client.delete(prefix).chunks == 2
client.close()
print(sorted({{"grpc", "torch"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
