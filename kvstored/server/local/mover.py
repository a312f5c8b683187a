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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvstored.errors import Draining, KvstoredError
from kvstored.server.local.filling import STEP_BYTES
from kvstored.server.local.works import Channel, Ending, RingWork, Work

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

SLICE_BYTES = 4 << 20
"""Of one work, before the thread looks at the others."""

MAX_MOVERS = 4
_ENOUGH_BYTES = 256 << 10

SPIN_S = 0.0002
"""How long a mover looks for the next piece of a put without sleeping, at most; where that is in
vain, it is tried ever more rarely.
"""
_MOST_IN_VAIN = 8

_MESSAGES = 32  # of one channel, before the thread looks at the others


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
        # On one processor the client can only go on while this thread sleeps.
        self._sit_out = 0 if len(os.sched_getaffinity(0)) > 1 else sys.maxsize
        self._in_vain = 0
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
        try:
            while not self._stopping:
                self._round()
        finally:  # also if this thread fails: nobody may wait for ever
            for work in list(self._active):
                self._end(work, Ending(_stopped()))

    def _round(self) -> None:
        busy = any(work.ready() for work in self._active)
        descriptors = [descriptor for descriptor, _ in self._poll(busy)]
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

    def _poll(self, busy: bool) -> list[tuple[int, int]]:
        """What there is to look at. While one put is under way the next piece of it is looked for
        without sleeping, for a moment: a thread that sleeps between pieces is woken on the
        processor of the client that it should copy beside.
        """
        found = self._epoll.poll(0)
        if found or busy:
            return found
        if len(self._active) == 1:
            if self._sit_out:
                self._sit_out -= 1
                return self._epoll.poll(-1)
            end = time.perf_counter() + SPIN_S
            while time.perf_counter() < end:
                if found := self._epoll.poll(0):
                    self._in_vain = 0
                    return found
            # The client may well be waiting for this very processor.
            self._in_vain = min(self._in_vain + 1, _MOST_IN_VAIN)
            self._sit_out = 1 << self._in_vain
        return self._epoll.poll(-1)

    def _halt(self) -> None:
        self._stopping = True

    def _attach(self, channel: Channel) -> None:
        try:
            self._epoll.register(channel.end, select.EPOLLIN)
        except OSError as error:
            channel.closed = KvstoredError(f"the data channel cannot be read: {error.strerror}")
            return
        self._channels[channel.end.fileno()] = channel

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
                if not last and work.part_is_due and work.on_part is not None:
                    self._tell(work.on_part)
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
