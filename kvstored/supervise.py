"""Background tasks that cannot die in silence (invariant 11).

A background task is meant to run until the daemon stops. One that ends before, whether by an
exception or by returning, is logged, counted, and then, as its policy says, restarted after a
pause or taken as a reason to stop the whole daemon.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

log = logging.getLogger("kvstored.tasks")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
HEALTHY_AFTER_S = 60.0

TaskBody = Callable[[], Coroutine[object, object, None]]


class OnDeath(enum.Enum):
    """What follows when a background task dies."""

    RESTART = "restart"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class TaskDeath:
    """The death of a task whose policy is FATAL. `error` is None where it merely returned."""

    name: str
    error: BaseException | None

    def __str__(self) -> str:
        what = f"{type(self.error).__name__}: {self.error}" if self.error else "returned"
        return f"background task {self.name} died: {what}"


def next_pause_s(pause_s: float, lived_s: float) -> float:
    """Pause before the next restart: doubled each time, from the start again once a life was long.

    Bounded by FIRST_PAUSE_S and LONGEST_PAUSE_S, so that a task that dies at once does not spin.
    """
    if lived_s >= HEALTHY_AFTER_S:
        return FIRST_PAUSE_S
    return min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)


class Supervisor:
    """Runs background tasks of one event loop. All methods belong to that loop.

    `on_fatal` is called once per death of a FATAL task; it should begin the daemon's stop. `sleep`
    is asyncio.sleep except in tests.
    """

    def __init__(
        self,
        on_fatal: Callable[[TaskDeath], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._on_fatal = on_fatal
        self._sleep = sleep
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self.restarts: dict[str, int] = {}
        """Restarts per task name, zero for one that never died; feeds the metrics."""

    def start(self, name: str, body: TaskBody, on_death: OnDeath = OnDeath.RESTART) -> None:
        """Run `body()` until `stop`. `name` is a metrics label: unique, of a fixed set.

        Raises ValueError for a name that runs already, RuntimeError after `stop`.
        """
        if self._stopping:
            raise RuntimeError(f"background task {name} started while stopping")
        if name in self._tasks:
            raise ValueError(f"background task {name} runs already")
        self.restarts.setdefault(name, 0)
        self._tasks[name] = asyncio.create_task(self._supervise(name, body, on_death), name=name)

    async def stop(self) -> None:
        """Cancel every task and wait until all have ended. Idempotent."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _supervise(self, name: str, body: TaskBody, on_death: OnDeath) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while True:
            born = loop.time()
            error = await _outcome(body)
            if self._stopping:
                return
            death = TaskDeath(name, error)
            if on_death is OnDeath.FATAL:
                log.critical("task died, the daemon must stop", exc_info=error, extra=_fields(name))
                self._on_fatal(death)
                return
            pause_s = next_pause_s(pause_s, loop.time() - born)
            log.error(
                "task died, it will be restarted",
                exc_info=error,
                extra=_fields(name, pause_s=pause_s),
            )
            self.restarts[name] += 1
            await self._sleep(pause_s)


async def _outcome(body: TaskBody) -> BaseException | None:
    """Run one life of a task: its exception, or None where it returned.

    A CancelledError that nobody asked this supervisor for is a death like any other; one that was
    asked for goes through.
    """
    try:
        await body()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error
    except Exception as error:
        return error
    return None


def _fields(name: str, **more: object) -> dict[str, object]:
    return {"fields": {"task": name, **more}}
