"""The queue and the threads behind jobs, and how both come through a fork."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvstored_client.errors import ClosedError
from kvstored_client.failures import CLIENT_CLOSED, Failure, FailureKind
from kvstored_client.steps import Answer, Step
from kvstored_client.stopping import StopFlag

if TYPE_CHECKING:
    from kvstored_client.jobs import Job

_log = logging.getLogger("kvstored_client")

WORKERS = 2
MAX_QUEUED = 1024
MAX_UNCOLLECTED = 16_384
_IDLE_S = 2.0

LATE = Failure(FailureKind.DEADLINE, "the deadline passed before the job had ended")
_TOO_MANY = Failure(
    FailureKind.OVERLOADED,
    "the client has as many jobs queued as it may",
    "submit less at a time, or wait for what was submitted",
)
_NO_THREAD = Failure(
    FailureKind.OVERLOADED,
    "no thread could be started for the job",
    "raise the limit on threads (ulimit -u, pids.max)",
)


class Runner(Protocol):
    """What jobs need of a transport."""

    def run(self, step: Step, stop: StopFlag | None = None) -> Answer:
        """Run one step to its end; Failure CANCELLED soon after `stop` is set."""


class Pool:
    """Queued and running jobs, and the threads. Lock order: `stepping` before `lock`."""

    def __init__(self, runner: Runner, workers: int, max_queued: int) -> None:
        self._runner = runner
        self._workers = workers
        self._max_queued = max_queued
        self.closed = False
        self._event: _Event | None = None
        self._renew()
        with _pools_lock:
            _pools.add(self)

    def _renew(self) -> None:
        # Verbs plan and shape their results under it, never while memory is moved. Who forks takes
        # it, so that no verb is caught in the middle of either.
        self.stepping = threading.Lock()
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._ended = threading.Condition(self.lock)
        self._due = threading.Condition(self.lock)
        self._queued: dict[Job[object], None] = {}
        self._running: set[Job[object]] = set()
        self._uncollected: deque[Job[object]] = deque()
        self._threads = 0
        self._idle = 0
        self._watched = False
        self._next_due = 0.0

    # ---- callers ---------------------------------------------------------------------------------

    def add(self, job: Job[object]) -> None:
        """Queue a job, or end it at once if that cannot be."""
        with self.lock:
            if job.poll():
                refused: Failure | None = None
            elif self.closed:
                refused = CLIENT_CLOSED
            elif len(self._queued) >= self._max_queued:
                refused = _TOO_MANY
            elif not self._queue(job):
                refused = _NO_THREAD
            else:
                return
        if refused is not None:
            self.fail(job, refused)
        self._tell(job)

    def is_queued(self, job: Job[object]) -> bool:
        """Whether no thread has taken it yet."""
        with self.lock:
            return job in self._queued

    def wait(self, job: Job[object], end: float) -> bool:
        """Wait for a job's end, until `end` (time.monotonic()); whether it came."""
        with self.lock:
            while not job.poll():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._ended.wait(left)
        return True

    def end(self, job: Job[object], why: Failure) -> bool:
        """End a job because of `why` and wait for that; False if it had ended by itself."""
        with self.lock:
            if job.poll():
                return False
            waiting = job in self._queued
            if waiting:
                self._take(job)
        if waiting:
            self.fail(job, why)
            self._tell(job)
            return True
        job.stop(why)
        with self.lock:
            while not job.poll():
                self._ended.wait()
        return job.stopped

    def fail(self, job: Job[object], why: Failure) -> None:
        """Let the verb of a job that nobody runs end with `why`."""
        with self.stepping:
            job.give_up(why)

    def drain(self, end: float) -> bool:
        """Wait, until `end`, for every job's end; whether it came."""
        with self.lock:
            while self._queued or self._running:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._ended.wait(left)
        return True

    def close(self) -> None:
        """See Jobs.close."""
        with self.lock:
            self.closed = True
            jobs = [*self._queued, *self._running]
            self._work.notify_all()
            self._due.notify_all()
        for job in jobs:
            job.stop(CLIENT_CLOSED)  # all at once; then wait for each
        for job in jobs:
            self.end(job, CLIENT_CLOSED)
        with self.lock:
            self._event = None

    # ---- telling ---------------------------------------------------------------------------------

    def completion_fd(self) -> int:
        """See Jobs.completion_fd."""
        with self.lock:
            if self.closed:
                raise ClosedError("the client was closed", "make another one")
            if self._event is None:
                self._event = _Event()
            return self._event.fd

    def completed(self) -> list[Job[object]]:
        """See Jobs.completed."""
        with self.lock:
            if self._event is not None:
                self._event.clear()
            jobs = list(self._uncollected)
            self._uncollected.clear()
        return jobs

    def _tell(self, job: Job[object]) -> None:
        """A job has ended."""
        with self.lock:
            self._running.discard(job)
            if self._event is not None:
                if len(self._uncollected) == MAX_UNCOLLECTED:
                    self._uncollected.popleft()
                self._uncollected.append(job)
                self._event.set()
            self._ended.notify_all()

    # ---- threads ---------------------------------------------------------------------------------

    def _take(self, job: Job[object]) -> None:
        del self._queued[job]
        self._running.add(job)
        if not self._queued:
            self._due.notify()  # nothing is due: that thread may go

    def _queue(self, job: Job[object]) -> bool:
        """Whether there is a thread to run it some time."""
        self._queued[job] = None
        self._work.notify()
        if self._idle >= len(self._queued):
            return True
        if self._threads < self._workers and _start(self._work_on, "kvstored-job"):
            self._threads += 1
        if not self._threads:
            del self._queued[job]
            return False
        # It may have to wait behind others for longer than it has time.
        if not self._watched:
            self._watched = _start(self._watch, "kvstored-job-due")
        elif job.deadline < self._next_due:
            self._due.notify()
        return True

    def _work_on(self) -> None:
        while True:
            with self.lock:
                while not self._queued:
                    self._idle += 1
                    called = self._work.wait(_IDLE_S)
                    self._idle -= 1
                    if not self._queued and (self.closed or not called):
                        self._threads -= 1
                        return
                job = next(iter(self._queued))
                self._take(job)
            self._run(job)
            del job  # and with it, while there is no other, what its result holds

    def _run(self, job: Job[object]) -> None:
        more = True
        while more:
            try:
                answer = job.step(self._runner)
            except Exception as error:
                _log.exception("a job's step broke")
                answer = Failure(FailureKind.UNREACHABLE, f"{type(error).__name__}: {error}")
            with self.stepping:
                more = job.advance(answer)
        self._tell(job)

    def _watch(self) -> None:
        """End queued jobs at their deadlines, while the threads are busy with others."""
        while True:
            with self.lock:
                if not self._queued:
                    self._next_due = float("inf")
                    self._due.wait(_IDLE_S)
                    if not self._queued:
                        self._watched = False
                        return
                now = time.monotonic()
                late = [job for job in self._queued if job.deadline <= now]
                for job in late:
                    self._take(job)
                if not late:
                    self._next_due = min(job.deadline for job in self._queued)
                    self._due.wait(self._next_due - now)
            for job in late:
                self.fail(job, LATE)
                self._tell(job)
            late.clear()

    # ---- fork ------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """In a fork's child: no threads, no jobs; the parent's read as cancelled."""
        for job in [*self._queued, *self._running]:
            job.orphan()
        self._renew()
        if self._event is not None:
            self._event.renew()


class _Event:
    """An eventfd, closed when nothing refers to it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.fd)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # so full that it is readable anyhow
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def renew(self) -> None:
        """Under the same number another one: a fork's child must not read its parent's."""
        fresh = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        os.dup2(fresh, self.fd, inheritable=False)
        os.close(fresh)


def _start(work: Callable[[], None], name: str) -> bool:
    # Daemonic, so that a client that nobody closes holds no interpreter up; see _close_all.
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # the process may have no more threads
        return False
    return True


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_pools_lock = threading.Lock()
_standing: list[Pool] = []


def _before_fork() -> None:
    _pools_lock.acquire()
    _standing[:] = list(_pools)
    for pool in _standing:
        pool.stepping.acquire()
        pool.lock.acquire()


def _after_fork_in_parent() -> None:
    for pool in _standing:
        pool.lock.release()
        pool.stepping.release()
    _standing.clear()
    _pools_lock.release()


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _standing:
        pool.begin_anew()
    _standing.clear()


def _close_all() -> None:
    """Before the interpreter goes: threads that copy without the GIL would outlive its memory."""
    with _pools_lock:
        pools = list(_pools)
    for pool in pools:
        pool.close()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(_close_all)
