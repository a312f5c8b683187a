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

from kvstored.errors import (
    BadRequest,
    DeadlineExceeded,
    KvstoredError,
    Truncated,
    Unimplemented,
)
from kvstored.server import frames
from kvstored.server.auth import Caller, Transport
from kvstored.server.bridge import Admission, VerbsLoop
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.grpc_status import status_code, trailer
from kvstored.server.payload_calls import GetCall, PutCall
from kvstored.store.api import Grant
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Callable[[bytes, _Context], Awaitable[bytes]]
_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_MAX_TOKEN_BYTES = 4096


class Bounds:
    """Counters that all listeners of a daemon share."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        limits = dispatcher.limits
        self.calls = Admission(limits.max_running_calls, "calls", limits.retry_after_ms)
        self.streams = Admission(
            limits.max_running_streams, "payload streams", limits.retry_after_ms
        )


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
            methods.DELETE: self._unary(pb.DeleteRequest, d.delete),
            methods.PREFETCH: self._unary(pb.PrefetchRequest, d.prefetch),
            methods.PIN: self._unary(pb.PinRequest, d.pin),
            methods.UNPIN: self._unary(pb.UnpinRequest, d.unpin),
            methods.LIST: self._unary(pb.ListRequest, d.list),
            methods.USAGE: self._unary(pb.UsageRequest, d.usage),
            methods.STATUS: self._unary(admin.StatusRequest, d.status),
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

    def _caller(self, context: _Context) -> Caller:
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
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def handle(raw: bytes, context: _Context) -> bytes:
            try:
                with self._bounds.calls.slot():
                    request = _parse(request_class, raw)
                    reply = await self._verbs.run(verb(request, self._caller(context)))
                    return reply.SerializeToString()
            except Exception as error:
                await _abort(context, error)

        return grpc.unary_unary_rpc_method_handler(handle)

    # ---- Get -------------------------------------------------------------------------------------

    async def _get(self, raw: bytes, context: _Context) -> None:
        try:
            with self._bounds.streams.slot():
                await self._get_admitted(raw, context)
        except grpc.aio.InternalError:
            _log.debug("the peer of a get is gone")
        except Exception as error:
            await _abort(context, error)

    async def _get_admitted(self, raw: bytes, context: _Context) -> None:
        request = _parse(pb.GetRequest, raw)
        call = GetCall(self._dispatcher, self._caller(context))
        failure: BaseException | None = None
        try:
            end, grants = await self._verbs.run(call.begin(request))
            async with _until(end):
                await self._send(call, grants, context)
        except TimeoutError:
            failure = DeadlineExceeded("the reader was too slow for the deadline")
            raise failure from None
        except BaseException as error:
            failure = _as_seen_by_the_call(error)
            raise
        finally:
            self._verbs.spawn(call.close(failure))

    async def _send(self, call: GetCall, grants: list[Grant] | None, context: _Context) -> None:
        while call.final_states is None:
            # The next grants are looked up while these are sent: the socket never runs dry.
            ahead = self._verbs.start(call.next())
            try:
                for block in frames.blocks(grants or ()):
                    await _write_block(context, block, pb.GetBlock())
                    call.delivered(block)
                grants = await ahead
            finally:
                ahead.cancel()
        *others, last = [*frames.blocks(grants or ())] or [()]
        for block in others:
            await _write_block(context, block, pb.GetBlock())
            call.delivered(block)
        await _write_block(context, last, pb.GetBlock(last=True, states=call.final_states))
        call.delivered(last)

    # ---- Put -------------------------------------------------------------------------------------

    async def _put(self, _requests: object, context: _Context) -> None:
        try:
            with self._bounds.streams.slot():
                await self._put_admitted(context)
        except grpc.aio.InternalError:
            _log.debug("the peer of a put is gone")
        except Exception as error:
            await _abort(context, error)

    async def _put_admitted(self, context: _Context) -> None:
        caller = self._caller(context)
        call = PutCall(self._dispatcher, caller)
        failure: BaseException | None = None
        try:
            end = min(caller.deadline, caller.started + self._dispatcher.limits.max_call_s)
            async with _until(end) as until:
                await self._receive(call, context, until)
        except TimeoutError:
            failure = DeadlineExceeded(
                "the payload did not arrive before the deadline",
                "nothing of this put was stored; put fewer chunks per call or allow more time",
            )
            raise failure from None
        except BaseException as error:
            failure = _as_seen_by_the_call(error)
            raise
        finally:
            self._verbs.spawn(call.close(failure))

    async def _receive(self, call: PutCall, context: _Context, until: asyncio.Timeout) -> None:
        first = await _read(context)
        if first is None:
            raise Truncated("the stream ended before its PutHeader", "send a PutHeader first")
        plan = await self._verbs.run(call.plan(_parse(pb.PutHeader, first)))
        until.reschedule(_loop_time(plan.deadline))
        most = self._dispatcher.limits.max_frame_bytes
        joiner = frames.FrameJoiner(plan.ticket.wanted, most)
        try:
            reply = pb.PutPlan(
                states=bytes(plan.ticket.states),
                payload_bytes=joiner.expected_bytes,
                max_frame_bytes=most,
            )
            await context.write(reply.SerializeToString())
            while (frame := await _read(context)) is not None:
                joiner.add(frame)
            received = joiner.finish()
        finally:
            joiner.let_go()
        states = await self._verbs.run(call.commit(received))
        await context.write(pb.PutReply(states=states).SerializeToString())


def _as_seen_by_the_call(error: BaseException) -> BaseException:
    # That a message could not be sent is how gRPC says, now and then, that the peer is gone.
    return asyncio.CancelledError() if isinstance(error, grpc.aio.InternalError) else error


async def _write_block(context: _Context, block: Sequence[Grant], extra: pb.GetBlock) -> None:
    head = frames.head(block)
    head.MergeFrom(extra)
    await context.write(head.SerializeToString())
    for frame in frames.frames(block):
        await context.write(frame)


def _parse(message: type[_Request], raw: bytes) -> _Request:
    try:
        return message.FromString(raw)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise BadRequest(f"{len(raw)} bytes are not a {name}", f"send a {name}") from error


def _token(context: _Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == methods.AUTHORIZATION_METADATA:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            # A value that is not a bearer token is a wrong token, not an absent one.
            return text.removeprefix(methods.BEARER_PREFIX)[:_MAX_TOKEN_BYTES]
    return None


def _loop_time(monotonic: float) -> float:
    return asyncio.get_running_loop().time() + (monotonic - time.monotonic())


def _until(monotonic: float) -> asyncio.Timeout:
    return asyncio.timeout_at(_loop_time(monotonic))


async def _read(context: _Context) -> bytes | None:
    message = await context.read()
    return message if isinstance(message, bytes) else None


async def _abort(context: _Context, error: Exception) -> NoReturn:
    """End the call with the error's status and trailer; an unexpected one is logged."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, KvstoredError):
        known = error
    else:
        _log.error("a call failed", exc_info=error)
        known = KvstoredError("internal error", "see the daemon's log")
    await context.abort(status_code(known), str(known), trailer(known))


async def _unimplemented(_request: bytes, context: _Context) -> NoReturn:
    await _abort(
        context, Unimplemented("same-node access is not served over gRPC", "use Get and Put")
    )
