"""Steps over grpc's blocking API, for KVClient.

Chosen over grpc.aio in a thread by measurement (docs/client.md): the same rate for 1 MiB frames, no
thread to hop to for a small call, and only this API can be made to survive a fork. Get uses grpc's
single-threaded stream: the calling thread reads, verifies and copies; nobody else ever writes to
the caller's memory, so that nothing is written after the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import Message

from kvstored_client.failures import Failure, GarbageError
from kvstored_client.proto import methods
from kvstored_client.steps import Answer, Download, Sender, Step, Unary, Upload
from kvstored_client.transports import fork
from kvstored_client.transports.channel import (
    CHANNEL_OPTIONS,
    CLIENT_CLOSED,
    DEADLINE_PASSED,
    ENDED_EARLY,
    failure_of_status,
    metadata_of,
)
from kvstored_client.transports.grpc_types import BlockingChannel, Status, blocking_channel

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

    def run(self, step: Step) -> Answer:
        """Run one step to its end; at the latest at its deadline. Never raises for the peer."""
        while True:
            running = _Running()
            channel = self._enter(running, step.deadline)
            if isinstance(channel, Failure):
                return channel
            try:
                answer = self._attempt(channel, step)
            finally:
                del channel  # whoever waits to go on must not keep grpc from shutting down
                self._leave(running)
            if not isinstance(answer, Failure):
                return answer
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

    def _enter(self, running: _Running, deadline: float) -> BlockingChannel | Failure:
        with self._changed:
            while self._standstill and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return DEADLINE_PASSED
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

    def _attempt(self, channel: BlockingChannel, step: Step) -> Answer:
        try:
            if isinstance(step, Unary):
                return self._unary(channel, step)
            if isinstance(step, Download):
                return self._download(channel, step)
            return self._upload(channel, step)
        except grpc.RpcError as error:
            return _failure(error)
        except GarbageError as error:
            return error.failure()
        except ValueError as error:
            # grpc's way of saying that the channel was closed under the call.
            if "closed channel" not in str(error):
                raise
            return CLIENT_CLOSED

    def _unary(self, channel: BlockingChannel, step: Unary) -> Message:
        call = channel.unary_unary(
            step.method.path,
            request_serializer=step.method.request_serializer,
            response_deserializer=step.method.reply_deserializer,
        )
        return call(step.request, timeout=_left(step.deadline), metadata=self._metadata)

    def _download(self, channel: BlockingChannel, step: Download) -> Failure | None:
        receiver = step.receiver
        receiver.restart()
        call = channel.unary_stream(
            methods.GET.path, request_serializer=methods.GET.request_serializer
        )(step.request, timeout=_left(step.deadline), metadata=self._metadata)
        feed = receiver.feed
        try:
            for message in call:
                feed(message)
        except grpc.RpcError as error:
            # What was verified stays so, however the call ends.
            failure = _failure(error)
            return None if receiver.done else failure
        finally:
            call.cancel()  # of no effect on a call that has ended
        return None if receiver.done else ENDED_EARLY

    def _upload(self, channel: BlockingChannel, step: Upload) -> Failure | None:
        outgoing = _Outgoing(step.sender)
        call = channel.stream_stream(methods.PUT.path)(
            iter(outgoing), timeout=_left(step.deadline), metadata=self._metadata
        )
        try:
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

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._planned = threading.Event()
        self._stopped = False

    def __iter__(self) -> Iterator[bytes]:
        yield self._sender.header()
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


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _failure(error: grpc.RpcError) -> Failure:
    # grpc raises objects that are RpcError and Call at once.
    failure = failure_of_status(cast("Status", error))
    # Such a call is in its own traceback; as a cycle it would keep the channel for a while.
    error.__traceback__ = None
    return failure
