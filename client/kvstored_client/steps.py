"""What a verb asks of its transport, as values: the seam between planning and I/O.

A verb is a generator (`Verb`): it yields steps, is sent their answers, and returns its result. It
never waits and never touches a socket, so that one body serves the blocking and the asyncio client.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, cast

from google.protobuf.message import Message

from kvstored_client.failures import Failure, GarbageError
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import Method

_Result = TypeVar("_Result")
_Reply = TypeVar("_Reply", bound=Message)


class Receiver(Protocol):
    """Takes the messages of one download."""

    @property
    def done(self) -> bool:
        """Whether the last block was taken whole."""

    def feed(self, message: bytes) -> None:
        """Take the next message. Raises GarbageError."""

    def restart(self) -> None:
        """The step is run again from its beginning."""


class Sender(Protocol):
    """Gives the messages of one upload and takes its answers."""

    def header(self) -> bytes:
        """The first message; asked for again if the step is run again."""

    def plan(self, message: bytes) -> None:
        """Take the daemon's first answer. Raises GarbageError."""

    def frames(self) -> Iterator[bytes]:
        """The payload."""

    def finish(self, message: bytes) -> None:
        """Take the daemon's last answer. Raises GarbageError."""

    def stop(self) -> None:
        """From now on no memory of the caller is read."""


@dataclass(frozen=True, slots=True)
class Unary:
    """One request, one reply. `deadline`: time.monotonic()."""

    method: Method
    request: Message
    deadline: float


@dataclass(frozen=True, slots=True)
class Download:
    """One Get. The answer is None: what came is in the receiver, whether or not it failed."""

    request: pb.GetRequest
    receiver: Receiver
    deadline: float


@dataclass(frozen=True, slots=True)
class Upload:
    """One Put. The answer is None: the outcome is in the sender."""

    sender: Sender
    deadline: float


Step: TypeAlias = Unary | Download | Upload
Answer: TypeAlias = Message | Failure | None
Verb: TypeAlias = Generator[Step, Answer, _Result]


def ask(
    method: Method, request: Message, reply: type[_Reply], deadline: float
) -> Verb[_Reply | Failure]:
    """A unary step; the answer as its type."""
    answer = yield Unary(method, request, deadline)
    if isinstance(answer, Failure):
        return answer
    if not isinstance(answer, reply):
        return GarbageError(f"{method.name} was not answered with a {reply.__name__}").failure()
    return answer


def run(step: Download | Upload) -> Verb[Failure | None]:
    """A payload step."""
    return cast("Failure | None", (yield step))


def remaining_ms(deadline: float) -> int:
    """What Context.deadline_ms carries; at least 1, since 0 means none."""
    return max(1, int((deadline - time.monotonic()) * 1000))
