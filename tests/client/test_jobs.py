"""Jobs: verbs behind the caller's back, against a server that answers when the test lets it."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from wire_server import CANARY, FAMILY, Canary, WireServer, honest_get, payload, wire_server

from kvstored_client import BufferSizeError, ClosedError, GetResult, KVClient
from kvstored_client.jobs import Job, Jobs
from kvstored_client.jobs_pool import MAX_UNCOLLECTED, Pool
from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
WAIT_S = 20.0


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


@pytest.fixture
def client(server: WireServer) -> Iterator[KVClient]:
    with KVClient(server.target) as made:
        yield made


class Gate:
    """A Get that gives `before` messages, says so, and goes on when it is let."""

    def __init__(self, server: WireServer, before: int) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

        def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
            answer = honest_get(request)
            for _ in range(before):
                yield next(answer)
            self.begun.release()
            server.hold(self.go_on)
            yield from answer

        server.on_get = script

    def wait(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_a_job_brings_what_the_verb_would(client: KVClient) -> None:
    canary = Canary(CHUNKS)
    job = client.submit_get(PREFIX, canary.into)
    got = job.result()
    assert job.poll()
    assert got.chunks == CHUNKS
    assert [canary.chunk(i) for i in range(CHUNKS)] == [payload(i) for i in range(CHUNKS)]
    assert canary.guards_stand()
    assert job.result() is got
    assert not job.cancel()


def test_mistakes_are_raised_at_submit_and_nothing_is_queued(
    client: KVClient, server: WireServer
) -> None:
    with pytest.raises(BufferSizeError):
        client.submit_get(PREFIX, bytearray(7))
    with pytest.raises(BufferSizeError):
        client.submit_put(PREFIX, bytearray(7))
    assert client.drain(0.001)
    assert server.hellos == []


def test_a_submit_returns_before_the_server_answers(client: KVClient, server: WireServer) -> None:
    gate = Gate(server, 0)
    job = client.submit_get(PREFIX, Canary(CHUNKS).into)
    gate.wait()
    assert not job.poll()
    assert not client.drain(0.001)
    gate.go_on.set()
    assert job.result().chunks == CHUNKS
    assert client.drain(WAIT_S)


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_after_a_cancel_not_one_more_byte_is_written(
    client: KVClient, server: WireServer, before: int
) -> None:
    gate, canary = Gate(server, before), Canary(CHUNKS)
    job = client.submit_get(PREFIX, canary.into)
    gate.wait()
    assert job.cancel()
    seen = canary.all.copy()
    assert job.poll()
    assert job.result().reason == "cancelled"
    gate.go_on.set()
    server.wait_ended()
    canary.all[:] = CANARY  # the caller's again
    assert client.drain(WAIT_S)
    assert canary.untouched()
    assert seen is not None


def test_after_a_timeout_not_one_more_byte_is_written(client: KVClient, server: WireServer) -> None:
    gate, canary = Gate(server, 2), Canary(CHUNKS)
    job = client.submit_get(PREFIX, canary.into)
    gate.wait()
    got = job.result(timeout_s=0.01)
    assert got.reason == "deadline"
    canary.all[:] = CANARY
    gate.go_on.set()
    server.wait_ended()
    assert canary.untouched()


def test_a_call_ends_at_its_own_deadline(client: KVClient, server: WireServer) -> None:
    gate, canary = Gate(server, 2), Canary(CHUNKS)
    job = client.submit_get(PREFIX, canary.into, timeout_s=0.3)
    assert job.result().reason == "deadline"
    canary.all[:] = CANARY
    gate.go_on.set()
    server.wait_ended()
    assert canary.untouched()


def test_a_cancelled_put_reads_nothing_more(client: KVClient, server: WireServer) -> None:
    begun, go_on = threading.Event(), threading.Event()
    came: list[bytes] = []

    def script(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield pb.PutPlan(
            states=bytes([pb.WANTED] * CHUNKS),
            payload_bytes=CHUNKS * len(payload(0)),
            max_frame_bytes=20_000,
        ).SerializeToString()
        came.append(next(requests))
        begun.set()
        server.hold(go_on)
        came.extend(requests)

    server.on_put = script
    data = b"".join(payload(i) for i in range(CHUNKS))
    memory = np.frombuffer(data, np.uint8).copy()
    job = client.submit_put(PREFIX, memory)
    assert begun.wait(WAIT_S)
    assert job.cancel()
    memory[:] = CANARY
    assert job.result().reason == "cancelled"
    go_on.set()
    server.wait_ended()
    sent = b"".join(came)
    assert sent == data[: len(sent)]


def test_queued_jobs_end_by_their_deadlines_while_others_run(
    client: KVClient, server: WireServer
) -> None:
    gate = Gate(server, 1)
    running = [client.submit_get(PREFIX, Canary(CHUNKS).into) for _ in range(2)]
    for _ in running:
        gate.wait()
    fd, canary = client.completion_fd, Canary(CHUNKS)
    queued = client.submit_get(PREFIX, canary.into, timeout_s=0.05)
    assert readable(fd, WAIT_S), "nobody waits for it, and still it ends"
    assert client.completed() == [queued]
    assert queued.result().reason == "deadline"
    assert canary.untouched()
    cancelled = client.submit_get(PREFIX, canary.into)
    assert cancelled.cancel()
    assert cancelled.result().reason == "cancelled"
    late = client.submit_get(PREFIX, canary.into)
    assert late.result(timeout_s=0.01).reason == "deadline"
    gate.go_on.set()
    assert all(job.result().chunks == CHUNKS for job in running)
    assert client.drain(WAIT_S)
    assert canary.untouched()


def test_too_many_jobs_are_refused_at_once(client: KVClient, server: WireServer) -> None:
    gate = Gate(server, 1)
    jobs = Jobs(client._transport, workers=1, max_queued=2)

    def submit(into: Canary) -> Job[GetResult]:
        return jobs.submit(client._verbs.get(PREFIX, into.into, 0, None, None, False, {}))

    first = submit(Canary(CHUNKS))
    gate.wait()
    waiting = [submit(Canary(CHUNKS)) for _ in range(2)]
    canary = Canary(CHUNKS)
    refused = submit(canary)
    assert refused.poll()
    assert refused.result().reason == "overloaded"
    assert not waiting[0].poll()
    assert waiting[0].cancel()
    again = submit(Canary(CHUNKS))
    gate.go_on.set()
    assert [job.result().chunks for job in (first, waiting[1], again)] == [CHUNKS] * 3
    assert canary.untouched()
    jobs.close()


def test_the_descriptor_tells_of_each_job_once(client: KVClient, server: WireServer) -> None:
    fd = client.completion_fd
    assert client.completion_fd == fd
    assert not readable(fd)
    assert client.completed() == []
    jobs: set[Job[object]] = {client.submit_get(PREFIX, Canary(CHUNKS).into) for _ in range(20)}
    came: list[Job[object]] = []
    while len(came) < len(jobs):
        assert readable(fd, WAIT_S)
        now = client.completed()
        assert all(job.poll() for job in now)
        came += now
    assert set(came) == jobs
    assert client.drain(WAIT_S)
    assert client.completed() == []
    assert not readable(fd)


def test_jobs_that_nobody_collects_are_bounded() -> None:
    class Never:
        def run(self, step: object, stop: object = None) -> None:
            raise AssertionError

    pool = Pool(Never(), 1, 1)  # type: ignore[arg-type]  # nothing is run
    fd = pool.completion_fd()

    def ended() -> Iterator[None]:
        return
        yield

    for _ in range(MAX_UNCOLLECTED + 10):
        pool.add(Job(pool, ended()))  # type: ignore[arg-type]  # a verb that ends at once
    assert readable(fd)
    assert len(pool.completed()) == MAX_UNCOLLECTED
    assert not readable(fd)
    pool.close()


def test_an_ended_job_keeps_no_buffer(client: KVClient) -> None:
    memory = np.zeros(CHUNKS * len(payload(0)), np.uint8)
    alive = weakref.ref(memory)
    job = client.submit_get(PREFIX, memory)
    assert job.result().chunks == CHUNKS
    assert client.drain(WAIT_S)
    del memory
    gc.collect()
    assert alive() is None


def test_a_closed_client_ends_its_jobs(server: WireServer) -> None:
    gate, canary = Gate(server, 2), Canary(CHUNKS)
    client = KVClient(server.target)
    jobs = [client.submit_get(PREFIX, canary.into) for _ in range(2)]
    for _ in jobs:
        gate.wait()
    jobs.append(client.submit_get(PREFIX, canary.into))
    client.close()
    assert all(job.poll() for job in jobs)
    canary.all[:] = CANARY
    assert [job.result().reason for job in jobs] == ["closed"] * 3
    with pytest.raises(ClosedError):
        client.submit_get(PREFIX, canary.into)
    with pytest.raises(ClosedError):
        _ = client.completion_fd
    gate.go_on.set()
    server.wait_ended()
    server.wait_ended()
    assert canary.untouched()


def test_a_dropped_client_leaves_no_threads(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored_client.jobs_pool._IDLE_S", 0.01)
    others = set(threading.enumerate())
    gate, client = Gate(server, 1), KVClient(server.target)
    jobs = [client.submit_get(PREFIX, Canary(CHUNKS).into, timeout_s=600) for _ in range(3)]
    gate.wait()
    mine = [t for t in set(threading.enumerate()) - others if t.name.startswith("kvstored-job")]
    assert len(mine) == 3, "two that work, and one that looks after the third job's deadline"
    gate.go_on.set()
    assert [job.result().chunks for job in jobs] == [CHUNKS] * 3
    pool = weakref.ref(client._jobs._pool)
    client._transport.close()
    del client, jobs
    for thread in mine:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    gc.collect()
    assert pool() is None


def test_jobs_of_the_parent_are_cancelled_in_a_child(client: KVClient, server: WireServer) -> None:
    fd = client.completion_fd
    ended = client.submit_get(PREFIX, Canary(CHUNKS).into)
    assert readable(fd, WAIT_S)
    gate = Gate(server, 2)
    memories = [Canary(CHUNKS) for _ in range(3)]
    jobs = [client.submit_get(PREFIX, memory.into) for memory in memories]
    for _ in range(2):
        gate.wait()
    back, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = [
                all(job.poll() for job in jobs),
                [job.result().reason for job in jobs] == ["cancelled"] * 3,
                not any(job.cancel() for job in jobs),
                not [t for t in threading.enumerate() if t.name.startswith("kvstored-job")],
                not readable(fd) and client.completed() == [],
                client.drain(0.001),
            ]
            os.write(there, bytes(told))
        finally:
            os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    assert os.read(back, 100) == bytes([True] * 6)
    os.close(back)
    gate.go_on.set()
    assert [job.result().chunks for job in jobs] == [CHUNKS] * 3
    assert readable(fd)
    assert client.drain(WAIT_S)
    assert set(client.completed()) == {ended, *jobs}


def test_many_threads_submit_cancel_and_wait(client: KVClient) -> None:
    def one(seed: int) -> None:
        for turn in range(20):
            canary = Canary(CHUNKS)
            job = client.submit_get(PREFIX, canary.into)
            if (seed + turn) % 3 == 0:
                cancelled = job.cancel()
                assert (job.result().reason == "cancelled") == cancelled
                canary.all[:] = CANARY
                time.sleep(0)  # let whoever would still write do it
                assert canary.untouched()
            else:
                assert job.result().chunks == CHUNKS
                assert canary.chunk(1) == payload(1)

    failures: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            one(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert client.drain(WAIT_S)
