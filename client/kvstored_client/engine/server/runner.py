"""The engine's thread. It steps the engine; requests and their events cross to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TypeVar

from kvstored_client.engine.engine import Engine
from kvstored_client.engine.server.errors import ApiError, EngineFailed, Stopping
from kvstored_client.engine.types import Request, TokenEvent

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WAIT_S = 0.5
"""How long the engine's thread waits to be woken before it looks all the same."""


class Job:
    """One request under way, for the event loop that submitted it. `close` it, whatever happens.

    Its queue never has more than the tokens that it may be answered with, and its end.
    """

    def __init__(self, runner: EngineRunner, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[TokenEvent | ApiError] = asyncio.Queue(
            request.sampling.max_tokens + 1
        )
        self._runner = runner

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Its tokens, up to the last. Raises ApiError where it ended without one."""
        while True:
            event = await self.queue.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if event.finish_reason is not None:
                return

    def close(self) -> None:
        """Nobody reads on: where it has not ended it does so at the next step, and its blocks come
        back.
        """
        self._runner.leave(self)


class EngineRunner:
    """Steps an engine on a thread of its own, from `start` to `stop`, and closes it.

    `submit`, `Job.close`, `call` and `give_up` are for any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures = 0
        self._jobs: dict[str, Job] = {}
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._lock = threading.Lock()
        self._ending = False
        self._closed_in_time = True
        self._close_timeout_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are computed."""
        return self._thread.is_alive() and not self._ending

    @property
    def jobs_under_way(self) -> int:
        """Requests submitted that have not ended."""
        return len(self._jobs)

    def submit(self, request: Request) -> Job:
        """Queue a request; on an event loop. Raises what Engine.add_request does, and Stopping."""
        job = Job(self, request)
        with self._lock:  # so that its first event finds it
            if not self.alive:
                raise Stopping("the engine takes no more requests")
            self.engine.add_request(request)
            self._jobs[request.id] = job
        return job

    def leave(self, job: Job) -> None:
        """See Job.close."""
        with self._lock:
            present = self._jobs.pop(job.request.id, None)
        if present is not None:
            self.engine.abort(job.request.id)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        result: Future[T] = Future()
        with self._lock:
            if not self.alive:
                raise Stopping("the engine has stopped")
            self._calls.append((function, result))  # type: ignore[arg-type]  # same T in both
        self.engine.wake()
        return result

    def give_up(self) -> None:
        """Answer all jobs under way with Stopping; their blocks come back at the next step."""
        for request_id in self._end_jobs(Stopping("the server stops before this is computed")):
            self.engine.abort(request_id)

    def stop(self, timeout_s: float) -> bool:
        """End all jobs with Stopping, finish what is queued for the store, and end the thread.
        False: not within `timeout_s`.
        """
        self._close_timeout_s = timeout_s
        self._ending = True
        self.engine.wake()
        self._thread.join(timeout_s + _WAIT_S + 5.0)
        return self._closed_in_time and not self._thread.is_alive()

    # ---- on the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        error: ApiError = Stopping("the server stops")
        try:
            while not self._ending:
                self.engine.wait(_WAIT_S)
                self._step()
                self._run_calls()  # after the step, which forgets that it was woken
        except Exception:
            _log.exception("the engine's thread ends")
            error = EngineFailed("the engine has failed for good; the server must be restarted")
        finally:
            self._ending = True
            self._end_jobs(error)
            self._refuse_calls(error)
            self._closed_in_time = False
            self._closed_in_time = self.engine.close(self._close_timeout_s)

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception:
            # Such as too little of an accelerator's memory: later requests need not fail.
            self.failures += 1
            _log.exception("a step failed; the requests under way are given up")
            for request_id in self._end_jobs(
                EngineFailed("computing failed; see the server's log")
            ):
                self.engine.end(request_id)
            return
        deliveries: list[tuple[Job, TokenEvent | ApiError]] = []
        with self._lock:
            for event in events:
                ended = event.finish_reason is not None
                job = self._jobs.get(event.request_id)
                if job is not None:  # else nobody reads it any more
                    deliveries.append((job, event))
                if ended:
                    self._jobs.pop(event.request_id, None)
        _deliver(deliveries)

    def _end_jobs(self, error: ApiError) -> list[str]:
        """Answer all jobs with an error. Returns their ids."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        _deliver([(job, error) for job in jobs.values()])
        return list(jobs)

    def _run_calls(self) -> None:
        while self._calls:
            function, result = self._calls.popleft()
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

    def _refuse_calls(self, error: ApiError) -> None:
        while self._calls:
            self._calls.popleft()[1].set_exception(error)


def _deliver(deliveries: list[tuple[Job, TokenEvent | ApiError]]) -> None:
    """Hand events over to their loops, with one wake-up for each loop."""
    for loop in {job.loop for job, _ in deliveries}:
        mine = [(job, event) for job, event in deliveries if job.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there
            loop.call_soon_threadsafe(_put_all, mine)


def _put_all(deliveries: list[tuple[Job, TokenEvent | ApiError]]) -> None:
    for job, event in deliveries:
        job.queue.put_nowait(event)
