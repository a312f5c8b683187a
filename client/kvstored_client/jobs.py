"""Verbs that run behind the caller's back: handed in at once, asked after later.

For engines that must not wait. `Jobs.submit` checks a call as the verb itself does and queues it; a
few threads run what is queued, step by step, through the client's transport. A job ends by its
deadline, queued or running. When it has ended (came, timed out, cancelled, closed) not one more
byte of the caller's memory is read or written.

Everything is bounded: jobs queued, threads, ended jobs kept for `completed`. Threads come with the
first job and go when there has been none for a while; they hold no client alive.
"""

from __future__ import annotations

import logging
import time
from typing import Generic, TypeVar, cast

from kvstored_client.errors import ClosedError
from kvstored_client.failures import CANCELLED, Failure
from kvstored_client.jobs_pool import LATE, MAX_QUEUED, WORKERS, Pool, Runner
from kvstored_client.steps import Answer, Step, Verb
from kvstored_client.stopping import StopFlag

__all__ = ["MAX_QUEUED", "WORKERS", "Job", "Jobs", "Runner"]

_log = logging.getLogger("kvstored_client")
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)

_GRACE_S = 0.5
"""How long after the deadline a transport has to end a running step by itself."""


class Job(Generic[_Result_co]):
    """One submitted verb. For any thread; keeps the caller's buffers alive until it has ended."""

    __slots__ = (
        "__weakref__",
        "_began",
        "_deadline",
        "_error",
        "_orphan",
        "_pool",
        "_result",
        "_step",
        "_stop",
        "_stopped",
        "_verb",
        "_why",
    )

    def __init__(self, pool: Pool, verb: Verb[_Result_co]) -> None:
        """Runs the verb's own checks. Raises UsageError."""
        self._pool = pool
        self._verb: Verb[_Result_co] | None = verb
        self._step: Step | None = None
        self._stop = StopFlag()
        self._why = CANCELLED  # what the end says if `_stop` brings it about
        self._stopped = False
        self._orphan = False
        self._began = self._deadline = time.monotonic()
        self._result: _Result_co | None = None
        self._error: Exception | None = None
        try:
            self._step = next(verb)
            self._deadline = self._step.deadline
        except StopIteration as end:
            self._result = end.value
            self._verb = None

    def __repr__(self) -> str:
        return f"<Job {'ended' if self.poll() else 'under way'}>"

    def poll(self) -> bool:
        """Whether it has ended. Never waits."""
        return self._verb is None or self._orphan

    def result(self, timeout_s: float | None = None) -> _Result_co:
        """Wait for the end; what the verb would have answered.

        `timeout_s`, counted from `submit`, ends the job with reason "deadline" if it has not ended
        by then. None: the call's own deadline, counted from `submit` too, does.
        """
        if not self.poll():
            end = self._deadline if timeout_s is None else self._began + timeout_s
            came = self._pool.wait(self, end)
            if not came and timeout_s is None and not self._pool.is_queued(self):
                came = self._pool.wait(self, end + _GRACE_S)
            if not came:
                self._pool.end(self, LATE)
        if self._orphan and self._verb is not None:
            self._pool.fail(self, CANCELLED)
        if self._error is not None:
            raise self._error
        return cast("_Result_co", self._result)

    def cancel(self) -> bool:
        """End it; returns when not one more byte will be read or written.

        True: its result says "cancelled". False: it had ended by itself.
        """
        return self._pool.end(self, CANCELLED)

    # ---- for the pool ----------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Of the call; time.monotonic()."""
        return self._deadline

    @property
    def stopped(self) -> bool:
        """Whether it ended because it was told to."""
        return self._stopped

    def stop(self, why: Failure) -> None:
        """Ask a running step to end; the job then ends with `why`."""
        if not self._stop.is_set():
            self._why = why
            self._stop.set()

    def orphan(self) -> None:
        """Here is a fork's child, and who was to run it is in the parent: it has ended."""
        self._orphan = True

    def step(self, runner: Runner) -> Answer:
        """Run its next step."""
        step = self._step
        if step is None or self._stop.is_set():
            answer: Answer = CANCELLED
        else:
            answer = runner.run(step, self._stop)
        # Only the flag makes this kind of failure.
        if isinstance(answer, Failure) and answer.kind is CANCELLED.kind:
            return self._why
        return answer

    def advance(self, answer: Answer) -> bool:
        """Give the verb an answer; whether it wants another step."""
        verb = self._verb
        if verb is None:
            return False
        self._stopped = answer is self._why
        try:
            self._step = verb.send(answer)
        except StopIteration as end:
            self._result = end.value
        except Exception as error:  # a bug of ours; whoever asks for the result shall see it
            _log.exception("a job's verb broke")
            self._error = error
        else:
            return True
        self._verb = self._step = None  # and with them the caller's buffers
        return False

    def give_up(self, why: Failure) -> None:
        """Let the verb end with `why`, without another step."""
        self._why = why
        while self.advance(why):
            pass


class Jobs:
    """The jobs of one client."""

    def __init__(
        self, runner: Runner, workers: int = WORKERS, max_queued: int = MAX_QUEUED
    ) -> None:
        """`workers`: threads, and so jobs that run at a time. `max_queued`: jobs that wait."""
        self._pool = Pool(runner, workers, max_queued)

    def submit(self, verb: Verb[_Result]) -> Job[_Result]:
        """Queue a verb (Verbs.get, Verbs.put); its deadline counts from its making.

        Raises UsageError as the verb does, and ClosedError. Where too many jobs wait the job has
        ended at once, with reason "overloaded".
        """
        if self._pool.closed:
            verb.close()
            raise ClosedError("the client was closed", "make another one")
        job = Job(self._pool, verb)
        self._pool.add(job)
        return job

    @property
    def completion_fd(self) -> int:
        """A descriptor that is readable while jobs have ended that `completed` has not told of.

        For poll and epoll; read it by `completed` only. Jobs count that end after it was first
        asked for. It is closed with the client. Raises ClosedError.
        """
        return self._pool.completion_fd()

    def completed(self) -> list[Job[object]]:
        """Jobs that have ended since it was last asked, in that order, each once. Never waits.

        At most MAX_UNCOLLECTED are remembered, the latest; `Job.poll` knows of the others.
        """
        return self._pool.completed()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended; whether that came within `timeout_s`."""
        return self._pool.drain(time.monotonic() + timeout_s)

    def close(self) -> None:
        """End every job (results say "closed") and wait for that. Idempotent."""
        self._pool.close()
