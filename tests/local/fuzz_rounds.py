"""Several clients that do anything to a tiny daemon, and are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from kill_rounds import FREED_WITHIN_S, use_it_all
from torture_daemon import Deadline, SmallDaemon
from torture_data import OBJECT_BYTES, contents, prefix_of
from torture_fuzz import CHUNKS, NUMBERS
from torture_pen import Pen

from kvstored_client import KVClient

CLIENTS = 3
LONGEST_LIFE_S = 2.0


@dataclass
class FuzzReport:
    """`counts`: operations ("done") and chunks compared, stored and leased by the clients, as far
    as they could say so.
    """

    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)


def fuzz(daemon: SmallDaemon, pen: Pen, seconds: float, seed: int) -> FuzzReport:
    """Let them, for so long. Raises what any of them found wrong."""
    report = FuzzReport()
    chance = random.Random(seed)
    living: dict[int, float] = {}  # when they are to be killed, by pid
    numbers = iter(range(seed * 1000, seed * 1000 + 1000))
    coming = 0
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or coming:
        if now < end and len(living) + coming < CLIENTS:
            pen.order(what="fuzz", number=next(numbers), target=daemon.target)
            coming += 1
        first = min([*living.values(), end])
        message = pen.hear(max(0.0, first - now) if not coming else FREED_WITHIN_S)
        if message is not None:
            if message.get("at") == "begun":
                coming -= 1
                living[int(str(message["pid"]))] = now + chance.uniform(0, LONGEST_LIFE_S)
            said = {name: int(str(message[name])) for name in message if name in _COUNTS}
            report.counts.update(said)
        for pid in [pid for pid, when in living.items() if when <= time.monotonic()]:
            _kill(pen, pid)
            del living[pid]
            report.kills += 1
    for pid in living:
        _kill(pen, pid)
    _look_at_what_is_left(daemon)
    use_it_all(daemon, dict.fromkeys(NUMBERS, CHUNKS))
    return report


_COUNTS = ("done", "compared", "stored", "leased")


def _kill(pen: Pen, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(pen.reap(pid)) == signal.SIGKILL, "it had died of something else"


def _look_at_what_is_left(daemon: SmallDaemon) -> None:
    """Nothing but chunks, and those with their own bytes."""
    with KVClient(daemon.target) as client:
        deadline = Deadline(FREED_WITHIN_S)
        while True:
            in_ram = sum(
                client.match(prefix_of(n, CHUNKS), mode="each", depth="ram").chunks for n in NUMBERS
            )
            found = daemon.figures()
            left = (found.local_leased_bytes, found.leased_bytes, found.staging_bytes)
            if left == (0, 0, 0) and found.charged_bytes == in_ram * OBJECT_BYTES:
                break
            assert not deadline.over, (in_ram, found)
        out = np.zeros((CHUNKS, OBJECT_BYTES), np.uint8)
        for number in NUMBERS:
            got = client.get(prefix_of(number, CHUNKS), out)
            assert np.array_equal(out[got.ok], contents(number, CHUNKS)[got.ok]), number
