"""A daemon whose clients stand still: others are served, nothing is lost, and it stops at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from server.serving import MIB, PART_BYTES, Refused, Wire, header, refused, run
from support_daemon import TOKEN, running_daemon

from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods


def code_of(call: Iterator[bytes]) -> int:
    """The error code that a call ends with; 0 where it has another message."""
    try:
        next(call)
    except grpc.RpcError as error:
        return refused(error).error.code
    return 0


def test_stalled_and_late_clients_of_a_daemon() -> None:
    over = threading.Event()

    def stall(first: bytes | None) -> Iterator[bytes]:
        if first is not None:
            yield first
        over.wait()

    with running_daemon() as daemon:
        wire, other = Wire(daemon.target), Wire(daemon.target, TOKEN)
        wire.hello()
        other.hello(namespace="locked")
        wire.put(header(512), [bytes(MIB)] * (512 * PART_BYTES // MIB))
        put = wire.channel.stream_stream(methods.PUT.path)
        heads = [header(1, salt=bytes([i])).SerializeToString() for i in range(64)]
        headless = [put(stall(None)) for _ in range(64)]  # nobody knows whose they are
        stalled = [put(stall(head)) for head in heads]
        codes = [code_of(call) for call in stalled]
        assert sorted(codes) == [0] * 32 + [pb.RESOURCE_EXHAUSTED] * 32
        with pytest.raises(Refused, match="its half"):
            wire.put(header(1), [])
        _, states = other.put(header(1, namespace="locked"), [bytes(PART_BYTES)])
        assert states == bytes([pb.STORED])
        objects, _, _ = other.get(pb.GetRequest(run=run(1, namespace="locked")))
        assert objects == {0: bytes(PART_BYTES)}

        daemon.stop()
        assert "calls still running" not in daemon.log
        assert "Traceback" not in daemon.log
        ends = [code_of(call) for call, code in zip(stalled, codes, strict=True) if not code]
        assert ends == [pb.DRAINING] * 32
        over.set()
        for call in headless:
            call.cancel()
        wire.close()
        other.close()
