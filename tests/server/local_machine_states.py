"""What a client of the machine remembers: what it was granted, and what it has asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import Message
from server.local_machine_book import Offer, padded


@dataclass(eq=False)
class Row:
    """A granted object: `data` has to be there as long as its lease is."""

    key: bytes
    segment_id: int
    offset: int
    data: bytes


@dataclass(eq=False)
class Lease:
    """The rows under one id. `under_way`: more, or an error, may come. `gone`: deleted since."""

    rows: list[Row] = field(default_factory=list)
    gone: set[bytes] = field(default_factory=set)
    under_way: bool = True
    released: bool = False


@dataclass(eq=False)
class Held:
    """Keys of one hold. `used`: an acquire has named them since. `gone`: deleted since."""

    keys: frozenset[bytes]
    used: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class Reservation:
    """Wanted objects by index, and where to write them."""

    area_id: int
    offers: dict[int, Offer]
    offsets: dict[int, int]

    @property
    def charged_bytes(self) -> int:
        return sum(padded(len(offer.data)) for offer in self.offers.values())


class Asked:
    """A request on its way to its last answer. `take` sees each that is no error."""

    def __init__(self, request_id: int, kind: int, began: int) -> None:
        self.request_id = request_id
        self.kind = kind
        self.began = began
        self.replies: list[Message] = []
        self.error = 0
        self.over = False
        self.take: Callable[[Message], None] = self.replies.append
        self.end: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Putting:
    """A put through the ring, as far as it is."""

    asked: Asked
    offers: list[Offer] = field(default_factory=list)  # the wanted ones
    payload: bytes = b""
    written: int = 0
    taken: int = 0
    abandoned: bool = False

    @property
    def whole(self) -> bool:
        return self.written == len(self.payload)
