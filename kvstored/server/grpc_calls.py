"""gRPC calls of one listener: from wire bytes to the dispatcher and back. On the stream loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvstored.errors import BadRequest, Truncated, Unimplemented
from kvstored.server import frames
from kvstored.server.auth import Caller, Transport
from kvstored.server.bridge import Admission, VerbsLoop
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.grpc_peer import Context, Peer
from kvstored.server.payload_calls import GetCall, PutCall
from kvstored.server.watch import Waits, Watchdog, Watched
from kvstored.store.api import Grant, PutTicket, Received
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

_log = logging.getLogger(__name__)
_Handler = Callable[[bytes, Context], Awaitable[bytes]]
_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_MAX_TOKEN_BYTES = 4096
_LATE_PUT = (
    "the payload did not arrive before the deadline",
    "nothing of this put was stored; put fewer chunks per call or allow more time",
)


class Bounds:
    """Counters, and a watchdog, that all listeners of a daemon share."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        limits = dispatcher.limits
        self.calls = Admission(limits.max_running_calls, "calls", limits.retry_after_ms)
        self.streams = Admission(
            limits.max_running_streams, "payload streams", limits.retry_after_ms
        )
        self.watchdog = Watchdog(limits.stall_timeout_s, lambda: dispatcher.draining)


class Calls:
    """Handlers of both services for one transport."""

    def __init__(
        self, dispatcher: Dispatcher, verbs: VerbsLoop, transport: Transport, bounds: Bounds
    ) -> None:
        self._dispatcher = dispatcher
        self._verbs = verbs
        self._transport = transport
        self._bounds = bounds

    def handlers(self) -> list[grpc.GenericRpcHandler[bytes, bytes]]:
        """Both services, ready to add to a server."""
        d = self._dispatcher
        table = {
            methods.GET: grpc.unary_stream_rpc_method_handler(self._get),
            methods.PUT: grpc.stream_stream_rpc_method_handler(self._put),
            methods.HELLO: self._unary(pb.HelloRequest, d.hello),
            methods.MATCH: self._unary(pb.MatchRequest, d.match),
            methods.TOUCH: self._unary(pb.TouchRequest, d.touch),
            methods.DELETE: self._unary(pb.DeleteRequest, d.delete, Waits.OUTCOME),
            methods.PREFETCH: self._unary(pb.PrefetchRequest, d.prefetch),
            methods.PIN: self._unary(pb.PinRequest, d.pin),
            methods.UNPIN: self._unary(pb.UnpinRequest, d.unpin),
            methods.LIST: self._unary(pb.ListRequest, d.list),
            methods.USAGE: self._unary(pb.UsageRequest, d.usage),
            methods.STATUS: self._unary(admin.StatusRequest, d.status),
            methods.LIST_VOLUMES: self._unary(admin.ListVolumesRequest, d.operators.list_volumes),
            methods.DRAIN_VOLUME: self._unary(
                admin.DrainVolumeRequest, d.operators.drain_volume, Waits.OUTCOME
            ),
            methods.SCRUB: self._unary(admin.ScrubRequest, d.operators.scrub),
            methods.PURGE: self._unary(admin.PurgeRequest, d.operators.purge, Waits.OUTCOME),
            methods.ACQUIRE: grpc.unary_stream_rpc_method_handler(_unimplemented),
            methods.RESERVE: grpc.unary_unary_rpc_method_handler(_unimplemented),
            methods.COMMIT: grpc.unary_unary_rpc_method_handler(_unimplemented),
            methods.RELEASE: grpc.unary_unary_rpc_method_handler(_unimplemented),
        }
        services: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
        for method, handler in table.items():
            services.setdefault(method.service, {})[method.name] = handler
        return [grpc.method_handlers_generic_handler(s, h) for s, h in services.items()]

    # ---- what every call shares ------------------------------------------------------------------

    def _caller(self, context: Context) -> Caller:
        now = time.monotonic()
        remaining: float | None = context.time_remaining()
        return Caller(
            transport=self._transport,
            token=_token(context),
            peer=context.peer(),
            deadline=float("inf") if remaining is None else now + remaining,
            started=now,
        )

    def _unary(
        self,
        request_class: type[_Request],
        verb: Callable[[_Request, Caller], Coroutine[object, object, _Reply]],
        waits: Waits = Waits.STORE,
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def handle(raw: bytes, context: Context) -> bytes:
            try:
                with self._bounds.calls.slot(), self._bounds.watchdog.watch(waits):
                    request = _parse(request_class, raw)
                    reply = await self._verbs.run(verb(request, self._caller(context)))
                    return reply.SerializeToString()
            except Exception as error:
                await Peer(context).end(error)

        return grpc.unary_unary_rpc_method_handler(handle)

    # ---- Get -------------------------------------------------------------------------------------

    async def _get(self, raw: bytes, context: Context) -> None:
        peer = Peer(context)
        try:
            with self._bounds.streams.slot():
                await self._get_admitted(raw, peer)
        except grpc.aio.InternalError:
            _log.debug("the peer of a get is gone")
        except Exception as error:
            await peer.end(error)

    async def _get_admitted(self, raw: bytes, peer: Peer) -> None:
        request = _parse(pb.GetRequest, raw)
        call = GetCall(self._dispatcher, self._caller(peer.context))
        try:
            with self._bounds.watchdog.watch() as watched:
                end, grants = await self._verbs.run(call.begin(request))
                watched.until(_loop_time(end), "the reader was too slow for the deadline")
                await self._send(call, grants, peer, watched)
        except BaseException as error:
            self._verbs.spawn(call.close(_as_seen_by_the_call(error)))
            raise
        self._verbs.spawn(call.close())

    async def _send(
        self, call: GetCall, grants: list[Grant] | None, peer: Peer, watched: Watched
    ) -> None:
        while call.final_states is None:
            # The next grants are looked up while these are sent: the socket never runs dry.
            ahead = self._verbs.start(call.next())
            try:
                watched.waits = Waits.PEER
                for block in frames.blocks(grants or ()):
                    await _write_block(peer, watched, block, pb.GetBlock())
                    call.delivered(block)
                watched.waits = Waits.STORE
                grants = await ahead
            finally:
                ahead.cancel()
        watched.waits = Waits.PEER
        *others, last = [*frames.blocks(grants or ())] or [()]
        for block in others:
            await _write_block(peer, watched, block, pb.GetBlock())
            call.delivered(block)
        last_head = pb.GetBlock(last=True, states=call.final_states)
        await _write_block(peer, watched, last, last_head)
        call.delivered(last)

    # ---- Put -------------------------------------------------------------------------------------

    async def _put(self, _requests: object, context: Context) -> None:
        peer = Peer(context)
        try:
            await self._put_watched(peer)
        except grpc.aio.InternalError:
            _log.debug("the peer of a put is gone")
        except Exception as error:
            await peer.end(error)

    async def _put_watched(self, peer: Peer) -> None:
        caller = self._caller(peer.context)
        call = PutCall(self._dispatcher, caller)
        try:
            with self._bounds.watchdog.watch(Waits.PEER) as watched:
                end = min(caller.deadline, caller.started + self._dispatcher.limits.max_call_s)
                watched.until(_loop_time(end), *_LATE_PUT)
                # Nobody knows yet whose put this is: it holds no stream that others may need.
                first = await _read(peer.context)
                if first is None:
                    raise Truncated(
                        "the stream ended before its PutHeader", "send a PutHeader first"
                    )
                with self._bounds.streams.slot():
                    await self._receive(call, first, peer, watched)
        except BaseException as error:
            self._verbs.spawn(call.close(_as_seen_by_the_call(error)))
            raise
        self._verbs.spawn(call.close())

    async def _receive(self, call: PutCall, first: bytes, peer: Peer, watched: Watched) -> None:
        watched.moves += 1
        watched.waits = Waits.STORE
        plan = await self._verbs.run(call.plan(_parse(pb.PutHeader, first)))
        watched.until(_loop_time(plan.deadline), *_LATE_PUT)
        watched.waits = Waits.PEER
        received = await self._receive_payload(plan.ticket, peer, watched)
        watched.waits = Waits.OUTCOME
        states = await self._verbs.run(call.commit(received))
        watched.waits = Waits.PEER
        watched.moves += 1
        await peer.write(pb.PutReply(states=states).SerializeToString())

    async def _receive_payload(
        self, ticket: PutTicket, peer: Peer, watched: Watched
    ) -> list[Received]:
        most = self._dispatcher.limits.max_frame_bytes
        joiner = frames.FrameJoiner(ticket.wanted, most)
        try:
            reply = pb.PutPlan(
                states=bytes(ticket.states),
                payload_bytes=joiner.expected_bytes,
                max_frame_bytes=most,
            )
            await peer.write(reply.SerializeToString())
            while (frame := await _read(peer.context)) is not None:
                watched.moves += 1
                joiner.add(frame)
            return joiner.finish()
        finally:
            # Before the ticket ends: the store cannot give back memory that is still viewed.
            joiner.let_go()


def _as_seen_by_the_call(error: BaseException) -> BaseException:
    # That a message could not be sent is how gRPC says, now and then, that the peer is gone.
    return asyncio.CancelledError() if isinstance(error, grpc.aio.InternalError) else error


async def _write_block(
    peer: Peer, watched: Watched, block: Sequence[Grant], extra: pb.GetBlock
) -> None:
    head = frames.head(block)
    head.MergeFrom(extra)
    watched.moves += 1
    await peer.write(head.SerializeToString())
    write = peer.context.write
    for frame in frames.frames(block):
        watched.moves += 1
        await write(frame)


def _parse(message: type[_Request], raw: bytes) -> _Request:
    try:
        return message.FromString(raw)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise BadRequest(f"{len(raw)} bytes are not a {name}", f"send a {name}") from error


def _token(context: Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == methods.AUTHORIZATION_METADATA:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            # A value that is not a bearer token is a wrong token, not an absent one.
            return text.removeprefix(methods.BEARER_PREFIX)[:_MAX_TOKEN_BYTES]
    return None


def _loop_time(monotonic: float) -> float:
    return asyncio.get_running_loop().time() + (monotonic - time.monotonic())


async def _read(context: Context) -> bytes | None:
    message = await context.read()
    return message if isinstance(message, bytes) else None


async def _unimplemented(_request: bytes, context: Context) -> NoReturn:
    await Peer(context).end(
        Unimplemented("same-node access is not served over gRPC", "use Get and Put")
    )
