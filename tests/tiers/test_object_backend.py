"""A bucket through obstore: against a real S3 server, a directory, and a server that misbehaves."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers.conformance import MIB, aligned_buffer, make_sample
from tiers.object_servers import REGION, S3Server

from kvstored.errors import ConfigError
from kvstored.tiers.object.api import Outcome
from kvstored.tiers.object.backend import Bucket, Entry, Got
from kvstored.tiers.object.obstore_bucket import ObstoreBucket
from kvstored.tiers.object.settings import ObjectSettings

SECRET = "kvstored-test-secret"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def s3_settings(server: S3Server) -> ObjectSettings:
    return ObjectSettings(
        url=server.url(), endpoint=server.endpoint, region=REGION, allow_http=True
    )


@pytest.fixture(params=["s3", "file"])
async def bucket(
    request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path
) -> AsyncIterator[Bucket]:
    settings = (
        s3_settings(s3_server)
        if request.param == "s3"
        else ObjectSettings(url=f"file://{tmp_path}/new/b%20ucket")
    )
    bucket = ObstoreBucket(settings)
    await bucket.open()
    yield bucket
    await bucket.close()


async def entries(bucket: Bucket, prefix: str) -> list[Entry]:
    found: list[Entry] = []
    async for page in bucket.list_pages(prefix, soon()):
        assert page.outcome is Outcome.OK
        found += page.entries
    return found


async def test_what_was_put_is_there_once(bucket: Bucket) -> None:
    payload = make_sample(3 * MIB + 5, 1).payload
    assert (await bucket.head("v1/a/b", soon())).outcome is Outcome.ABSENT
    assert await bucket.put_if_absent("v1/a/b", [b"head", payload], soon()) is Outcome.OK
    assert await bucket.put_if_absent("v1/a/b", [b"other"], soon()) is Outcome.EXISTED
    head = await bucket.head("v1/a/b", soon())
    assert (head.outcome, head.length_bytes) == (Outcome.OK, 4 + len(payload))
    assert abs(head.modified_ms / 1000 - time.time()) < 60
    into = memoryview(bytearray(2 * MIB))
    got = await bucket.get_range("v1/a/b", 4 + MIB, into, soon())
    assert (got.outcome, got.received_bytes) == (Outcome.OK, 2 * MIB)
    assert into == payload[MIB : 3 * MIB]


async def test_a_range_ends_where_the_object_ends(bucket: Bucket) -> None:
    await bucket.put_if_absent("v1/a/b", [b"0123456789"], soon())
    into = memoryview(bytearray(8))
    got = await bucket.get_range("v1/a/b", 6, into, soon())
    assert (got.outcome, got.received_bytes, got.total_bytes) == (Outcome.OK, 4, 10)
    assert bytes(into) == b"6789\0\0\0\0"
    assert (await bucket.get_range("v1/a/b", 60, into, soon())).outcome is not Outcome.OK
    assert (await bucket.get_range("v1/a/c", 0, into, soon())).outcome is Outcome.ABSENT


async def test_an_object_without_a_byte_is_read_to_its_end(bucket: Bucket) -> None:
    await bucket.put_if_absent("v1/a/empty", [b""], soon())
    got = await bucket.get_range("v1/a/empty", 0, memoryview(bytearray(8)), soon())
    assert got == Got(Outcome.OK, 0, 0)


async def test_listing_and_deleting(bucket: Bucket) -> None:
    for path in ("v1/a/1.x", "v1/a/2.x", "v1/ab/3.x", "control/4"):
        assert await bucket.put_if_absent(path, [b"12345"], soon()) is Outcome.OK
    assert {entry.path for entry in await entries(bucket, "v1/a")} == {"v1/a/1.x", "v1/a/2.x"}
    assert {entry.length_bytes for entry in await entries(bucket, "v1")} == {5}
    assert await bucket.delete(["v1/none", "v1/a/1.x", "v1/ab/3.x"], soon()) is Outcome.OK
    assert {entry.path for entry in await entries(bucket, "v1")} == {"v1/a/2.x"}
    assert await entries(bucket, "v1/nothing") == []


async def test_of_many_writers_of_one_name_one_wins(bucket: Bucket) -> None:
    bodies = [bytes([number]) * 1000 for number in range(8)]
    outcomes = await asyncio.gather(
        *(bucket.put_if_absent("v1/a/b", [body], soon()) for body in bodies)
    )
    assert sorted(outcome.name for outcome in outcomes) == ["EXISTED"] * 7 + ["OK"]
    into = memoryview(bytearray(1000))
    await bucket.get_range("v1/a/b", 0, into, soon())
    assert bytes(into) == bodies[outcomes.index(Outcome.OK)]


async def test_memory_is_let_go_of_when_a_put_is_over(bucket: Bucket) -> None:
    """Also of one that was cancelled, or out of time: an export that lives on would raise."""
    for wait_s in (20.0, 0.0, 0.002):
        memory = bytearray(4 * MIB)
        view = memoryview(memory)
        await bucket.put_if_absent(f"v1/a/{wait_s}", [view], soon(wait_s))
        view.release()
        gc.collect()
        memory.clear()  # BufferError while anything can look at it
    memory = bytearray(4 * MIB)
    view = memoryview(memory)
    put = asyncio.ensure_future(bucket.put_if_absent("v1/a/cancelled", [view], soon()))
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.wait([put])
    del put
    view.release()
    gc.collect()
    memory.clear()


async def test_a_sink_that_has_enough_ends_the_read(bucket: Bucket) -> None:
    await bucket.put_if_absent("v1/a/b", [bytes(2 * MIB)], soon())

    async def enough(chunk: memoryview) -> bool:
        return False

    got = await bucket.get("v1/a/b", 0, 2 * MIB, enough, soon())
    assert got.outcome is Outcome.CANCELLED


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_HEAD = (
    b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n'
)


def _answer(status: bytes, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def _body(announced: int, sent: int, span: bytes = b"0-99/100") -> bytes:
    head = b"Content-Length: %d\r\nContent-Range: bytes %s\r\n\r\n" % (announced, span)
    return _HEAD + head + b"x" * sent


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Token-0>{SECRET}</Token-0></Error>".encode()


MISDEEDS = {
    "short": (_body(50, 50), Outcome.SHORT),
    "cut": (_body(100, 50), Outcome.SHORT),
    "long": (_body(150, 150), Outcome.LONG),
    "other range": (_body(150, 150, b"0-149/150"), Outcome.LONG),
    "whole": (
        _answer(b'200 OK\r\nETag: "a"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT', b"x" * 200),
        Outcome.LONG,
    ),
    "500": (_answer(b"500 Oops"), Outcome.SERVER),
    "503": (_answer(b"503 Oops"), Outcome.SERVER),
    "slow down": (_answer(b"503 Oops", _error("SlowDown")), Outcome.THROTTLED),
    "429": (_answer(b"429 Oops"), Outcome.THROTTLED),
    "401": (_answer(b"401 Oops"), Outcome.DENIED),
    "403": (_answer(b"403 Oops", _error("AccessDenied")), Outcome.DENIED),
    "expired": (_answer(b"400 Oops", _error("ExpiredToken")), Outcome.DENIED),
    "no key": (_answer(b"404 Oops", _error("NoSuchKey")), Outcome.ABSENT),
    "no bucket": (_answer(b"404 Oops", _error("NoSuchBucket")), Outcome.NO_BUCKET),
    "region": (_answer(b"301 Moved"), Outcome.SERVER),
    "garbage": (b"good morning\r\n\r\n", Outcome.NETWORK),
    "closed": (b"", Outcome.NETWORK),
    "reset": (b"RESET", Outcome.NETWORK),
    "slow": (b"SLOW", Outcome.DEADLINE),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_each_failure_has_its_own_name(misdeed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    sent, expected = MISDEEDS[misdeed]
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if sent == b"SLOW":
            await hold.wait()
        elif sent == b"RESET":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            writer.write(sent)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bucket = ObstoreBucket(
        ObjectSettings("s3://bucket/p", endpoint=f"http://127.0.0.1:{port}", allow_http=True)
    )
    await bucket.open()
    into = aligned_buffer(4096, fill=7)
    got = await bucket.get_range("v1/x", 0, into[:100], soon(0.3 if sent == b"SLOW" else 20))
    assert got.outcome is expected
    assert SECRET not in bucket.detail
    assert np.all(np.frombuffer(into, np.uint8)[100:] == 7), "written beyond the buffer"
    hold.set()
    await bucket.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("http://nobody.invalid", Outcome.NAME), ("http://127.0.0.1:9", Outcome.NETWORK)],
)
async def test_an_endpoint_that_is_not_there(
    endpoint: str, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    bucket = ObstoreBucket(ObjectSettings("s3://bucket", endpoint=endpoint, allow_http=True))
    await bucket.open()
    assert (await bucket.head("v1/x", soon())).outcome is expected
    assert (await bucket.put_if_absent("v1/x", [b"1"], soon())) is expected
    assert [page.outcome async for page in bucket.list_pages("v1", soon())] == [expected]
    assert await bucket.delete(["v1/x"], soon()) is expected
    await bucket.close()


async def test_a_bucket_that_is_not_there_is_told_from_an_object_that_is_not(
    s3_server: S3Server,
) -> None:
    bucket = ObstoreBucket(replace(s3_settings(s3_server), url="s3://nobucket/x"))
    await bucket.open()
    assert (await bucket.head("v1/x", soon())).outcome is Outcome.NO_BUCKET
    await bucket.close()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/y",
        "s3://",
        "file://host/x",
        "file:x",
        "bucket",
        f"s3://user:{SECRET}@bucket/x",
        f"s3://bucket/x?key={SECRET}",
    ],
)
async def test_urls_that_cannot_be_one_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await ObstoreBucket(ObjectSettings(url)).open()
    assert SECRET not in str(raised.value)


async def test_work_on_the_buckets_own_loop_ends_when_the_caller_is_cancelled(
    bucket: Bucket,
) -> None:
    began, seen = asyncio.Event(), []
    here = asyncio.get_running_loop()

    async def work() -> None:
        assert asyncio.get_running_loop() is not here
        here.call_soon_threadsafe(began.set)
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    task = asyncio.ensure_future(bucket.run(work))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["ended"]
