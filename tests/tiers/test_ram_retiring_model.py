"""Sessions that map, lease in batches, and answer retirements promptly, late or never, by chance.

Every leased place keeps its bytes where a session sees them, and the footprint is what the daemon
or any session maps.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiers.ram_helpers import KIB, audit_tier, content, meta_of

from kvstored.tiers.base import NoRoom
from kvstored.tiers.ram import Locations, PlaceError, RamTier, retirement

PAGE = 4096
CAP_BYTES = 1024 * KIB  # segments of up to 8 KiB, or one slot
SMALL_CAP_BYTES = 256 * KIB
LENGTHS = (PAGE, 2 * PAGE, 3 * PAGE - 5, 40_000)
NAMESPACES = ("large", "small")
PROMPT, LATE, NEVER = "prompt", "late", "never"


@dataclass
class Object:
    seed: int
    length_bytes: int
    namespace: str
    readers: int = 0
    deleted: bool = False


@dataclass
class Grant:
    """One batch of leases, as a session knows it."""

    places: list[int]
    rows: Locations


@dataclass(eq=False)
class Session:
    namespace: str
    answers: str
    maps: dict[int, mmap.mmap] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)
    to_unmap: set[int] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """The tier, its objects, and sessions as the local server would lead them."""

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        caps = {"large": CAP_BYTES, "small": SMALL_CAP_BYTES}
        self.tier = RamTier(CAP_BYTES, caps.__getitem__, threads=1)
        self.tier.retiring = self.retire
        self.tier.on_freed = self.note_room
        self.run(self.tier.open())
        self.objects: dict[int, Object] = {}
        self.sessions = [Session("large", answers) for answers in (PROMPT, LATE, NEVER)]
        self.retiring: dict[int, asyncio.Future[None]] = {}
        self.sizes: dict[int, tuple[str, int]] = {}  # of every segment a session ever mapped
        self.seeds = 0
        self.freed = 0
        self.fill("large", PAGE, 300)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Its result, when everything that it set off has been done."""

        async def whole() -> Any:
            result = await work
            for _ in range(3):
                await asyncio.sleep(0)
            return result

        return self.runner.run(whole())

    # -- the local server ----------------------------------------------------------------------

    def note_room(self) -> None:
        self.freed += 1

    def retire(self, segment_id: int) -> asyncio.Future[None] | None:
        """No lease covers it; sessions that map it are told."""
        holders = [s for s in self.sessions if segment_id in s.maps]
        assert not any(
            segment_id in grant.rows.segment_ids for s in self.sessions for grant in s.grants
        )
        if not holders:
            return None
        loop = asyncio.get_running_loop()
        self.retiring[segment_id] = loop.create_future()
        for session in holders:
            session.to_unmap.add(segment_id)
            if session.answers == PROMPT:
                loop.call_soon(self.unmap, session, segment_id)
        return self.retiring[segment_id]

    def unmap(self, session: Session, segment_id: int) -> None:
        session.maps.pop(segment_id).close()
        session.to_unmap.discard(segment_id)
        future = self.retiring.get(segment_id)
        if future is not None and not any(segment_id in s.maps for s in self.sessions):
            future.set_result(None)
            del self.retiring[segment_id]

    # -- rules ---------------------------------------------------------------------------------

    @rule(namespace=st.sampled_from(NAMESPACES), answers=st.sampled_from((PROMPT, LATE, NEVER)))
    def connect(self, namespace: str, answers: str) -> None:
        self.sessions.append(Session(namespace, answers))

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        length_bytes=st.sampled_from(LENGTHS),
        count=st.sampled_from((1, 5, 30, 300)),
    )
    def put(self, namespace: str, length_bytes: int, count: int) -> None:
        self.fill(namespace, length_bytes, count)

    @precondition(lambda self: self.objects)
    @rule(
        namespace=st.sampled_from(NAMESPACES),
        length_bytes=st.sampled_from(LENGTHS),
        data=st.data(),
    )
    def put_and_evict(self, namespace: str, length_bytes: int, data: st.DataObject) -> None:
        """Another size, whose memory has to come from those that are there."""
        self.delete(data)
        self.fill(namespace, length_bytes, 30)

    def fill(self, namespace: str, length_bytes: int, count: int) -> None:
        before = set(self.retiring)
        for place in self.run(self.tier.reserve(namespace, [length_bytes] * count)):
            if isinstance(place, NoRoom):
                assert place is not NoRoom.DOWN
                assert place is not NoRoom.PENDING or self.retiring
                continue
            assert place not in self.objects
            self.seeds += 1
            data = content(self.seeds, length_bytes)
            self.tier.view(place)[:] = data
            self.tier.publish(place, meta_of(data, namespace=namespace, key=self.seeds))
            self.objects[place] = Object(self.seeds, length_bytes, namespace)
        late_bytes = [self.sizes[s][1] for s in set(self.retiring) - before]
        # The last of several was asked for because the others were not enough.
        assert sum(late_bytes) - max(late_bytes, default=0) < count * (40_000 + PAGE)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Of the objects that are not deleted, all but every nth."""
        alive = [place for place, held in self.objects.items() if not held.deleted]
        kept = data.draw(st.sampled_from((2, 3, 7, 1000)), "nth")
        chosen = [place for i, place in enumerate(alive) if (i + 1) % kept]
        self.run(self.tier.delete(chosen))
        for place in chosen:
            self.objects[place].deleted = True
            self.forget_if_free(place)

    def forget_if_free(self, place: int) -> None:
        held = self.objects[place]
        if held.deleted and not held.readers:
            del self.objects[place]

    @precondition(lambda self: self.sessions and self.objects)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        """Also places that are deleted, and places twice."""
        session = data.draw(st.sampled_from(self.sessions), "session")
        mine = [p for p, held in self.objects.items() if held.namespace == session.namespace]
        if not mine:
            return
        if data.draw(st.booleans(), "many"):
            alive = [place for place in mine if not self.objects[place].deleted]
            places = alive[:: data.draw(st.sampled_from((1, 3)), "step")] or mine
        else:
            places = data.draw(
                st.lists(st.sampled_from(mine[-6:]), min_size=1, max_size=12), "places"
            )
        batch = np.array(places, np.int64)
        if any(self.objects[place].deleted for place in places):
            with pytest.raises(PlaceError):
                self.tier.lease_many(batch)
            return
        self.lease(session, places)

    @precondition(lambda self: self.sessions and self.objects)
    @rule(data=st.data())
    def look_and_let_go(self, data: st.DataObject) -> None:
        """What a get does: the maps stay, the leases do not."""
        session = data.draw(st.sampled_from(self.sessions), "session")
        places = [
            place
            for place, held in self.objects.items()
            if held.namespace == session.namespace and not held.deleted
        ]
        if places:
            self.lease(session, places)
            self.leased_bytes_stay()
            self.give_back(session, -1)

    def lease(self, session: Session, places: list[int]) -> None:
        batch = np.array(places, np.int64)
        self.tier.lease_many(batch)
        for place in places:
            self.objects[place].readers += 1
        rows = self.tier.locate_many(batch)
        for segment_id in set(rows.segment_ids.tolist()) - set(session.maps):
            size_bytes = self.tier.segment_bytes(segment_id)
            session.maps[segment_id] = mmap.mmap(
                self.tier.segment_fd(segment_id), size_bytes, mmap.MAP_SHARED, mmap.PROT_READ
            )
            self.sizes[segment_id] = (session.namespace, size_bytes)
        session.grants.append(Grant(places, rows))

    @precondition(lambda self: any(s.grants for s in self.sessions))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([s for s in self.sessions if s.grants]), "session")
        self.give_back(session, data.draw(st.integers(0, len(session.grants) - 1), "grant"))

    def give_back(self, session: Session, i: int) -> None:
        places = session.grants.pop(i).places
        self.tier.release_many(np.array(places, np.int64))
        for place in places:
            self.objects[place].readers -= 1
        for place in set(places):
            self.forget_if_free(place)

    @precondition(lambda self: any(s.to_unmap and s.answers == LATE for s in self.sessions))
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        late = [s for s in self.sessions if s.to_unmap and s.answers == LATE]
        session = data.draw(st.sampled_from(late), "session")
        before = self.freed

        async def answer() -> bool:
            waiting = len(self.retiring)
            for segment_id in list(session.to_unmap):
                self.unmap(session, segment_id)
            return len(self.retiring) < waiting

        done = self.run(answer())
        assert (self.freed > before) == done, "who waits for room is told when there is some"

    @precondition(lambda self: len(self.sessions) > 3)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The process ends: the kernel unmaps, the local server releases."""
        self.end(data.draw(st.sampled_from(self.sessions), "session"))

    def end(self, session: Session) -> None:
        async def unmap() -> None:
            for segment_id in list(session.maps):
                self.unmap(session, segment_id)

        while session.grants:
            self.give_back(session, 0)
        self.run(unmap())
        self.sessions.remove(session)

    @precondition(lambda self: self.retiring)
    @rule()
    def time_passes(self) -> None:
        """What lingers is overdue."""

        async def expire() -> None:
            for leaving in self.tier._retirement._leaving:
                self.tier._retirement._give_up(leaving)

        self.run(expire())

    # -- what holds at all times ---------------------------------------------------------------

    @invariant()
    def leased_bytes_stay(self) -> None:
        for session in self.sessions:
            for grant in session.grants:
                rows = grant.rows
                for i, place in enumerate(grant.places):
                    held = self.objects[place]
                    start, length_bytes = int(rows.offsets[i]), int(rows.lengths[i])
                    seen = session.maps[int(rows.segment_ids[i])][start : start + length_bytes]
                    assert seen == content(held.seed, held.length_bytes)

    @invariant()
    def the_footprint_is_what_anybody_maps(self) -> None:
        sizes = {s: self.tier._slabs.segments[s] for s in self.tier._growth.memory}
        mapped = {s: (record.namespace, record.size_bytes) for s, record in sizes.items()}
        for session in self.sessions:
            mapped |= {s: self.sizes[s] for s in session.maps}
        held: Counter[str] = Counter()
        for namespace, size_bytes in mapped.values():
            held[namespace] += size_bytes
        assert self.tier.usage().footprint_bytes == sum(held.values()) <= CAP_BYTES
        for namespace in NAMESPACES:
            usage = self.tier.namespace_usage(namespace)
            assert usage.footprint_bytes == held[namespace] <= usage.cap_bytes
        audit_tier(self.tier)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for session in list(self.sessions):
            self.end(session)
        self.run(self.tier.delete(list(self.objects)))
        self.the_footprint_is_what_anybody_maps()
        assert self.tier.usage().charged_bytes == self.tier.leased_bytes == 0
        self.tier.retiring = None
        (place,) = self.run(self.tier.reserve("large", [CAP_BYTES]))
        assert isinstance(place, int), "with nothing held, all of the memory can serve one object"
        self.run(self.tier.close())
        assert self.tier.usage().footprint_bytes == 0
        self.runner.close()


def test_sessions_that_answer_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "CLIENTS_S", 0.0)
    monkeypatch.setattr(retirement, "EXPECTED_S", 3600.0)
    steps = settings(max_examples=40, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Machine, settings=steps)
