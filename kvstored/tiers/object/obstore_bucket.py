"""A bucket through obstore: S3 and what speaks it, GCS, Azure, or a directory.

The requests themselves run on obstore's own threads, outside the GIL; what comes of them is taken
in on a `BucketLoop`, where bodies are copied to where they belong.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from kvstored.errors import ConfigError
from kvstored.tiers.object.api import Outcome
from kvstored.tiers.object.backend import Bucket, Entry, Got, Head, Page, Sink
from kvstored.tiers.object.bucket_errors import classify
from kvstored.tiers.object.bucket_loop import BucketLoop
from kvstored.tiers.object.settings import ObjectSettings

CHUNK_BYTES = 4 << 20
"""A body is taken in by chunks of about this: large enough to cost Python little, which shares the
processor with obstore's threads; small enough that what is beyond a range costs little memory."""

WHOLE_BYTES = (2 << 20) + (4 << 10)
"""A read of no more than this is awaited as one: each chunk awaited costs as much as copying it."""

LIST_PAGE = 1000
DELETE_BATCH = 1000  # what S3 takes in one request
BUCKET_PROVEN_S = 5.0
_LONGEST_REQUEST = timedelta(minutes=10)  # only a backstop: each call has a deadline

T = TypeVar("T")


class ObstoreBucket(Bucket):
    """See the module."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._loop = BucketLoop()
        self._store: ObjectStore | None = None
        self._detail = ""
        self._streams = True
        self._batches = True
        self._proven_until = 0.0  # the bucket is known to exist until then

    @property
    def url(self) -> str:
        """Scheme, bucket and prefix: no user, no query."""
        parts = urlsplit(self._settings.url)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"

    @property
    def detail(self) -> str:
        """As in Bucket."""
        return self._detail

    async def open(self) -> None:
        """As in Bucket."""
        self._store = make_store(self._settings)
        self._streams = not isinstance(self._store, LocalStore)
        self._batches = isinstance(self._store, S3Store)
        self._loop.start()

    async def close(self) -> None:
        """As in Bucket."""
        await self._loop.stop()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """As in Bucket."""
        await self._loop.run(work)

    async def head(self, path: str, deadline: float) -> Head:
        """As in Bucket. S3 gives no reason with the 404 of a HEAD, so now and then an ABSENT is
        looked into: it may be the bucket that is not there.
        """

        async def work() -> Head:
            found = await obstore.head_async(self._open_store, path)
            self._proven_until = time.monotonic() + BUCKET_PROVEN_S
            modified_ms = int(found["last_modified"].timestamp() * 1000)
            return Head(Outcome.OK, found["size"], modified_ms)

        head = await self._run(work, Head, deadline)
        if head.outcome is Outcome.ABSENT and self._streams:
            return Head(await self._absent(deadline))
        return head

    async def _absent(self, deadline: float) -> Outcome:
        """ABSENT, or what is wrong with the whole bucket."""
        if time.monotonic() < self._proven_until:
            return Outcome.ABSENT

        async def work() -> Outcome:
            # of one name, so that there is little to send
            async for _ in obstore.list(self._open_store, "v0", chunk_size=1):
                break
            self._proven_until = time.monotonic() + BUCKET_PROVEN_S
            return Outcome.ABSENT

        outcome = await self._run(work, _itself, deadline)
        return Outcome.NO_BUCKET if outcome is Outcome.NO_BUCKET else Outcome.ABSENT

    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        """As in Bucket."""
        received = total = 0

        async def work() -> Got:
            nonlocal received, total
            options: Any = {"range": (start_bytes, start_bytes + length_bytes)}
            result = await obstore.get_async(self._open_store, path, options=options)
            self._proven_until = time.monotonic() + BUCKET_PROVEN_S
            total = result.meta["size"]
            due = min(length_bytes, total - start_bytes)
            async for chunk in self._body(result, length_bytes):
                if received + len(chunk) > due:
                    return self._got(Outcome.LONG, "a body went on too long", received, total)
                received += len(chunk)
                if not await sink(chunk):
                    return Got(Outcome.CANCELLED, received, total)
            if received < due:
                return self._got(Outcome.SHORT, "the body ended early", received, total)
            return Got(Outcome.OK, received, total)

        got = await self._run(work, lambda outcome: Got(outcome, received, total), deadline)
        refused = Outcome.SHORT if self._streams else Outcome.SERVER
        if got.outcome is refused and not start_bytes and await self._empty(path, deadline):
            return Got(Outcome.OK)
        return got

    async def _empty(self, path: str, deadline: float) -> bool:
        """Whether a stored object has no bytes at all: of such a one no range can be had, and
        servers, directories too, answer as if the request were wrong.
        """
        head = await self.head(path, deadline)
        return head.outcome is Outcome.OK and not head.length_bytes

    async def _body(
        self, result: obstore.GetResult, length_bytes: int
    ) -> AsyncIterator[memoryview]:
        """A body in chunks. A directory would give 8 KiB at a time, so it is asked for all at once:
        a file is never longer than what was asked of it.
        """
        if self._streams and length_bytes > WHOLE_BYTES:
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)
        else:
            whole = memoryview(await result.bytes_async())
            for at in range(0, len(whole), CHUNK_BYTES):
                yield whole[at : at + CHUNK_BYTES]

    def _got(self, outcome: Outcome, words: str, received_bytes: int, total_bytes: int) -> Got:
        self._detail = words
        return Got(outcome, received_bytes, total_bytes)

    async def put_if_absent(
        self, path: str, pieces: Sequence[bytes | memoryview], deadline: float
    ) -> Outcome:
        """As in Bucket. obstore may look at the pieces for a moment after it was told to stop; this
        returns when it has let go of them.
        """

        async def work() -> Outcome:
            lent = _Lent(pieces)
            try:
                async with asyncio.timeout(_left_s(deadline)):
                    await obstore.put_async(
                        self._open_store,
                        path,
                        lent.take(),
                        mode="create",
                        use_multipart=False,
                    )
            finally:
                await lent.returned()
            self._proven_until = time.monotonic() + BUCKET_PROVEN_S
            return Outcome.OK

        return await self._run(work, _itself, None)

    async def list_pages(self, prefix: str, deadline: float) -> AsyncIterator[Page]:
        """As in Bucket."""
        stream = obstore.list(self._open_store, prefix, chunk_size=LIST_PAGE).__aiter__()

        async def work() -> Page | None:
            try:
                found = await anext(stream)
            except StopAsyncIteration:
                return None
            return Page(Outcome.OK, tuple(map(_entry, found)))

        while (page := await self._run(work, Page, deadline)) is not None:
            yield page
            if page.outcome is not Outcome.OK:
                return

    async def delete(self, paths: Sequence[str], deadline: float) -> Outcome:
        """As in Bucket. Where an object that is not there is an error, each is asked for alone."""
        step = DELETE_BATCH if self._batches else 1
        for at in range(0, len(paths), step):
            batch = list(paths[at : at + step])

            async def work(batch: list[str] = batch) -> Outcome:
                await obstore.delete_async(self._open_store, batch)
                return Outcome.OK

            outcome = await self._run(work, _itself, deadline)
            if outcome not in (Outcome.OK, Outcome.ABSENT):
                return outcome
        return Outcome.OK

    @property
    def _open_store(self) -> ObjectStore:
        if self._store is None:
            raise RuntimeError("the bucket was not opened")
        return self._store

    async def _run(
        self,
        work: Callable[[], Awaitable[T]],
        failed: Callable[[Outcome], T],
        deadline: float | None,
    ) -> T:
        """Do something with the bucket on its loop, in time; an error becomes a value."""

        async def guarded() -> T:
            try:
                if deadline is None:
                    return await work()
                async with asyncio.timeout(_left_s(deadline)):
                    return await work()
            except Exception as error:  # whatever obstore raises has a meaning, or is SERVER
                failure = classify(error)
                if failure.outcome not in (Outcome.ABSENT, Outcome.EXISTED):
                    self._detail = failure.words
                return failed(failure.outcome)

        return await self._loop.run(guarded)


class _Lent:
    """Memory that was given to obstore, and when it has let go of it.

    Each piece goes out as an array of its own; obstore holds on to that as long as it can look at
    the memory, and its end is the sign.
    """

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces: list[Any] = [np.frombuffer(piece, np.uint8) for piece in pieces]
        self._out = len(self._pieces)
        self._loop = asyncio.get_running_loop()
        self._back = asyncio.Event()
        for piece in self._pieces:
            weakref.finalize(
                piece, self._loop.call_soon_threadsafe, self._one_is_back
            ).atexit = False

    def take(self) -> list[Any]:
        """The pieces, once; nothing is kept here."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _one_is_back(self) -> None:
        self._out -= 1
        if not self._out:
            self._back.set()

    async def returned(self) -> None:
        """Wait until nothing looks at the memory, also when cancelled meanwhile."""
        self._pieces = []
        cancelled = False
        while self._out:
            try:
                await self._back.wait()
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


def _entry(found: obstore.ObjectMeta) -> Entry:
    modified_ms = int(found["last_modified"].timestamp() * 1000)
    return Entry(found["path"], found["size"], modified_ms)


def _itself(outcome: Outcome) -> Outcome:
    return outcome


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def make_store(settings: ObjectSettings) -> ObjectStore:
    """The store that a URL names; not asked anything yet. Raises ConfigError."""
    parts = urlsplit(settings.url)
    prefix = unquote(parts.path).strip("/") or None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise _bad("a URL with user, password or query; credentials belong in the environment")
    common: dict[str, Any] = {
        "prefix": prefix,
        "client_options": {
            "allow_http": settings.allow_http,
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "timeout": _LONGEST_REQUEST,
        },
        # retried here, range by range, by those who know the deadline
        "retry_config": {"max_retries": 0, "retry_timeout": _LONGEST_REQUEST},
    }
    if settings.endpoint and parts.scheme != "file":
        common["endpoint"] = settings.endpoint
    if parts.scheme == "file":
        return _directory(parts.netloc, unquote(parts.path))
    if not parts.netloc:
        raise _bad(f"no bucket in {parts.scheme}://")
    try:
        match parts.scheme:
            case "s3":
                if settings.region:
                    common["region"] = settings.region
                return S3Store(parts.netloc, **common)
            case "gs":
                return GCSStore(parts.netloc, **_without(common, "endpoint"))
            case "az":
                return AzureStore(parts.netloc, **common)
    except Exception as error:  # its text may repeat what it found in the environment
        raise _bad(f"the store cannot be set up ({type(error).__name__})") from None
    raise _bad(f"scheme {parts.scheme!r}; there are s3://, gs://, az:// and file://")


def _directory(host: str, path: str) -> ObjectStore:
    if host or not path.startswith("/"):
        raise _bad("a directory is file:///and/its/path")
    try:
        return LocalStore(Path(path), mkdir=True)
    except Exception as error:  # obstore tells an unwritable directory by a GenericError
        raise _bad(f"the directory {path} cannot be used ({type(error).__name__})") from error


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _bad(problem: str) -> ConfigError:
    return ConfigError([f"object.url: {problem}"])
