"""What clients of the machine name and offer, and what may therefore be seen."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from server import serving

from kvstored_client.identity import KEY_BYTES, KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

KIB = 1 << 10
PAGE = 4096
SMALL, ODD, BIG = "small", "odd", "big"
BIG_BYTES = 80 * KIB  # more than 64 KiB: on the disk it has a slot of its own
ODD_BYTES = (9000, 12_000)  # by writer: a later one may be refused for its length
FAMILY = KVFamily(
    model="m",
    weights="w",
    kv_dtype="float32",
    chunk_tokens=64,
    parts=[
        KVPart(SMALL, nbytes=PAGE),
        KVPart(ODD, max_nbytes=16 * KIB),
        KVPart(BIG, nbytes=BIG_BYTES),
    ],
)
SPEC = FAMILY.spec()
ALL_PARTS = (SMALL, ODD, BIG)
PARTS = ((SMALL,), (BIG,), (ODD,), ALL_PARTS)
PREFIXES = 4
CHUNKS = 5  # of each prefix; both namespaces have the same keys

Name = tuple[str, bytes, str]  # namespace, key, part


def padded(nbytes: int) -> int:
    """What so many bytes take up."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Span:
    """Some chunks of a prefix, and some of their parts."""

    prefix: int
    start: int
    count: int
    parts: tuple[str, ...]

    @property
    def keys(self) -> list[bytes]:
        return _keys(self.prefix)[self.start : self.start + self.count]

    @property
    def objects(self) -> list[tuple[bytes, str]]:
        """Key and part, by object index."""
        return [(key, part) for key in self.keys for part in self.parts]

    def run(self, namespace: str) -> pb.ChunkRun:
        return pb.ChunkRun(
            namespace=namespace,
            family=SPEC.fingerprint,
            keys=b"".join(self.keys),
            start=self.start,
            parent=_keys(self.prefix)[self.start - 1] if self.start else b"",
            parts=self.parts,
        )

    def with_what_is_below(self) -> set[bytes]:
        """The keys that go if these do."""
        return set(_keys(self.prefix)[self.start :])


def _keys(prefix: int) -> list[bytes]:
    packed = serving.keys(CHUNKS, salt=b"prefix %d" % prefix)
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


@dataclass(eq=False)
class Offer:
    """Bytes for one object that somebody has sent in full. Times are the book's.

    `answered`: when the outcome of the put was known. `died`: since when nobody may be granted it.
    """

    name: Name
    data: bytes
    answered: int | None = None
    died: int | None = None


@dataclass
class Book:
    """All offers, and which namespace's sessions were told of which segment."""

    now: int = 0
    offers: defaultdict[Name, list[Offer]] = field(default_factory=lambda: defaultdict(list))
    segments: dict[int, str] = field(default_factory=dict)
    writers: int = 0

    def tick(self) -> int:
        """A moment after all others."""
        self.now += 1
        return self.now

    def make(self, namespace: str, span: Span, odd_bytes: int) -> list[Offer]:
        """What a new writer will send, unlike all that anybody else sends."""
        self.writers += 1
        lengths = {SMALL: PAGE, ODD: odd_bytes, BIG: BIG_BYTES}
        offers = []
        for i, (key, part) in enumerate(span.objects):
            seed = self.writers << 16 | i
            data = random.Random(seed).randbytes(lengths[part])
            offers.append(Offer((namespace, key, part), data))
        return offers

    def sent(self, offers: list[Offer]) -> None:
        """From now on these may be seen."""
        for offer in offers:
            self.offers[offer.name].append(offer)

    def answered(self, offers: list[Offer], states: list[int] | None) -> None:
        """The put of these is over. `states`: its outcome, where that is known."""
        now = self.tick()
        for i, offer in enumerate(offers):
            offer.answered = now
            if states is not None and states[i] not in (pb.STORED, pb.STORED_NOT_DURABLE):
                self.offers[offer.name].remove(offer)

    def deleted(self, namespace: str, span: Span, began: int) -> None:
        """A delete that began then has been answered."""
        now = self.tick()
        gone = set(span.keys)
        for (of, key, _), offers in self.offers.items():
            if of != namespace or key not in gone:
                continue
            for offer in offers:
                if offer.died is None and offer.answered is not None and offer.answered < began:
                    offer.died = now

    def may_be(self, name: Name, data: bytes, began: int) -> bool:
        """Whether an acquire that began then may be granted these bytes."""
        return any(
            offer.data == data and (offer.died is None or offer.died > began)
            for offer in self.offers[name]
        )

    def told(self, segment_id: int, namespace: str) -> None:
        """A session was sent a segment: ids are never reused, and belong to one namespace."""
        assert self.segments.setdefault(segment_id, namespace) == namespace
