"""A client that does anything, by chance, to a few prefixes that others do anything to as well.

Every byte that it is given is compared with what its key stands for.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torture_data import OBJECT_BYTES, contents, prefix_of
from torture_pen import Stage

from kvstored_client import KVClient, Prefix, Rows

NUMBERS = range(100, 124)
CHUNKS = 12
MOST_KEPT = 8
SAY_EVERY = 10
TIMEOUT_S = 2.0
SHORT_TIMEOUT_S = 0.003

Kept = tuple[int, int, object, list[NDArray[np.uint8]]]
"""Number, first chunk, what keeps it, views."""


@lru_cache(maxsize=1)
def _table() -> dict[int, NDArray[np.uint8]]:
    return {number: contents(number, CHUNKS) for number in NUMBERS}


def prepare() -> None:
    """Compute what is compared with."""
    _table()


def work(stage: Stage) -> None:
    """Until killed. What is wrong is raised; how many operations were done is said now and then."""
    stage.tell(at="begun")
    user = _User(stage)
    done = 0
    while True:
        user.act()
        done += 1
        if done % SAY_EVERY == 0:
            stage.tell(done=SAY_EVERY, **user.told())


class _User:
    def __init__(self, stage: Stage) -> None:
        self._chance = random.Random(stage.number)
        self._client = KVClient(stage.target)
        self._out: NDArray[np.uint8] = np.zeros((CHUNKS, OBJECT_BYTES), np.uint8)
        self._kept: list[Kept] = []
        self._counts = {"compared": 0, "stored": 0, "leased": 0}
        self._acts: list[tuple[Callable[[int, Prefix, int], None], float]] = [
            (self._get, 5),
            (self._put, 5),
            (self._acquire, 5),
            (self._reserve, 3),
            (self._hold, 2),
            (self._let_go, 2),
            (self._delete, 2),
            (self._job, 3),
            (self._small, 1),
            (self._again, 0.2),
        ]

    def told(self) -> dict[str, int]:
        """Chunks compared, stored and leased since the last time."""
        told, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return told

    def act(self) -> None:
        """Something."""
        (what,) = self._chance.choices(*zip(*self._acts, strict=True))
        number = self._chance.choice(NUMBERS)
        start = self._chance.randrange(CHUNKS) if self._chance.random() < 0.3 else 0
        what(number, prefix_of(number, CHUNKS), start)

    def _timeout(self) -> float:
        return SHORT_TIMEOUT_S if self._chance.random() < 0.05 else TIMEOUT_S

    def _compare(self, number: int, chunk: int, found: NDArray[np.uint8]) -> None:
        self._counts["compared"] += 1
        if not np.array_equal(found, _table()[number][chunk]):
            at = int(np.flatnonzero(found != _table()[number][chunk])[0])
            raise AssertionError(f"prefix {number}, chunk {chunk}: wrong from byte {at} on")

    # ---- reading ---------------------------------------------------------------------------------

    def _get(self, number: int, prefix: Prefix, start: int) -> None:
        rows = self._chance.sample(range(CHUNKS), CHUNKS - start)
        into = Rows(self._out, rows)
        self._take(
            number, start, rows, self._client.get(prefix, into, start, timeout_s=TIMEOUT_S).ok
        )

    def _take(self, number: int, start: int, rows: list[int], ok: NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(ok).tolist():
            self._compare(number, start + index, self._out[rows[index]])

    def _job(self, number: int, prefix: Prefix, start: int) -> None:
        """A get and a put behind its back; some are cancelled, and then nothing more is written."""
        other = self._chance.choice(NUMBERS)
        rows = [*range(CHUNKS - start)]
        out = self._out[: len(rows)]
        get = self._client.submit_get(prefix, out, start, timeout_s=TIMEOUT_S)
        put = self._client.submit_put(prefix_of(other, CHUNKS), _table()[other])
        if self._chance.random() < 0.3:
            get.cancel()
            seen = self._out.copy()
            put.result(self._timeout())
            assert np.array_equal(seen, self._out), "written to after a cancel"
        self._take(number, start, rows, get.result().ok)
        self._counts["stored"] += put.result().stored

    def _acquire(self, number: int, prefix: Prefix, start: int) -> None:
        lease = self._client.acquire(prefix, start, timeout_s=self._timeout())
        self._counts["leased"] += len(lease)
        views = [lease.array(chunk) for chunk in range(len(lease))]
        kept: Kept = (number, start, lease, views)
        self._look(kept)
        if self._chance.random() < 0.5:
            self._keep(kept)

    def _hold(self, number: int, prefix: Prefix, start: int) -> None:
        del start
        match = self._client.match(prefix, hold=True)
        if match.hold is None:
            return
        if self._chance.random() < 0.5:
            self._acquire(number, prefix, 0)
        self._keep((number, 0, match.hold, []))

    # ---- what is kept for a while ----------------------------------------------------------------

    def _keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        if len(self._kept) > MOST_KEPT:
            self._let_go(0, prefix_of(0, 1), 0)

    def _look(self, kept: Kept) -> None:
        number, start, _, views = kept
        for index, view in enumerate(views):
            self._compare(number, start + index, view)

    def _let_go(self, number: int, prefix: Prefix, start: int) -> None:
        """Look at something that is kept once more; drop or release it."""
        del number, prefix, start
        if not self._kept:
            return
        kept = self._kept.pop(self._chance.randrange(len(self._kept)))
        self._look(kept)
        if self._chance.random() < 0.5:
            kept[3].clear()
            kept[2].release()  # type: ignore[attr-defined]  # Lease, Hold or Slots

    # ---- writing ---------------------------------------------------------------------------------

    def _put(self, number: int, prefix: Prefix, start: int) -> None:
        stop = self._chance.randint(start + 1, CHUNKS)
        durability = "durable" if self._chance.random() < 0.1 else "accepted"
        full = self._chance.choice(["wait", "refuse"])
        data = _table()[number][start:stop]
        put = self._client.put(
            prefix,
            data,
            start,
            durability=durability,
            when_full=full,
            timeout_s=self._timeout(),
        )
        self._counts["stored"] += put.stored

    def _reserve(self, number: int, prefix: Prefix, start: int) -> None:
        slots = self._client.reserve(prefix, start, when_full="refuse", timeout_s=self._timeout())
        free = np.flatnonzero(slots.states[:, 0] == 0).tolist()
        written = self._chance.sample(free, self._chance.randint(0, len(free)))
        if slots.reason in ("unreachable", "deadline", "overloaded"):
            written = []
        for index in written:
            slots[index][:] = _table()[number][start + index].data
        if self._chance.random() < 0.2:
            self._keep((number, 0, slots, []))
        elif self._chance.random() < 0.8:
            self._counts["stored"] += slots.commit(written).stored

    def _delete(self, number: int, prefix: Prefix, start: int) -> None:
        self._client.delete(prefix, start)

    def _small(self, number: int, prefix: Prefix, start: int) -> None:
        which = self._chance.choice([self._client.touch, self._client.prefetch])
        which(prefix, start)
        self._client.match(prefix, mode="each")

    def _again(self, number: int, prefix: Prefix, start: int) -> None:
        """A forked child reads with a session of its own."""
        child = os.fork()
        if not child:
            self._get(number, prefix, start)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
