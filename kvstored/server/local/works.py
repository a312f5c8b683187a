"""What movers do: works, which bring bytes into extents, and the channel that tells of a ring's.

A work is made and awaited on the loop and belongs to its mover's thread in between.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstored.errors import BadRequest, KvstoredError
from kvstored.server.local.filling import STEP_BYTES, Filling
from kvstored_client.proto.local import ABANDONED, POSITION

_CREDITS_PER_RING = 4

FIRST_PART_BYTES = 8 << 20
"""What a put has brought when it first publishes what has come: the device below begins early."""

PART_GROWTH = 3
"""How much more each part has than the one before: publishing one costs the verbs' loop as much as
copying many MiB does, and the device has something to do by then.
"""

MOST_PART_BYTES = 128 << 20
"""Of one part, at most."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a work ended. `cause` None: every byte is in place. `violation`: the client broke the
    protocol, and its session is to end with the cause.
    """

    cause: KvstoredError | None = None
    violation: bool = False


class Meter(Protocol):
    """Where a work counts its steps; nobody else writes it meanwhile."""

    moves: int


class Work(ABC):
    """Bytes on their way from staging into extents."""

    def __init__(self, filling: Filling, meter: Meter) -> None:
        self.filling = filling
        self.meter = meter
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.on_part: Callable[[], None] | None = None
        """Called on the loop, now and then, when more of `filling.received` is there."""
        self._told_bytes = 0  # of what was taken, when it was last called
        self._part_bytes = FIRST_PART_BYTES
        self.over = False  # the rest is the mover's
        self.stopped: KvstoredError | None = None  # set once, from the loop

    @property
    def part_is_due(self) -> bool:
        """Whether `on_part` is to be called; once for each part."""
        if self.on_part is None or self.filling.taken_bytes - self._told_bytes < self._part_bytes:
            return False
        self._told_bytes = self.filling.taken_bytes
        self._part_bytes = min(PART_GROWTH * self._part_bytes, MOST_PART_BYTES)
        return True

    @abstractmethod
    def ready(self) -> bool:
        """Whether there is something to copy now."""

    @abstractmethod
    def step(self) -> bool:
        """Copy up to STEP_BYTES; whether that was the last of it."""

    def finish(self, ending: Ending) -> None:
        """On the mover's thread: no more of it."""
        del ending
        self.over = True
        self.filling.let_go()


class AreaWork(Work):
    """Objects that lie written in an area. `sources`: (address, length) of each, in order."""

    def __init__(self, filling: Filling, meter: Meter, sources: Sequence[tuple[int, int]]) -> None:
        super().__init__(filling, meter)
        self._sources = deque(sources)
        self._done = 0  # bytes of the first source

    def ready(self) -> bool:
        """Always: it waits for nobody."""
        return True

    def step(self) -> bool:
        """Copy up to STEP_BYTES, of many objects where they are small."""
        room = STEP_BYTES
        while self._sources and room:
            address, length = self._sources[0]
            taken = min(room, length - self._done)
            self.filling.take(address + self._done, taken)
            room -= taken
            self._done += taken
            if self._done == length:
                self._sources.popleft()
                self._done = 0
        self.meter.moves += 1
        return not self._sources


class RingWork(Work):
    """A put whose payload comes through a session's ring."""

    def __init__(
        self,
        filling: Filling,
        meter: Meter,
        channel: Channel,
        request_id: int,
        payload_bytes: int,
    ) -> None:
        super().__init__(filling, meter)
        self.channel = channel
        self.request_id = request_id
        self._payload_bytes = payload_bytes
        self._written = 0
        self._taken = 0
        self._credited = 0

    def told(self, position: int) -> KvstoredError | None:
        """The client has written so far; an error if that cannot be."""
        if not self._written < position <= self._payload_bytes:
            return BadRequest(
                f"position {position} of put {self.request_id} after {self._written}, "
                f"of {self._payload_bytes} bytes",
                "send rising positions up to the end of the payload",
            )
        if position > self._taken + self.channel.ring_bytes:
            return BadRequest(
                f"position {position} of put {self.request_id}, of which {self._taken} are taken",
                f"write at most {self.channel.ring_bytes} bytes beyond what was taken",
            )
        self._written = position
        self.meter.moves += 1
        return None

    @property
    def waiting_bytes(self) -> int:
        """What the ring holds that was not taken."""
        return self._written - self._taken

    def ready(self) -> bool:
        """Whether the ring holds bytes that were not taken."""
        return self._written > self._taken

    def step(self) -> bool:
        """Copy up to STEP_BYTES, and give the client credit for them."""
        room = min(STEP_BYTES, self._written - self._taken)
        while room:
            at = self._taken % self.channel.ring_bytes
            taken = min(room, self.channel.ring_bytes - at)
            self.filling.take(self.channel.ring_address + at, taken)
            self._taken += taken
            room -= taken
        self.meter.moves += 1
        return self._taken == self._payload_bytes

    def credit(self) -> KvstoredError | None:
        """Tell the client what was taken, now and then: waking it up costs as much as copying a
        quarter of a step. An error if it does not read what it needs to know.
        """
        behind = self._taken - self._credited
        if self.ready() and behind < self.channel.ring_bytes // _CREDITS_PER_RING:
            return None
        self._credited = self._taken
        told = self.channel.tell(self.request_id, self._taken)
        if told or self._taken + self.channel.ring_bytes >= self._payload_bytes:
            return None  # it can write all of the rest without
        return BadRequest(
            "the data channel is full of positions that were not read",
            "read the data channel while a put runs",
        )

    def finish(self, ending: Ending) -> None:
        """Let the client know, too, if it might still be writing."""
        if ending.cause is not None:
            self.channel.tell(self.request_id, ABANDONED)
        self.channel.work = None
        super().finish(ending)


class Channel:
    """The daemon's end of a session's data channel, and the ring it speaks of.

    `broken` is called on the loop, at most once, when nothing more comes from the client. After
    `attach` it belongs to the mover until `detach` is done.
    """

    def __init__(
        self,
        end: socket.socket,
        ring_address: int,
        ring_bytes: int,
        broken: Callable[[Ending], None],
    ) -> None:
        end.setblocking(False)
        self.end = end
        self.ring_address = ring_address
        self.ring_bytes = ring_bytes
        self.broken = broken
        self.work: RingWork | None = None
        self.closed: KvstoredError | None = None
        """Why nothing more comes from the client."""

    def tell(self, request_id: int, position: int) -> bool:
        """Send a position; False if the client leaves no room for it."""
        try:
            self.end.send(POSITION.pack(request_id, position))
        except BlockingIOError:
            return False
        except OSError:
            return True  # its end is closed, which reading will show
        return True

    def read(self) -> tuple[int, int] | Ending | None:
        """The next message, why there will be none any more, or None: not yet."""
        try:
            message = self.end.recv(POSITION.size + 1)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if len(message) == POSITION.size:
            request_id, position = POSITION.unpack(message)
            return request_id, position
        if not message:
            return Ending(BadRequest("the client closed the data channel", "open another session"))
        wrong = BadRequest(
            f"a message of {len(message)} or more bytes on the data channel",
            f"send messages of {POSITION.size} bytes there",
        )
        return Ending(wrong, violation=True)
