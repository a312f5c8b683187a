"""Requests by raw keys, which KVClient does not take, over the client's own transport."""

from __future__ import annotations

import time
from typing import TypeVar

from google.protobuf.message import Message

from kvstored.kvctl.selection import Mistake
from kvstored_client.failures import Failure
from kvstored_client.identity import KVFamily
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.proto.methods import Method
from kvstored_client.steps import Download, Receiver, Unary, remaining_ms
from kvstored_client.transports.blocking import BlockingTransport

_Reply = TypeVar("_Reply", bound=Message)


class Wire:
    """One daemon and namespace. All methods raise ServiceError.

    `timeout_s` is for all of a command's requests together.
    """

    def __init__(self, target: str, namespace: str, token: str | None, timeout_s: float) -> None:
        self._transport = BlockingTransport(target, token)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.namespace = namespace

    def renew(self) -> None:
        """Give the requests that follow their whole time again."""
        self._deadline = time.monotonic() + self._timeout_s

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()

    def context(self) -> pb.Context:
        """What every request carries."""
        return pb.Context(request_id="kvctl", deadline_ms=remaining_ms(self._deadline))

    def hello(self, family: KVFamily | None) -> pb.HelloReply:
        """Say Hello; declare a family if there is one."""
        request = pb.HelloRequest(
            ctx=self.context(),
            protocol_version=methods.PROTOCOL_VERSION,
            client="kvctl",
            namespace=self.namespace,
            families=[family.spec()] if family is not None else [],
        )
        return self.ask(methods.HELLO, request, pb.HelloReply)

    def ask(self, method: Method, request: Message, reply: type[_Reply]) -> _Reply:
        """A unary request. Raises Mistake too, for one that no daemon could carry out."""
        answer = self._transport.run(Unary(method, request, self._deadline))
        if isinstance(answer, Failure):
            if answer.code == pb.BAD_REQUEST:
                raise Mistake(answer.detail)
            raise answer.to_exception()
        assert isinstance(answer, reply)
        return answer

    def get(self, request: pb.GetRequest, receiver: Receiver) -> None:
        """A Get."""
        answer = self._transport.run(Download(request, receiver, self._deadline))
        if isinstance(answer, Failure):
            raise answer.to_exception()
