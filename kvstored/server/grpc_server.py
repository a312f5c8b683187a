"""The gRPC server: its thread, its loop, its listeners."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine
from pathlib import Path

import grpc
import grpc.aio

from kvstored.server.allocator import keep_freed_frames
from kvstored.server.auth import Transport
from kvstored.server.bridge import VerbsLoop
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.grpc_calls import Bounds, Calls
from kvstored.server.health import Health
from kvstored.server.limits import Limits
from kvstored.server.sockets import ListenError, UnixSocket, admin_socket_path
from kvstored_client.proto.methods import ADMIN_SERVICE, KVSTORE_SERVICE

_log = logging.getLogger(__name__)
_MAX_REPLY_BYTES = 16 << 20
_ENGINES_MODE = 0o660
_OPERATORS_MODE = 0o600


class GrpcServer:
    """Serves a dispatcher over gRPC, on a thread and an asyncio loop of its own.

    `tcp_address` is "host:port", port 0 for any free one. With `unix_path` there is also the
    operators' socket (`admin_path`, by default beside it). All methods are called on the verbs'
    loop and never block it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        verbs_loop: asyncio.AbstractEventLoop,
        *,
        unix_path: Path | None,
        tcp_address: str | None,
        admin_path: Path | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._verbs = VerbsLoop(verbs_loop)
        self._unix_path = unix_path
        self._tcp_address = tcp_address
        self._admin_path = admin_path
        if admin_path is None and unix_path is not None:
            self._admin_path = admin_socket_path(unix_path)
        self._bounds = Bounds(dispatcher)
        self._health = Health([KVSTORE_SERVICE, ADMIN_SERVICE])
        self._servers: list[grpc.aio.Server] = []
        self._sockets: list[UnixSocket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    # ---- called on the verbs' loop ---------------------------------------------------------------

    async def start(self) -> int | None:
        """Listen and serve; the bound TCP port, if there is one.

        Raises ListenError when an address cannot be used; then nothing is left behind.
        """
        started: concurrent.futures.Future[int | None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="grpc", daemon=True)
        self._thread.start()
        # Shielded: a start that is given up must not take the thread's answer from under it.
        return await asyncio.shield(asyncio.wrap_future(started))

    async def drain(self, grace_s: float) -> bool:
        """Refuse new calls and wait for running ones; whether all ended within `grace_s`."""
        self._dispatcher.start_draining()
        try:
            async with asyncio.timeout(grace_s):
                await self._on_stream_loop(self._quiet())
                await self._dispatcher.idle()
        except TimeoutError:
            _log.warning("calls still running after %.1f s of grace", grace_s)
            return False
        return True

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Close the listeners, cancel what still runs, end the thread. Idempotent.

        Waits at most `timeout_s` for calls to give back what they hold.
        """
        self._dispatcher.start_draining()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._on_stream_loop(self._close())
                await asyncio.wrap_future(self._ended)
                await self._dispatcher.idle()

    async def _on_stream_loop(self, work: Coroutine[object, object, None]) -> None:
        assert self._loop is not None, "start comes first"
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # ---- runs on the stream loop -----------------------------------------------------------------

    def _run(self, started: concurrent.futures.Future[int | None]) -> None:
        keep_freed_frames()
        try:
            # Not uvloop: with grpc.aio it measures no faster, and one C loop fewer may crash.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._main(started))
        except Exception as error:
            _log.exception("the gRPC thread failed")
            if not started.done():
                started.set_exception(error)
        finally:
            self._ended.set_result(None)

    async def _main(self, started: concurrent.futures.Future[int | None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        try:
            port = await self._listen()
        except ListenError as error:
            await self._close_listeners()
            started.set_exception(error)
            return
        self._health.set(serving=True)
        self._bounds.watchdog.look()
        started.set_result(port)
        await self._closing.wait()
        self._bounds.watchdog.stop()
        await self._close_listeners()

    async def _listen(self) -> int | None:
        unix = [(self._unix_path, Transport.UNIX, _ENGINES_MODE)]
        unix.append((self._admin_path, Transport.ADMIN, _OPERATORS_MODE))
        for path, transport, mode in unix:
            if path is not None:
                socket = UnixSocket(path, mode)
                self._sockets.append(socket)
                self._bind(transport, socket.address)
        port = None
        if self._tcp_address is not None:
            port = self._bind(Transport.TCP, self._tcp_address)
        for server in self._servers:
            await server.start()
        for socket in reversed(self._sockets):
            socket.publish()  # operators' first: whoever finds the engines' must find theirs
        return port

    def _bind(self, transport: Transport, address: str) -> int:
        limits = self._dispatcher.limits
        server = grpc.aio.server(
            options=_options(limits),
            maximum_concurrent_rpcs=_transport_bound(limits),
        )
        calls = Calls(self._dispatcher, self._verbs, transport, self._bounds)
        server.add_generic_rpc_handlers([*calls.handlers(), self._health.handler()])
        self._servers.append(server)
        try:
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {address}: {error}", "set another address"
            ) from error

    async def _quiet(self) -> None:
        self._health.set(serving=False)
        self._bounds.watchdog.look()
        await self._bounds.calls.idle()
        await self._bounds.streams.idle()

    async def _close(self) -> None:
        self._health.set(serving=False)
        self._closing.set()

    async def _close_listeners(self) -> None:
        for socket in self._sockets:
            socket.remove()
        await asyncio.gather(*(server.stop(grace=None) for server in self._servers))


def _transport_bound(limits: Limits) -> int:
    """Calls that gRPC lets in: far above our own bounds, which answer with a retry hint."""
    return 2 * (limits.max_running_calls + limits.max_running_streams) + 64


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        # Above the frame limit, so that a frame over it is refused by us, with a typed error.
        ("grpc.max_receive_message_length", 2 * limits.max_frame_bytes + (1 << 20)),
        ("grpc.max_send_message_length", _MAX_REPLY_BYTES),
        ("grpc.max_concurrent_streams", _transport_bound(limits)),
        # A second daemon on the same port must fail, not share it.
        ("grpc.so_reuseport", 0),
        # A dead peer's leases end although no byte says so.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
