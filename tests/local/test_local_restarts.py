"""The daemon is killed or stopped, and started again, while clients read and put.

Nobody is ever given a wrong byte, calls end by their deadlines, clients come back by themselves,
and what they looked at before stays until they let go of it; then its memory is mapped no longer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torture_daemon import MIB, Figures, SmallDaemon, small_daemon
from torture_data import OBJECT_BYTES, contents, prefix_of

from kvstored_client import KVClient

CHUNKS = 24
NUMBERS = range(6)
TIMEOUT_S = 4.0
LATE_S = 30.0
"""Beyond its deadline a call is only then late: the machine may be busy."""

GIVE_UP_S = 60.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[SmallDaemon]:
    with small_daemon(nvme_bytes=64 * MIB) as running:
        yield running


def mapped() -> set[str]:
    """The daemon's memory in this process: inodes of its segments, areas and rings."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvstored" in line}


class Engine:
    """Threads that use one client all the while, each in its own way, and compare what they get."""

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._good: Counter[str] = Counter()
        self._wrong: list[str] = []
        ways = [self._get, self._put, self._acquire, self._reserve, self._jobs]
        self._threads = [threading.Thread(target=self._work, args=(way,)) for way in ways]
        self.ways = {way.__name__ for way in ways}

    def __enter__(self) -> Engine:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(GIVE_UP_S)
            assert not thread.is_alive(), "a call does not end"
        assert not self._wrong, self._wrong

    def _work(self, way: Callable[[int], bool]) -> None:
        number = 0
        try:
            while not self._over.is_set():
                began = time.monotonic()
                good = way(number % len(NUMBERS))
                number += 1
                if time.monotonic() - began > TIMEOUT_S * 3 + LATE_S:
                    raise AssertionError("later than its deadline")
                if good:
                    with self._changed:
                        self._good[way.__name__] += 1
                        self._changed.notify_all()
                else:
                    self._over.wait(0.01)  # nobody is there: no reason to ask at once
        except Exception as error:
            self._wrong.append(f"{way.__name__}: {error!r}")
            with self._changed:
                self._changed.notify_all()

    def await_all(self) -> None:
        """Wait until every way has succeeded once more."""
        with self._changed:
            self._good.clear()
            came = self._changed.wait_for(
                lambda: self._wrong or self._good.keys() == self.ways, GIVE_UP_S
            )
            assert came, f"only {self._good} have come back"
            assert not self._wrong, self._wrong

    # ---- ways ------------------------------------------------------------------------------------

    def _check(self, number: int, found: NDArray[np.uint8], ok: NDArray[np.bool_]) -> None:
        expected = contents(number, CHUNKS)
        assert np.array_equal(found[ok], expected[ok]), f"wrong bytes of {number}"

    def _get(self, number: int) -> bool:
        out: NDArray[np.uint8] = np.zeros((CHUNKS, OBJECT_BYTES), np.uint8)
        got = self._client.get(prefix_of(number, CHUNKS), out, timeout_s=TIMEOUT_S)
        self._check(number, out, got.ok)
        return got.chunks == CHUNKS

    def _put(self, number: int) -> bool:
        """Of what is held already, and, once it is deleted, of what is not."""
        prefix = prefix_of(number, CHUNKS)
        if number % 2:
            self._client.delete(prefix, start=CHUNKS // 2, timeout_s=TIMEOUT_S)
        put = self._client.put(prefix, contents(number, CHUNKS), timeout_s=TIMEOUT_S)
        return not put.reason

    def _acquire(self, number: int) -> bool:
        with self._client.acquire(prefix_of(number, CHUNKS), timeout_s=TIMEOUT_S) as lease:
            for chunk in range(len(lease)):
                view = lease.array(chunk)
                assert np.array_equal(view, contents(number, CHUNKS)[chunk]), f"wrong in {number}"
            return len(lease) == CHUNKS

    def _reserve(self, number: int) -> bool:
        number += 50  # never put by others
        prefix = prefix_of(number, CHUNKS)
        self._client.delete(prefix, timeout_s=TIMEOUT_S)
        with self._client.reserve(prefix, timeout_s=TIMEOUT_S) as slots:
            if slots.reason:
                return False
            for chunk in np.flatnonzero(slots.states[:, 0] == 0).tolist():
                slots[chunk][:] = contents(number, CHUNKS)[chunk].data
            if slots.commit().reason:
                return False
        out: NDArray[np.uint8] = np.zeros((CHUNKS, OBJECT_BYTES), np.uint8)
        got = self._client.get(prefix, out, timeout_s=TIMEOUT_S)
        self._check(number, out, got.ok)
        return got.chunks == CHUNKS

    def _jobs(self, number: int) -> bool:
        out: NDArray[np.uint8] = np.zeros((CHUNKS, OBJECT_BYTES), np.uint8)
        get = self._client.submit_get(prefix_of(number, CHUNKS), out, timeout_s=TIMEOUT_S)
        other = (number + 1) % len(NUMBERS)
        put = self._client.submit_put(
            prefix_of(other, CHUNKS), contents(other, CHUNKS), timeout_s=TIMEOUT_S
        )
        got = get.result()
        self._check(number, out, got.ok)
        return put.result().reason == "" and got.chunks == CHUNKS


def test_nothing_is_wrong_whenever_the_daemon_dies(daemon: SmallDaemon) -> None:
    before = mapped()
    with KVClient(daemon.target) as client:
        for number in NUMBERS:
            put = client.put(
                prefix_of(number, CHUNKS), contents(number, CHUNKS), durability="durable"
            )
            assert put.stored == CHUNKS, (put.reason, put.detail)
        old_lease = client.acquire(prefix_of(0, CHUNKS))
        views = [old_lease.array(chunk) for chunk in range(CHUNKS)]
        old = mapped() - before
        assert old
        with Engine(client) as engine:
            engine.await_all()
            for end in (daemon.kill, daemon.stop, daemon.kill):
                end()
                daemon.start()
                engine.await_all()
        assert np.array_equal(np.stack(views), contents(0, CHUNKS))
        with client.acquire(prefix_of(0, CHUNKS)) as lease:
            assert len(lease) == CHUNKS, lease.reason
            # Of the sessions that are over only the one whose views live maps anything.
            inodes = mapped() - before
            views.clear()
            old_lease.release()
            _await(lambda: not mapped() & old)
            assert mapped() - before <= inodes - old
    _await(lambda: mapped() <= before)
    _await(lambda: nothing_held(daemon.figures()))


def nothing_held(figures: Figures) -> bool:
    """By clients, nor by what writes their last objects to the disk."""
    held = (figures.sessions, figures.leased_bytes, figures.local_leased_bytes)
    return (*held, figures.staging_bytes) == (0, 0, 0, 0)


def _await(condition: Callable[[], bool]) -> None:
    """Sessions end in threads of their own."""
    end = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < end
