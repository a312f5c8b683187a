"""Steps over grpc.aio, for AsyncKVClient.

Frames are verified and copied on the event loop, one at a time, each at most as large as the daemon
makes them (about 1 MiB, a fraction of a millisecond). All writes to the caller's memory happen
between two awaits of the verb itself: a verb that has returned or was cancelled writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvstored_client.failures import NOT_LOCAL, Failure, GarbageError
from kvstored_client.proto import methods
from kvstored_client.steps import Answer, Download, Sender, Step, Unary, Upload
from kvstored_client.transports.channel import (
    CHANNEL_OPTIONS,
    CLIENT_CLOSED,
    CUT_SHORT,
    DEADLINE_PASSED,
    ENDED_EARLY,
    failure_of_status,
    metadata_of,
)
from kvstored_client.transports.grpc_types import AsyncCall, AsyncChannel, Status, async_channel


class AsyncTransport:
    """Runs steps of any number of tasks of one event loop. Connects with the first one."""

    def __init__(self, target: str, token: str | None) -> None:
        self._target = target
        self._metadata = metadata_of(token)
        self._channel: AsyncChannel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def run(self, step: Step) -> Answer:
        """Run one step to its end; at the latest at its deadline. Never raises for the peer."""
        if self._closed:
            return CLIENT_CLOSED
        if time.monotonic() >= step.deadline:
            return DEADLINE_PASSED
        channel = self._connected()
        try:
            if isinstance(step, Unary):
                return await self._unary(channel, step)
            if isinstance(step, Download):
                return await self._download(channel, step)
            if isinstance(step, Upload):
                return await self._upload(channel, step)
            return NOT_LOCAL
        except grpc.aio.AioRpcError as error:
            return CLIENT_CLOSED if self._was_closed() else _failure(error)
        except GarbageError as error:
            return error.failure()
        except (grpc.aio.UsageError, asyncio.CancelledError):
            # Closing the channel cancels its calls; that is not the caller's cancellation.
            if _cancelling() or not self._was_closed():
                raise
            return CLIENT_CLOSED

    async def close(self) -> None:
        """End running steps (they fail as CLOSED) and the connection."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None and self._loop is asyncio.get_running_loop():
            await channel.close()

    def _was_closed(self) -> bool:
        return self._closed

    def _connected(self) -> AsyncChannel:
        loop = asyncio.get_running_loop()
        if self._channel is None or self._loop is not loop:
            # A channel belongs to its loop; with another loop (asyncio.run again) begins a new one.
            self._channel = async_channel(self._target, CHANNEL_OPTIONS)
            self._loop = loop
        return self._channel

    async def _unary(self, channel: AsyncChannel, step: Unary) -> Message:
        call = channel.unary_unary(
            step.method.path,
            request_serializer=step.method.request_serializer,
            response_deserializer=step.method.reply_deserializer,
        )
        return await call(step.request, timeout=_left(step.deadline), metadata=self._metadata)

    async def _download(self, channel: AsyncChannel, step: Download) -> Failure | None:
        receiver = step.receiver
        receiver.restart()
        call = channel.unary_stream(
            methods.GET.path, request_serializer=methods.GET.request_serializer
        )(step.request, timeout=_left(step.deadline), metadata=self._metadata)
        try:
            while isinstance(message := await call.read(), bytes):
                receiver.feed(message)
        except grpc.aio.AioRpcError as error:
            # What was verified stays so, however the call ends.
            return None if receiver.done else _failure(error)
        finally:
            call.cancel()  # of no effect on a call that has ended
        return None if receiver.done else ENDED_EARLY

    async def _upload(self, channel: AsyncChannel, step: Upload) -> Failure | None:
        sender = step.sender
        call = channel.stream_stream(methods.PUT.path)(
            timeout=_left(step.deadline), metadata=self._metadata
        )
        try:
            await call.write(sender.header())
            plan = await call.read()
            if not isinstance(plan, bytes):
                return ENDED_EARLY
            sender.plan(plan)
            failure = await _send(call, sender)
            if failure is not None:
                return failure
            reply = await call.read()
            if not isinstance(reply, bytes):
                return ENDED_EARLY
            sender.finish(reply)
            if isinstance(await call.read(), bytes):
                raise GarbageError("more came after the last answer")
        finally:
            sender.stop()
            call.cancel()
        return None


async def _send(call: AsyncCall, sender: Sender) -> Failure | None:
    try:
        for frame in sender.frames():
            await call.write(frame)
        await call.done_writing()
    except asyncio.InvalidStateError:
        # The call has ended; its status says why.
        return failure_of_status(await _status(call))
    except grpc.aio.AioRpcError as error:
        # A write that fails because the daemon ended the call hides the daemon's own status.
        if error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata():
            return CUT_SHORT
        raise
    return None


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    return failure_of_status(cast("Status", error))


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a call ended, waited for."""

    status: grpc.StatusCode
    text: str
    trailers: Sequence[tuple[str, str | bytes]]

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self.trailers


async def _status(call: AsyncCall) -> Status:
    return _Ended(await call.code(), await call.details(), await call.trailing_metadata())
