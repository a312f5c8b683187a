"""Steps over grpc's blocking API, for KVClient.

Chosen over grpc.aio in a thread by measurement (docs/client.md): the same rate for 1 MiB frames, no
thread to hop to for a small call, and only this API can be made to survive a fork. Get uses grpc's
single-threaded stream: the calling thread reads, verifies and copies; nobody else ever writes to
the caller's memory, so that nothing is written after the call returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import Message

from kvstored_client.failures import CANCELLED, NOT_LOCAL, Failure, GarbageError
from kvstored_client.proto import methods
from kvstored_client.steps import Answer, Download, Sender, Step, Unary, Upload
from kvstored_client.stopping import StopFlag
from kvstored_client.transports import fork
from kvstored_client.transports.channel import (
    CHANNEL_OPTIONS,
    CLIENT_CLOSED,
    DEADLINE_PASSED,
    ENDED_EARLY,
    failure_of_status,
    metadata_of,
)
from kvstored_client.transports.grpc_types import (
    BlockingCall,
    BlockingChannel,
    BlockingReply,
    Status,
    blocking_channel,
)

_FORK_GRACE_S = 0.05
_FORK_LIMIT_S = 2.0
_OPTIONS = [*CHANNEL_OPTIONS, ("SingleThreadedUnaryStream", 1)]


@dataclass(slots=True, eq=False)
class _Running:
    """One attempt at a step. `interrupted`: a fork ended it; run it again."""

    interrupted: bool = False


class BlockingTransport:
    """Runs steps, from any number of threads. Connects with the first one."""

    def __init__(self, target: str, token: str | None) -> None:
        self._target = target
        self._metadata = metadata_of(token)
        self._channel: BlockingChannel | None = None
        self._closed = False
        self._standstill = False
        self._running: set[_Running] = set()
        self._changed = threading.Condition()
        fork.join(self)

    def run(self, step: Step, stop: StopFlag | None = None) -> Answer:
        """Run one step to its end; at the latest at its deadline. Never raises for the peer.

        `stop`, when it is set, ends the step soon as Failure CANCELLED; what had come whole before
        is answered all the same.
        """
        unwatch = stop.on_set(self._look_again) if stop is not None else None
        try:
            return self._run(step, stop)
        finally:
            if unwatch is not None:
                unwatch()

    def _run(self, step: Step, stop: StopFlag | None) -> Answer:
        while True:
            running = _Running()
            channel = self._enter(running, step.deadline, stop)
            if isinstance(channel, Failure):
                return channel
            try:
                answer = self._attempt(channel, step, stop)
            finally:
                del channel  # whoever waits to go on must not keep grpc from shutting down
                self._leave(running)
            if not isinstance(answer, Failure):
                return answer
            if stop is not None and stop.is_set():
                return CANCELLED
            if self._closed:
                return CLIENT_CLOSED
            if not running.interrupted:
                return answer

    def close(self) -> None:
        """End running steps (they fail as CLOSED) and the connection."""
        with self._changed:
            self._closed = True
            channel, self._channel = self._channel, None
            self._changed.notify_all()
        if channel is not None:
            channel.close()

    # ---- calls in and out ------------------------------------------------------------------------

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _enter(
        self, running: _Running, deadline: float, stop: StopFlag | None
    ) -> BlockingChannel | Failure:
        with self._changed:
            while self._standstill and not self._closed and not (stop and stop.is_set()):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return DEADLINE_PASSED
            if stop is not None and stop.is_set():
                return CANCELLED
            if self._closed:
                return CLIENT_CLOSED
            if time.monotonic() >= deadline:
                return DEADLINE_PASSED
            if self._channel is None:
                self._channel = blocking_channel(self._target, _OPTIONS)
                fork.register_hooks()
            self._running.add(running)
            return self._channel

    def _leave(self, running: _Running) -> None:
        with self._changed:
            self._running.discard(running)
            self._changed.notify_all()

    # ---- fork ------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """See fork.ForkAware."""
        end = time.monotonic() + _FORK_GRACE_S
        with self._changed:
            self._standstill = True
            while self._running and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            for running in self._running:
                running.interrupted = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        del channel
        end = time.monotonic() + _FORK_LIMIT_S
        with self._changed:
            while self._running and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def after_fork_in_parent(self) -> None:
        """See fork.ForkAware."""
        with self._changed:
            self._standstill = False
            self._changed.notify_all()

    def after_fork_in_child(self) -> None:
        """See fork.ForkAware."""
        self._changed = threading.Condition()
        self._running = set()
        self._standstill = False

    # ---- the three kinds of steps ----------------------------------------------------------------

    def _attempt(self, channel: BlockingChannel, step: Step, stop: StopFlag | None) -> Answer:
        try:
            if isinstance(step, Unary):
                return self._unary(channel, step, stop)
            if isinstance(step, Download):
                return self._download(channel, step, stop)
            if isinstance(step, Upload):
                return self._upload(channel, step, stop)
            return NOT_LOCAL
        except grpc.FutureCancelledError:
            return CANCELLED
        except grpc.RpcError as error:
            return _failure(error)
        except GarbageError as error:
            return error.failure()
        except ValueError as error:
            # grpc's way of saying that the channel was closed under the call.
            if "closed channel" not in str(error):
                raise
            return CLIENT_CLOSED

    def _unary(self, channel: BlockingChannel, step: Unary, stop: StopFlag | None) -> Message:
        call = channel.unary_unary(
            step.method.path,
            request_serializer=step.method.request_serializer,
            response_deserializer=step.method.reply_deserializer,
        )
        if stop is None:
            return call(step.request, timeout=_left(step.deadline), metadata=self._metadata)
        # Only for steps that may be stopped: grpc takes a thread more for a call with a handle.
        reply = call.future(step.request, timeout=_left(step.deadline), metadata=self._metadata)
        with _cancelling(reply, stop):
            return reply.result()

    def _download(
        self, channel: BlockingChannel, step: Download, stop: StopFlag | None
    ) -> Failure | None:
        receiver = step.receiver
        receiver.restart()
        call = channel.unary_stream(
            methods.GET.path, request_serializer=methods.GET.request_serializer
        )(step.request, timeout=_left(step.deadline), metadata=self._metadata)
        feed = receiver.feed
        try:
            with _cancelling(call, stop):
                for message in call:
                    feed(message)
        except grpc.RpcError as error:
            # What was verified stays so, however the call ends.
            failure = _failure(error)
            return None if receiver.done else failure
        finally:
            call.cancel()  # of no effect on a call that has ended
        return None if receiver.done else ENDED_EARLY

    def _upload(
        self, channel: BlockingChannel, step: Upload, stop: StopFlag | None
    ) -> Failure | None:
        # Here and not in grpc's thread: the header hashes the caller's memory.
        outgoing = _Outgoing(step.sender.header(), step.sender)
        call = channel.stream_stream(methods.PUT.path)(
            iter(outgoing), timeout=_left(step.deadline), metadata=self._metadata
        )
        try:
            with _cancelling(call, stop):
                plan = next(call, None)
                if plan is None:
                    return ENDED_EARLY
                step.sender.plan(plan)
                outgoing.go_on()
                reply = next(call, None)
                if reply is None:
                    return ENDED_EARLY
                step.sender.finish(reply)
                if next(call, None) is not None:
                    raise GarbageError("more came after the last answer")
        finally:
            outgoing.stop()
            call.cancel()
        return None


class _Outgoing:
    """The messages of one upload, drawn by a thread of grpc's."""

    def __init__(self, header: bytes, sender: Sender) -> None:
        self._header = header
        self._sender = sender
        self._planned = threading.Event()
        self._stopped = False

    def __iter__(self) -> Iterator[bytes]:
        yield self._header
        self._planned.wait()
        if not self._stopped:
            yield from self._sender.frames()

    def go_on(self) -> None:
        """The plan is there."""
        self._planned.set()

    def stop(self) -> None:
        """The call has ended: let grpc's thread go, and read no memory of the caller any more."""
        self._stopped = True
        self._sender.stop()
        self._planned.set()


@contextlib.contextmanager
def _cancelling(call: BlockingCall | BlockingReply, stop: StopFlag | None) -> Iterator[None]:
    """Meanwhile `stop` ends the call, and this thread's wait for it."""
    if stop is None:
        yield
        return
    forget = stop.on_set(lambda: _cancel(call))
    try:
        yield
    finally:
        forget()


def _cancel(call: BlockingCall | BlockingReply) -> None:
    call.cancel()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _failure(error: grpc.RpcError) -> Failure:
    # grpc raises objects that are RpcError and Call at once.
    failure = failure_of_status(cast("Status", error))
    # Such a call is in its own traceback; as a cycle it would keep the channel for a while.
    error.__traceback__ = None
    return failure
