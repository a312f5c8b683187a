"""Bare obstore: what `bench object` compares with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import numpy as np
import obstore
import uvloop
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvstored.bench.payloads import Bytes
from kvstored.bench.processes import BenchError

T = TypeVar("T")


class RawObjects:
    """One prefix's objects, put and read by obstore alone, `parallel` requests at once.

    An object longer than `range_bytes` is read by several of them, as the daemon does. obstore puts
    a body where it likes; it is copied to its place from there. Raises BenchError where a request
    fails.
    """

    def __init__(self, store: S3Store, parallel: int, range_bytes: int) -> None:
        self._store = store
        self._parallel = parallel
        self._range_bytes = range_bytes
        self._loop = uvloop.new_event_loop()

    def close(self) -> None:
        """End its loop."""
        self._loop.close()

    def put(self, name: str, objects: Bytes) -> None:
        """Create objects, one for each row."""

        def work(row: int) -> Awaitable[object]:
            return obstore.put_async(
                self._store, f"{name}/{row}", objects[row], mode="create", use_multipart=False
            )

        self._run(work, range(len(objects)))

    def read(self, name: str, into: Bytes) -> None:
        """Read objects, one into each row."""
        count, nbytes = into.shape

        async def work(span: tuple[int, int]) -> None:
            row, at = span
            stop = min(at + self._range_bytes, nbytes)
            body = await obstore.get_range_async(self._store, f"{name}/{row}", start=at, end=stop)
            np.copyto(into[row, at:stop], np.frombuffer(memoryview(body), np.uint8))

        spans = [(row, at) for row in range(count) for at in range(0, nbytes, self._range_bytes)]
        self._run(work, spans)

    def _run(self, work: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
        try:
            self._loop.run_until_complete(self._all(work, items))
        except ExceptionGroup as group:
            if group.split((BaseError, OSError))[1] is not None:
                raise
            kinds = sorted({type(error).__name__ for error in group.exceptions})
            raise BenchError(f"bare requests failed: {', '.join(kinds)}") from None

    async def _all(self, work: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
        waiting = iter(items)

        async def worker() -> None:
            for item in waiting:
                await work(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._parallel):
                group.create_task(worker())
