"""Clients killed at every step, some at a time, and what is left of them: nothing.

Meanwhile one client has a lease and reads it, over and over.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torture_daemon import Deadline, Figures, SmallDaemon
from torture_data import OBJECT_BYTES, contents, prefix_of
from torture_pen import Message, Pen
from torture_steps import BASE, BASE_CHUNKS, COLD, COLD_CHUNKS, WRITTEN_CHUNKS

from kvstored_client import KVClient

READ, READ_CHUNKS = 3, 32
FLOOD = 4
FIRST_WRITTEN = 1000
AT_A_TIME = 3
FREED_WITHIN_S = 30.0
"""Long after it should be: a second is what is promised, and what a run tells."""

LONGEST_PAUSE_S = 0.02
BEING_WRITTEN = {"dirty_bytes", "nvme_objects"}
"""What is not the client's any more, but the disk's."""

KNOWN = {BASE: BASE_CHUNKS, COLD: COLD_CHUNKS, READ: READ_CHUNKS}
"""Chunks of the prefixes that are there all the while."""

FORKS = ("", "os", "raw")
READS_COLD = {"copies", "wire_acquire_sent", "wire_hold_sent"}


@dataclass
class Report:
    """What a run shows. `leaked`: differences that stayed, in words. `freed_ms`: per batch, from
    the last kill until the daemon stood as before.
    """

    rounds: int = 0
    leaked: list[str] = field(default_factory=list)
    freed_ms: list[float] = field(default_factory=list)
    survived: int = 0

    @property
    def slowest_ms(self) -> float:
        return max(self.freed_ms, default=0.0)


@contextlib.contextmanager
def undisturbed_reader(target: str) -> Iterator[None]:
    """A lease whose bytes are compared all the while."""
    with KVClient(target) as client, client.acquire(prefix_of(READ, READ_CHUNKS)) as lease:
        assert len(lease) == READ_CHUNKS, lease.reason
        expected = contents(READ, READ_CHUNKS)
        over = threading.Event()
        wrong: list[int] = []

        def read() -> None:
            views = [lease.array(chunk) for chunk in range(READ_CHUNKS)]
            while not over.is_set():
                for chunk, view in enumerate(views):
                    if not np.array_equal(view, expected[chunk]):
                        wrong.append(chunk)
                        return
                over.wait(0.005)  # lets others have a core

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert not wrong, f"chunk {wrong} changed under its reader"


class KillRounds:
    """A daemon, its contents, and a client that looks at what is left."""

    def __init__(self, daemon: SmallDaemon, pen: Pen, seed: int) -> None:
        self.report = Report()
        self._daemon = daemon
        self._pen = pen
        self._chance = random.Random(seed)
        self._next = FIRST_WRITTEN
        self._looker = KVClient(daemon.target)
        with KVClient(daemon.target) as writer:
            for number, chunks in KNOWN.items():
                put = writer.put(
                    prefix_of(number, chunks),
                    contents(number, chunks),
                    durability="durable" if daemon.nvme_bytes else "accepted",
                )
                assert put.stored == chunks, (put.reason, put.detail)

    def run(self, steps: Sequence[str], each: int) -> Report:
        """Kill at each of the steps so many times. Then the whole cap must be usable."""
        names = [name for name in steps for _ in range(each)]
        self._chance.shuffle(names)
        with undisturbed_reader(self._daemon.target):
            before = self._baseline()
            for at in range(0, len(names), AT_A_TIME):
                self._batch(names[at : at + AT_A_TIME], before)
        self._looker.close()
        use_it_all(self._daemon, KNOWN)
        return self.report

    # ---- before ----------------------------------------------------------------------------------

    def _baseline(self) -> Figures:
        """How it stands with nobody but the reader and the looker."""
        self._looker.match(prefix_of(BASE, BASE_CHUNKS))
        wanted = {"sessions": 2, "staging_bytes": 0, "dirty_bytes": 0}
        deadline = Deadline(FREED_WITHIN_S)
        while True:
            found = self._daemon.figures()
            if all(getattr(found, name) == value for name, value in wanted.items()):
                assert found.local_leased_bytes == READ_CHUNKS * OBJECT_BYTES
                return replace(found, descriptors=self._descriptors())
            assert not deadline.over, found

    def _descriptors(self) -> int:
        """Without those of questions that were answered a moment ago."""
        return min(self._daemon.figures().descriptors for _ in range(10))

    def _cool(self) -> None:
        """Have what nobody holds leave RAM."""
        chunks = self._daemon.ram_bytes // OBJECT_BYTES * 7 // 8
        prefix = prefix_of(FLOOD, chunks)
        with KVClient(self._daemon.target) as client:
            client.put(prefix, contents(FLOOD, chunks))
            client.delete(prefix)

    # ---- a batch ---------------------------------------------------------------------------------

    def _batch(self, names: Sequence[str], before: Figures) -> None:
        if self._daemon.nvme_bytes and READS_COLD & {*names}:
            self._cool()
        numbers = {}
        for name in names:
            numbers[self._next] = name
            fork = FORKS[self._next % len(FORKS)]
            self._pen.order(
                what="step", step=name, number=self._next, target=self._daemon.target, fork=fork
            )
            self._next += 1
        arrived = [self._arrival() for _ in names]
        self._chance.shuffle(arrived)
        for message in arrived:
            self._kill(message)
        self._await_freed(numbers, before, time.monotonic())
        for message in arrived:
            for who in ("pid", "child"):
                if pid := int(str(message[who])):
                    if who == "child":
                        os.kill(pid, 0)  # it lives still, whatever it has of its parent's
                        os.kill(pid, signal.SIGKILL)
                    status = self._pen.reap(pid)
                    assert os.WTERMSIG(status) == signal.SIGKILL
        self.report.rounds += len(names)

    def _arrival(self) -> Message:
        message = self._pen.hear()
        assert message is not None, "a victim does not arrive"
        return message

    def _kill(self, message: Message) -> None:
        """At some moment from now on; it may have killed itself."""
        pid = int(str(message["pid"]))
        died = os.pidfd_open(pid)
        try:
            select.select([died], [], [], self._chance.uniform(0, LONGEST_PAUSE_S))
            os.kill(pid, signal.SIGKILL)
            assert select.select([died], [], [], FREED_WITHIN_S)[0]
        finally:
            os.close(died)

    # ---- after -----------------------------------------------------------------------------------

    def _await_freed(self, numbers: dict[int, str], before: Figures, since: float) -> None:
        """Look until all is as before but for what was stored; then take that away."""
        steps = ", ".join(numbers.values())
        deadline = Deadline(FREED_WITHIN_S)
        freed = False
        while leak := self._leak(numbers, before):
            if not freed and not leak.keys() - BEING_WRITTEN:
                freed = True
                self.report.freed_ms.append((time.monotonic() - since) * 1e3)
            if deadline.over:
                self.report.leaked.append(f"after {steps}: {leak}")
                break
        if not freed:
            self.report.freed_ms.append((time.monotonic() - since) * 1e3)
        for number in numbers:
            prefix = prefix_of(number, WRITTEN_CHUNKS)
            expected = contents(number, WRITTEN_CHUNKS)
            out = np.zeros_like(expected)
            got = self._looker.get(prefix, out)
            assert np.array_equal(out[got.ok], expected[got.ok]), f"wrong bytes after {steps}"
            self.report.survived += int(got.ok.sum())
            self._looker.delete(prefix)
        deadline = Deadline(FREED_WITHIN_S)
        while leak := self._leak({}, before):
            if deadline.over:
                self.report.leaked.append(f"deleted, after {steps}: {leak}")
                break

    def _leak(self, numbers: dict[int, str], before: Figures) -> dict[str, tuple[int, int]]:
        """What differs from before: values now and those expected."""
        known = KNOWN | dict.fromkeys(numbers, WRITTEN_CHUNKS)
        in_ram = sum(self._held(n, chunks, "ram") for n, chunks in known.items())
        survived = sum(self._held(n, WRITTEN_CHUNKS, "node") for n in numbers)
        expected = replace(before, charged_bytes=in_ram * OBJECT_BYTES)
        if self._daemon.nvme_bytes:
            expected = replace(expected, nvme_objects=before.nvme_objects + survived)
        found = self._daemon.figures()
        return replace(found, descriptors=max(found.descriptors, before.descriptors)).differences(
            expected
        )

    def _held(self, number: int, chunks: int, depth: str) -> int:
        match = self._looker.match(prefix_of(number, chunks), mode="each", depth=depth)
        assert not match.detail, match
        return match.chunks


def use_it_all(daemon: SmallDaemon, numbers: dict[int, int]) -> None:
    """Drop these prefixes (chunks by number) and everybody's clients must be gone: nothing is left
    in anybody's way, and nothing of the last client's.
    """
    chunks = daemon.ram_bytes // OBJECT_BYTES * 31 // 32
    prefix = prefix_of(FLOOD, chunks)
    with KVClient(daemon.target) as client:
        for number, most in numbers.items():
            client.delete(prefix_of(number, most))
        put = client.put(prefix, contents(FLOOD, chunks), timeout_s=FREED_WITHIN_S)
        assert put.stored == chunks, (put.stored, put.reason, put.detail)
        assert client.match(prefix, depth="ram").chunks == chunks
        client.delete(prefix)
    deadline = Deadline(FREED_WITHIN_S)
    while True:
        found = {name: n for name, n in vars(daemon.figures()).items() if n}
        if found.keys() == {"descriptors"}:
            return
        assert not deadline.over, found
