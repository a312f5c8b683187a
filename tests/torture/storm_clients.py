"""Threads that put, get, delete, reserve and look, each in an order of its own, until the end.

What they are answered is entered in the ledger. Wrong bytes they notice themselves.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from storm_content import STEM_CHUNKS, Bytes, Chain, content, offer_of
from storm_ledger import Ledger, Object, Offer

from kvstored_client import KVClient, PutResult
from kvstored_client.results import PutState

TIMEOUT_S = 20.0
GIVE_UP_S = 60.0


@dataclass
class Course:
    """How the storm goes, as all its threads see it. `strike` is called, once, by the thread that
    hears the answer of number `countdown` of those that are a promise.
    """

    strike: Callable[[], None]
    countdown: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    wrong: list[str] = field(default_factory=list)
    acks: int = 0
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def promised(self, count: int) -> None:
        """So many durable objects, or one delete, have been answered."""
        with self._lock:
            self.acks += count
            self.countdown -= 1
            now = self.countdown == 0
        if now:
            self.strike()
            self.over.set()


class Worker:
    """One thread of it."""

    def __init__(
        self,
        clients: dict[str, KVClient],
        chains: list[Chain],
        old: list[Chain],
        ledger: Ledger,
        course: Course,
        random: Random,
    ) -> None:
        """`clients` by namespace. `chains` are used at random; `old` ones only read and deleted."""
        self._clients = clients
        self._chains = chains
        self._old = old
        self._ledger = ledger
        self._course = course
        self._random = random
        self._thread = threading.Thread(target=self._run, name="storm")
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of its last call."""
        self._thread.join(GIVE_UP_S)
        assert not self._thread.is_alive(), "a call does not end"

    def _run(self) -> None:
        ways = [self._put, self._get, self._delete, self._reserve, self._tend]
        try:
            while not self._course.over.is_set():
                (way,) = self._random.choices(ways, (10, 5, 2, 2, 1))
                chains = self._old if self._old and self._random.random() < 0.1 else self._chains
                if chains is self._old:
                    way = self._random.choice((self._get, self._delete))
                chain = self._random.choice(chains)
                self._course.calls += 1
                if not way(chain, self._clients[chain.namespace]):
                    self._course.over.wait(0.005)  # nobody is there: no reason to ask at once
        except Exception:
            self._course.wrong.append(traceback.format_exc())
            self._course.over.set()

    # ---- ways; each gives whether anybody answered -----------------------------------------------

    def _span(self, chain: Chain) -> tuple[int, int]:
        """Mostly a prefix, sometimes a piece out of the middle."""
        chunks = chain.shape.chunks
        start = 0 if self._random.random() < 0.7 else self._random.randrange(chunks)
        return start, self._random.randint(start + 1, chunks)

    def _put(self, chain: Chain, client: KVClient) -> bool:
        start, stop = self._span(chain)
        parts = self._parts(chain)
        objects, data, number = self._payload(chain, start, stop, parts)
        durability = self._random.choice(("durable", "durable", "accepted"))
        offers = self._ledger.offer(objects, number, time.time_ns(), in_full=True)
        put = client.put(
            chain.prefix,
            data,
            start=start,
            parts=parts,
            durability=durability,
            when_full=self._random.choice(("wait", "refuse")),
            timeout_s=TIMEOUT_S,
        )
        return self._enter(offers, put, durability == "durable")

    def _parts(self, chain: Chain) -> list[str]:
        parts = list(chain.sizes)
        return parts if self._random.random() < 0.8 else [self._random.choice(parts)]

    def _payload(
        self, chain: Chain, start: int, stop: int, parts: list[str]
    ) -> tuple[list[Object], list[Bytes], int]:
        number = self._ledger.next_offer()
        named = [(chunk, part) for chunk in range(start, stop) for part in parts]
        objects = [(chain.keys[chunk], part) for chunk, part in named]
        data = [content(chain.keys[c], p, number, chain.nbytes(c, p)) for c, p in named]
        return objects, data, number

    def _enter(self, offers: list[Offer], put: PutResult, durable: bool) -> bool:
        now, promised = time.time_ns(), 0
        for offer, value in zip(offers, put.objects.ravel().tolist(), strict=True):
            state = PutState(value)
            offer.end = now
            offer.stored = state is PutState.STORED
            offer.existed = state is PutState.EXISTED
            offer.durable = durable and state in (PutState.STORED, PutState.EXISTED)
            promised += offer.durable
        if promised:
            self._course.promised(promised)
        return put.stored + put.existed > 0

    def _get(self, chain: Chain, client: KVClient) -> bool:
        start, stop = self._span(chain)
        parts = self._parts(chain)
        wanted = [(chain.keys[c], p, chain.nbytes(c, p)) for c in range(start, stop) for p in parts]
        into = [chain.room(part) for _, part, _ in wanted]
        got = client.get(
            chain.prefix,
            into,
            start=start,
            stop=stop,
            parts=parts,
            bypass_ram=self._random.random() < 0.2,
            timeout_s=TIMEOUT_S,
        )
        for i in np.flatnonzero(np.repeat(got.ok, len(parts))).tolist():
            key, part, nbytes = wanted[i]
            if got.lengths[i] != nbytes or offer_of(key, part, into[i][:nbytes]) is None:
                self._course.wrong.append(f"a get: wrong bytes of {key.hex()} {part}")
        return bool(got.ok.any())

    @staticmethod
    def delete_all(chain: Chain, client: KVClient, ledger: Ledger, course: Course) -> None:
        """Delete a whole prefix while nobody else works on it or its stem."""
        removals = ledger.remove(chain.keys, time.time_ns())
        done = client.delete(chain.prefix, timeout_s=TIMEOUT_S)
        for removal in removals:
            removal.end, removal.named = time.time_ns(), not done.reason
        if done.reason:
            course.wrong.append(f"a delete: {done.reason}: {done.detail}")

    def _delete(self, chain: Chain, client: KVClient) -> bool:
        start, stop = self._span(chain)
        named = chain.keys[start:stop]
        below = set(chain.keys[stop:])
        if start < STEM_CHUNKS:  # what other branches have there is below as well
            for other in (*self._chains, *self._old):
                if other.keys[start] == chain.keys[start]:
                    below.update(other.keys[start:])
        removals = self._ledger.remove([*named, *(below - set(named))], time.time_ns())
        done = client.delete(chain.prefix, start=start, stop=stop, timeout_s=TIMEOUT_S)
        now = time.time_ns()
        for i, removal in enumerate(removals):
            removal.end = now
            removal.named = not done.reason and i < len(named)
        if not done.reason:
            self._course.promised(0)
        return not done.reason

    def _reserve(self, chain: Chain, client: KVClient) -> bool:
        """Write in place; every third time only the first half of each object, and give it up."""
        start, stop = self._span(chain)
        parts = list(chain.sizes)
        objects, data, number = self._payload(chain, start, stop, parts)
        given_up = self._random.random() < 0.3
        lengths = [len(item) for item in data]
        offers = self._ledger.offer(objects, number, time.time_ns(), in_full=not given_up)
        with client.reserve(
            chain.prefix, start, stop, parts, lengths=lengths, timeout_s=TIMEOUT_S
        ) as slots:
            for i, item in enumerate(data):
                chunk, part = divmod(i, len(parts))
                if slots.states[chunk, part] == 0 and not slots.reason:
                    nbytes = len(item) // 2 if given_up else len(item)
                    slots[chunk, parts[part]][:nbytes] = item[:nbytes].data
            if not given_up and not slots.reason:
                return self._enter(offers, slots.commit(durability="durable"), True)
        for offer in offers:
            offer.end, offer.in_full = time.time_ns(), False
        return not slots.reason

    def _tend(self, chain: Chain, client: KVClient) -> bool:
        """Whatever changes what is evicted next."""
        way = self._random.choice((client.touch, client.prefetch))
        return not way(chain.prefix, timeout_s=TIMEOUT_S).reason
