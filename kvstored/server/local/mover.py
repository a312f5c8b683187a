"""Threads that copy and hash what local clients put, so that the verbs' loop never does.

A work is made and awaited on the loop, handed to a mover with `Mover.begin`, and belongs to its
thread until `ended` is done: from then on the mover reads no staging and writes no extent of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstored.errors import BadRequest, Draining, KvstoredError
from kvstored.server.local.filling import STEP_BYTES, Filling
from kvstored_client.proto.local import ABANDONED, POSITION

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

SLICE_BYTES = 2 << 20
"""Of one work, before the thread looks at the others."""

MAX_MOVERS = 4
_ENOUGH_BYTES = 256 << 10
_MESSAGES = 32  # of one channel, before the thread looks at the others


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


class Work:
    """Bytes on their way from staging into extents."""

    def __init__(self, filling: Filling, meter: Meter) -> None:
        self.filling = filling
        self.meter = meter
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.over = False  # the rest is the mover's
        self.stopped: KvstoredError | None = None  # set once, from the loop

    def ready(self) -> bool:
        """Whether there is something to copy now."""
        raise NotImplementedError

    def step(self) -> bool:
        """Copy up to STEP_BYTES; whether that was the last of it."""
        raise NotImplementedError

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
        """Tell the client what was taken; an error if it does not read what it needs to know."""
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


class Mover:
    """One thread. Its methods are for the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._commands: deque[Callable[[], None]] = deque()
        self._channels: dict[int, Channel] = {}
        self._active: dict[Work, None] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.sessions = 0  # for whoever shares them out

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End what is under way with Draining, and the thread. Waits for it: for one step."""
        if self._thread.is_alive():
            self._post(self._halt)
            self._thread.join()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)

    def attach(self, channel: Channel) -> None:
        """Listen to a channel from now on."""
        self._post(lambda: self._attach(channel))

    def detach(self, channel: Channel) -> asyncio.Future[None]:
        """Listen to it no more; done when the thread does not know it any longer. No work of it
        may be under way.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        if not self._thread.is_alive():
            done.set_result(None)
            return done
        self._post(lambda: self._detach(channel, done))
        return done

    def begin(self, work: Work) -> None:
        """Take a work on, before anything that the client may send in answer can arrive."""
        if self._thread.is_alive():
            self._post(lambda: self._begin(work))
        else:
            self._end(work, Ending(_stopped()))

    def end(self, work: Work, cause: KvstoredError) -> None:
        """Stop a work soon; `ended` says when, and with which cause. The first one counts."""
        if work.stopped is None and not work.ended.done():
            work.stopped = cause
            if self._thread.is_alive():
                self._post(lambda: self._judge(work))
            else:
                self._judge(work)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # ---- the thread's own ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            busy = any(work.ready() for work in self._active)
            events = self._epoll.poll(0 if busy else -1)
            descriptors = [descriptor for descriptor, _ in events]
            if self._wake in descriptors:
                os.eventfd_read(self._wake)
            # First: a work must be known before what its client says of it is read.
            while self._commands:
                self._commands.popleft()()
            for descriptor in descriptors:
                channel = self._channels.get(descriptor)
                if channel is not None:
                    self._listen(channel)
            for work in list(self._active):
                self._turn(work)
        for work in list(self._active):
            self._end(work, Ending(_stopped()))

    def _halt(self) -> None:
        self._stopping = True

    def _attach(self, channel: Channel) -> None:
        self._channels[channel.end.fileno()] = channel
        self._epoll.register(channel.end, select.EPOLLIN)

    def _detach(self, channel: Channel, done: asyncio.Future[None]) -> None:
        if self._channels.pop(channel.end.fileno(), None) is not None:
            self._epoll.unregister(channel.end)
        self._tell(_resolve, done, None)

    def _begin(self, work: Work) -> None:
        if isinstance(work, RingWork):
            if work.channel.closed is not None:
                self._end(work, Ending(work.channel.closed))
                return
            work.channel.work = work
        self._active[work] = None
        self._judge(work)

    def _judge(self, work: Work) -> None:
        if work.stopped is not None and not work.over:
            self._end(work, Ending(work.stopped))

    def _end(self, work: Work, ending: Ending) -> None:
        self._active.pop(work, None)
        work.finish(ending)
        self._tell(_resolve, work.ended, ending)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        """Have it called on the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(callback, *args)

    def _listen(self, channel: Channel) -> None:
        for _ in range(_MESSAGES):
            message = channel.read()
            if message is None:
                return
            if isinstance(message, Ending):
                self._hang_up(channel, message)
                return
            work = channel.work
            if work is not None and message[0] == work.request_id:
                wrong = work.told(message[1])
                if wrong is not None:
                    self._end(work, Ending(wrong, violation=True))
                elif work.waiting_bytes >= _ENOUGH_BYTES:
                    return  # looking for more costs more than another round

    def _hang_up(self, channel: Channel, ending: Ending) -> None:
        channel.closed = ending.cause
        del self._channels[channel.end.fileno()]
        self._epoll.unregister(channel.end)
        if channel.work is not None:
            self._end(channel.work, Ending(ending.cause))
        self._tell(channel.broken, ending)

    def _turn(self, work: Work) -> None:
        """One slice of a work."""
        try:
            for _ in range(SLICE_BYTES // STEP_BYTES):
                if work.over or work.stopped is not None or not work.ready():
                    break
                last = work.step()
                wrong = work.credit() if isinstance(work, RingWork) else None
                if wrong is not None:
                    self._end(work, Ending(wrong, violation=True))
                elif last:
                    self._end(work, Ending())
        except Exception:
            _log.exception("a mover's work failed")
            if not work.over:
                self._end(work, Ending(KvstoredError("the copy failed; the daemon's log says why")))
        if work.stopped is not None:
            self._judge(work)


class Movers:
    """The movers of one daemon; belongs to the verbs' loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int | None = None) -> None:
        count = threads or max(1, min(MAX_MOVERS, (os.cpu_count() or 1) // 2))
        self._movers = [Mover(loop, f"kvstored-mover-{i}") for i in range(count)]

    def start(self) -> None:
        """Start the threads."""
        for mover in self._movers:
            mover.start()

    def stop(self) -> None:
        """End what is under way, and the threads."""
        for mover in self._movers:
            mover.stop()

    def take(self) -> Mover:
        """The mover with the fewest sessions, for one more, until `give_back`."""
        mover = min(self._movers, key=lambda mover: mover.sessions)
        mover.sessions += 1
        return mover

    def give_back(self, mover: Mover) -> None:
        """The twin of `take`."""
        mover.sessions -= 1


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _stopped() -> Draining:
    return Draining("the daemon is stopping", "call another node, or again after a restart")
