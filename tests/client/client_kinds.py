"""Both clients behind one blocking face, so that each test of behaviour holds for both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import TypeVar

import pytest

from kvstored_client import AsyncKVClient, GetResult, KVClient, MatchResult, PutResult

_T = TypeVar("_T")
GIVE_UP_S = 60.0


class OnLoop:
    """AsyncKVClient on a loop of its own thread; verbs as blocking calls."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make() -> AsyncKVClient:
            return AsyncKVClient(*arguments, **options)  # type: ignore[arg-type]  # passed on

        self.inner = self._wait(make())

    def _wait(self, work: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(GIVE_UP_S)

    def __getattr__(self, name: str) -> Callable[..., object]:
        verb = getattr(self.inner, name)

        def call(*arguments: object, **options: object) -> object:
            return self._wait(verb(*arguments, **options))

        return call

    def match(self, *arguments: object, **options: object) -> MatchResult:
        return self._wait(self.inner.match(*arguments, **options))  # type: ignore[arg-type]  # as is

    def get(self, *arguments: object, **options: object) -> GetResult:
        return self._wait(self.inner.get(*arguments, **options))  # type: ignore[arg-type]  # as is

    def put(self, *arguments: object, **options: object) -> PutResult:
        return self._wait(self.inner.put(*arguments, **options))  # type: ignore[arg-type]  # as is

    def close(self) -> None:
        self._wait(self.inner.close())

    def end(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GIVE_UP_S)
        self._loop.close()


Client = KVClient | OnLoop
MakeClient = Callable[..., Client]


@contextlib.contextmanager
def clients(kind: str) -> Iterator[MakeClient]:
    """A maker of clients that are closed at the end."""
    made: list[Client] = []

    def make(*arguments: object, **options: object) -> Client:
        if kind == "async":
            made.append(OnLoop(*arguments, **options))
        else:
            made.append(KVClient(*arguments, **options))  # type: ignore[arg-type]  # passed on
        return made[-1]

    try:
        yield make
    finally:
        for client in made:
            client.end() if isinstance(client, OnLoop) else client.close()


@pytest.fixture(params=["blocking", "async"])
def make_client(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with clients(request.param) as make:
        yield make
