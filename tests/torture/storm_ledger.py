"""What was asked and answered in a storm, and what must therefore be so after it. Pure.

Several clients work on the same chunks at a time, so that nobody knows in what order their calls
took effect: each is an interval, and only what holds in every order is demanded.

- An object **must be there** if something says that it was durable (a `durable` put that said
  stored or existed; after a clean stop an accepted one; or that it was read after the last
  restart), and everything that may have removed it (a delete of it or of a chunk above it,
  answered or not, or an eviction that the daemon wrote down) was over before that put began. If it
  was stored by that put, its bytes must be that put's.
- Bytes **may be there** if they were offered in full, in this storm or before the last restart, and
  no delete of their chunk that was answered began after that offer's end.

After a restart and a look at every object the past is forgotten but for what was found: it must
stay, and what was not found must not come back.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

Object = tuple[bytes, str]
"""Chunk key and part."""


class Verdict(Enum):
    """What became of an object. The last three are the daemon's faults."""

    SURVIVED = "survived"
    LUCKY = "lucky"  # there, though nothing asked for it
    EVICTED = "evicted"  # was durable; gone by a decision that was written down
    DELETED = "deleted"  # was durable; gone by a delete
    ABSENT = "absent"
    CORRUPT = "corrupt"
    PHANTOM = "phantom"
    LOST = "lost"


@dataclass(slots=True)
class Offer:
    """One put of one object. `begin` and `end`: Unix time, ns; `in_full`: its bytes were given."""

    number: int
    begin: int
    end: int = 0
    in_full: bool = True
    stored: bool = False
    existed: bool = False
    durable: bool = False


@dataclass(slots=True)
class Removal:
    """A delete that reaches a chunk. `named`: that itself was to go, and it was answered."""

    begin: int
    end: int = 0
    named: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """An object that left a tier, as the daemon wrote it down at `at` (Unix time, ns)."""

    at: int
    tier: str
    reason: str
    kept: str

    @property
    def for_room(self) -> bool:
        return self.tier == "nvme" and self.reason == "capacity"


@dataclass(slots=True)
class Ledger:
    """Of one data directory, since it was last looked at. Any thread may add."""

    held: dict[Object, int] = field(default_factory=dict)
    offers: dict[Object, list[Offer]] = field(default_factory=lambda: defaultdict(list))
    removals: dict[bytes, list[Removal]] = field(default_factory=lambda: defaultdict(list))
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_offer(self) -> int:
        """A number that no other offer has."""
        return next(self._numbers)

    def offer(self, objects: Iterable[Object], number: int, now: int, in_full: bool) -> list[Offer]:
        """A put begins; what it comes to is entered in what this gives, which are in order."""
        made = []
        with self._lock:
            for obj in objects:
                made.append(Offer(number, now, in_full=in_full))
                self.offers[obj].append(made[-1])
        return made

    def remove(self, keys: Iterable[bytes], now: int) -> list[Removal]:
        """A delete begins, of these chunks and what lies below; likewise."""
        made = []
        with self._lock:
            for key in keys:
                made.append(Removal(now))
                self.removals[key].append(made[-1])
        return made

    def objects(self) -> set[Object]:
        """All that there may be, or should be."""
        return self.held.keys() | self.offers.keys()

    def judge(
        self, obj: Object, found: int | None, left: Iterable[Left], *, clean: bool = False
    ) -> Verdict:
        """`found`: whose bytes are there, None: the object is not; see `offer_of`. `left`: what the
        daemon wrote down of it. `clean`: the daemon was stopped and said that all was durable.
        """
        left = list(left)
        proofs = self._proofs(obj, clean)
        if found is None:
            if any(not self._gone(obj[0], left, p) for p in proofs):
                return Verdict.LOST
            if not proofs:
                return Verdict.ABSENT
            by_delete = all(self._deleted(obj[0], p.begin) for p in proofs)
            return Verdict.DELETED if by_delete else Verdict.EVICTED
        if not self._may_be(obj, found):
            return Verdict.PHANTOM
        asked = [p for p in proofs if not self._gone(obj[0], left, p)]
        if any(p.stored and p.number != found for p in asked):
            return Verdict.CORRUPT
        return Verdict.SURVIVED if proofs else Verdict.LUCKY

    def _proofs(self, obj: Object, clean: bool) -> list[Offer]:
        """Of that the object was durable; what was there before counts as stored at 0."""
        proofs = [
            o for o in self.offers.get(obj, ()) if (o.durable or clean) and (o.stored or o.existed)
        ]
        if obj in self.held:
            proofs.append(Offer(self.held[obj], 0, 0, stored=True, durable=True))
        return proofs

    def _deleted(self, key: bytes, since: int) -> bool:
        return any(removal.end >= since for removal in self.removals.get(key, ()))

    def _gone(self, key: bytes, left: Iterable[Left], proof: Offer) -> bool:
        """Whether it may rightly be gone although it was durable."""
        for entry in left:
            # What was accepted and left RAM before it was anywhere else can be nowhere.
            for_room = entry.reason in ("capacity", "unreachable")
            only_in_ram = for_room and not entry.kept and not proof.durable
            if entry.at >= proof.begin and (entry.for_room or only_in_ram):
                return True
            # What existed when it was accepted again may have been in RAM alone since then.
            if entry.for_room and proof.existed and not proof.durable:
                return True
        return self._deleted(key, proof.begin)

    def _may_be(self, obj: Object, number: int) -> bool:
        """Whether some order of the calls leaves the bytes of that offer there."""
        ends = [o.end for o in self.offers.get(obj, ()) if o.number == number and o.in_full]
        if self.held.get(obj) == number:
            ends.append(0)
        deleted = max((r.begin for r in self.removals.get(obj[0], ()) if r.named), default=0)
        return any(end >= deleted for end in ends)

    def settle(self, found: Mapping[Object, int]) -> None:
        """Everything was looked at: this is what there is."""
        self.held = dict(found)
        self.offers.clear()
        self.removals.clear()

    def tell(self, obj: Object, found: int | None, left: Iterable[Left]) -> str:
        """All that is known of an object, in order of time."""
        events: list[tuple[int, object]] = [(o.begin, o) for o in self.offers.get(obj, ())]
        events += [(r.begin, r) for r in self.removals.get(obj[0], ())]
        events += [(note.at, note) for note in left]
        lines = [f"{obj[0].hex()} {obj[1]}: found {found}, before {self.held.get(obj)}"]
        return "\n  ".join(lines + [str(e) for _, e in sorted(events, key=lambda pair: pair[0])])
