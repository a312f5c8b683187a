"""A client process that begins a call, says so, and then does nothing more until it is killed.

Usage: python hold_call.py get|put ADDRESS COUNT [LENGTH_BYTES, of objects of part "extra"]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from server.serving import PART_BYTES, Wire, header, run

from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods


def main() -> None:
    verb, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    wire = Wire(address)
    forever = threading.Event()
    if verb == "get":
        stream = wire.start_get(pb.GetRequest(run=run(count)), timeout=None)
        next(stream)
        print("begun", flush=True)
        forever.wait()

    length = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    head = header(count, parts=["extra"], lengths=[length] * count) if length else header(count)

    def messages() -> Iterator[bytes]:
        yield head.SerializeToString()
        yield bytes(PART_BYTES)
        forever.wait()

    call = wire.channel.stream_stream(methods.PUT.path)(messages())
    next(call)
    print("begun", flush=True)
    forever.wait()


if __name__ == "__main__":
    main()
