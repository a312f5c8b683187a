"""What a verb asks of its transport, as values: the seam between planning and I/O.

A verb is a generator (`Verb`): it yields steps, is sent their answers, and returns its result. It
never waits and never touches a socket, so that one body serves the blocking and the asyncio client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from google.protobuf.message import Message

from kvstored_client.failures import Failure, GarbageError
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import Method

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstored_client.local.grants import Grant, Granted, Held, Reserved

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


class RowReceiver(Receiver, Protocol):
    """One that can also take a download out of memory that is shared with the daemon."""

    def take_rows(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        addresses: NDArray[np.int64],
        lengths: Sequence[int] | NDArray[np.int64],
        checksums: bytes,
        tiers: bytes,
        stop: Callable[[], bool],
    ) -> bool:
        """Copy objects out of mapped memory, row by row; False if `stop` came true meanwhile.

        Used instead of `feed`. Raises GarbageError.
        """

    def finish(self, states: bytes) -> None:
        """The last rows were taken; one ChunkState per chunk. Raises GarbageError."""


class Sender(Protocol):
    """Gives the messages of one upload and takes its answers."""

    @property
    def wanted_bytes(self) -> int:
        """Payload that the plan asks for."""

    @property
    def copied_ahead_bytes(self) -> int:
        """How much of the payload `copy_ahead` has put in place; after `plan`: that counts."""

    def copy_ahead(self, address: int, nbytes: int) -> None:
        """Before the plan: copy up to `nbytes` to an address of what the payload most likely is."""

    def header(self, announce: bool = True) -> bytes:
        """The first message; asked for again if the step is run again.

        `announce`: with the checksums of what is offered.
        """

    def plan(self, message: bytes) -> None:
        """Take the daemon's first answer. Raises GarbageError."""

    def frames(self) -> Iterator[bytes]:
        """The payload."""

    def copy_to(self, address: int, nbytes: int) -> bool:
        """Copy the next bytes of the payload to an address, instead of `frames`; False, with
        nothing copied, after `stop`.
        """

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
    """One Get. The answer is None: what came is in the receiver, whether or not it failed.

    `chunk_bytes`: most that one chunk of it has, if the request means the same when it is cut
    between any chunks; else 0.
    """

    request: pb.GetRequest
    receiver: Receiver
    deadline: float
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Upload:
    """One Put. The answer is None: the outcome is in the sender."""

    sender: Sender
    deadline: float


@dataclass(frozen=True, slots=True)
class Acquire:
    """One Acquire; the transport chooses the id. The answer is a Granted."""

    request: pb.AcquireRequest
    deadline: float


@dataclass(frozen=True, slots=True)
class Hold:
    """One Match that also protects what it finds; the transport chooses the id. The answer is a
    Held.
    """

    request: pb.MatchRequest
    deadline: float


@dataclass(frozen=True, slots=True)
class Reserve:
    """One Reserve; the transport chooses the id. The answer is a Reserved."""

    request: pb.ReserveRequest
    deadline: float


@dataclass(frozen=True, slots=True)
class Commit:
    """The Commit of a reservation, in its own session. The answer is a PutReply."""

    request: pb.CommitRequest
    grant: Grant
    deadline: float


LocalStep: TypeAlias = Acquire | Hold | Reserve | Commit
"""Steps that only a local session can run; elsewhere they fail as NOT_LOCAL."""

Step: TypeAlias = Unary | Download | Upload | LocalStep
Answer: TypeAlias = "Message | Failure | Granted | Held | Reserved | None"
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
