"""A proxy between a daemon and an S3 server that does what networks and servers do wrong.

It runs on a loop and thread of its own. What it does to which requests is told by `Fault`s, drawn
from a seed: the same requests in the same order meet the same faults.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

ANY = frozenset({"GET", "HEAD", "PUT", "DELETE", "POST", "LIST"})
OBJECTS = frozenset({"GET"})
_STEP = 1 << 18

Answer = Callable[[str, "Message"], Awaitable[bytes] | bytes]


@dataclass
class Fault:
    """What happens to requests, from now on until `FaultProxy.clear`.

    `kind`: one of `KINDS`. `methods`: LIST is a GET of a bucket. `share`: of those requests, as the
    seed has it. `after`: so many of them pass first. `count`: so many at most are hit.
    """

    kind: str
    methods: frozenset[str] = ANY
    share: float = 1.0
    after: int = 0
    count: int = 1 << 60
    delay_s: float = 0.03
    hits: int = 0


@dataclass
class Message:
    """A request's or an answer's head."""

    lines: list[bytes]

    @property
    def first(self) -> list[str]:
        return self.lines[0].decode("latin1").split(" ")

    @property
    def method(self) -> str:
        method, target = self.first[:2]
        return "LIST" if method == "GET" and "list-type" in target else method

    def get(self, name: str) -> str:
        start = name.lower().encode() + b":"
        found = [line for line in self.lines[1:] if line.lower().startswith(start)]
        return found[0].partition(b":")[2].strip().decode("latin1") if found else ""

    def set(self, name: str, value: str) -> None:
        start = name.lower().encode() + b":"
        self.lines = [line for line in self.lines if not line.lower().startswith(start)]
        if value:
            self.lines.append(f"{name}: {value}".encode())

    @property
    def length(self) -> int:
        return int(self.get("content-length") or 0)

    def __bytes__(self) -> bytes:
        return b"\r\n".join([*self.lines, b"", b""])


def answer(status: str, code: str = "", more: str = "") -> bytes:
    """A whole answer of a server that refuses."""
    body = f"<Error><Code>{code}</Code><Message>{more}</Message></Error>" if code else ""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


REFUSALS = {
    "500": answer("500 Internal Server Error", "InternalError"),
    "502": answer("502 Bad Gateway"),
    "429": answer("429 Too Many Requests"),
    "slow_down": answer("503 Slow Down", "SlowDown"),
    "expired": answer("400 Bad Request", "ExpiredToken", "the token KVTOKEN has expired"),
    "denied": answer("403 Forbidden", "AccessDenied"),
    "no_bucket": answer("404 Not Found", "NoSuchBucket"),
}
BODIES = ("short", "cut", "long", "whole", "wrong", "reset")  # only of answers with a body
KINDS = (*REFUSALS, *BODIES, "reset", "lost", "held", "delay")


class Cut(Exception):
    """The connection ends here, without a word."""


class FaultProxy:
    """See the module. Without faults it passes on what comes. `answers`: instead of a server."""

    def __init__(self, upstream_port: int = 0, seed: int = 0, answers: Answer | None = None):
        self._upstream_port = upstream_port
        self._answers = answers
        self._random = random.Random(seed)
        self._fault: Fault | None = None
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0
        self.seen: Counter[str] = Counter()
        """Requests by method since the last `inject` or `clear`."""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, fault: Fault) -> Fault:
        """Have a fault from now on, instead of another."""
        assert fault.kind in KINDS
        self._call(lambda: self._set(fault))
        return fault

    def clear(self) -> None:
        """End the fault; requests that were held go on."""
        self._call(lambda: self._set(None))

    def _call(self, work: Callable[[], None]) -> None:
        async def call() -> None:
            work()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _set(self, fault: Fault | None) -> None:
        self._fault = fault
        self.seen.clear()
        self._released.set()
        self._released = asyncio.Event()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=_STEP)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(self, reader, writer)
        try:
            while await connection.exchange():
                pass
        except (Cut, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            connection.close()

    def hit(self, request: Message) -> Fault | None:
        """The fault that a request meets, if it does."""
        self.seen[request.method] += 1
        fault = self._fault
        if fault is None or request.method not in fault.methods or fault.hits >= fault.count:
            return None
        if fault.after > 0:
            fault.after -= 1
            return None
        if self._random.random() >= fault.share:
            return None
        fault.hits += 1
        return fault

    def draw(self, below: int) -> int:
        return self._random.randrange(below) if below > 0 else 0

    async def held(self) -> None:
        await self._released.wait()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._upstream_port, limit=_STEP)

    @property
    def answers(self) -> Answer | None:
        return self._answers


class _Connection:
    """One of the daemon's connections, and one to the server."""

    def __init__(
        self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        self._writer.close()
        if self._upstream is not None:
            self._upstream[1].close()

    async def exchange(self) -> bool:
        """One request and its answer; False when there are no more."""
        try:
            request = await _head(self._reader)
        except asyncio.IncompleteReadError:
            return False
        fault = self._proxy.hit(request)
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "delay":
            await asyncio.sleep(fault.delay_s)
        elif kind == "held":
            await self._proxy.held()
        elif kind == "reset" and request.method in ("PUT", "HEAD", "LIST"):
            await self._swallow(self._proxy.draw(request.length + 1))
            self._reset()
        if kind in REFUSALS or self._proxy.answers is not None:
            await self._refuse(request, kind)
            return True
        if self._upstream is None:
            self._upstream = await self._proxy.connect()
        reader, writer = self._upstream
        writer.write(bytes(request))
        await _copy(self._reader, writer, request.length)
        answer = await _head(reader)
        if kind == "lost":
            self._reset()
        await self._pass_on(request, answer, reader, kind)
        return True

    async def _refuse(self, request: Message, kind: str) -> None:
        await self._swallow(request.length)
        if self._proxy.answers is not None:
            made = self._proxy.answers(request.method, request)
            whole = made if isinstance(made, bytes) else await made
        else:
            whole = REFUSALS[kind]
        # A HEAD is answered without a body, whatever is announced.
        end = whole.index(b"\r\n\r\n") + 4
        self._writer.write(whole[:end] if request.method == "HEAD" else whole)
        await self._writer.drain()

    async def _pass_on(
        self, request: Message, answer: Message, reader: asyncio.StreamReader, kind: str
    ) -> None:
        if request.method == "HEAD" or answer.first[1] in ("204", "304"):
            self._writer.write(bytes(answer))
            return
        if "chunked" in answer.get("transfer-encoding"):
            self._writer.write(bytes(answer))
            await self._pass_chunks(reader)
            return
        length = answer.length
        if kind not in BODIES or not length:
            self._writer.write(bytes(answer))
            await _copy(reader, self._writer, length)
            return
        await self._spoil(answer, await reader.readexactly(length), kind)

    async def _spoil(self, answer: Message, body: bytes, kind: str) -> None:
        at = self._proxy.draw(len(body))
        if kind == "wrong":
            body = body[:at] + bytes([body[at] ^ 1 << self._proxy.draw(8)]) + body[at + 1 :]
        elif kind == "short":
            body = body[:at]
            answer.set("Content-Length", str(at))
        elif kind == "long":
            body += bytes(1 + self._proxy.draw(1 << 20))
            answer.set("Content-Length", str(len(body)))
        elif kind == "whole":  # as of a server that knows no ranges
            answer.lines[0] = b"HTTP/1.1 200 OK"
            answer.set("Content-Range", "")
        self._writer.write(bytes(answer))
        self._writer.write(body[:at] if kind in ("cut", "reset") else body)
        await self._writer.drain()
        if kind == "cut":
            raise Cut
        if kind == "reset":
            self._reset()

    async def _pass_chunks(self, reader: asyncio.StreamReader) -> None:
        while True:
            line = await reader.readuntil(b"\r\n")
            self._writer.write(line)
            length = int(line.split(b";")[0], 16)
            await _copy(reader, self._writer, length + 2)  # trailers are not sent
            if not length:
                return

    async def _swallow(self, length: int) -> None:
        while length and (part := await self._reader.read(min(length, _STEP))):
            length -= len(part)

    def _reset(self) -> None:
        """End the connection by a reset."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        raise Cut


async def _head(reader: asyncio.StreamReader) -> Message:
    raw = await reader.readuntil(b"\r\n\r\n")
    return Message(raw[:-4].split(b"\r\n"))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
    while length:
        part = await reader.read(min(length, _STEP))
        if not part:
            raise Cut
        writer.write(part)
        with suppress(ConnectionResetError):
            await writer.drain()
        length -= len(part)
