"""A client that closes its socket with answers unread and requests on their way has ended."""

from __future__ import annotations

import threading

from server.local_serving import GIVE_UP_S, local_serving, run
from server.local_wire import MATCH, RELEASE, frame

from kvstored_client.proto import kvstore_pb2 as pb


def test_a_reset_connection_is_an_end() -> None:
    with local_serving() as served:
        for _ in range(5):
            with served.session() as wire:
                wire.socket.sendall(frame(MATCH, 7, pb.MatchRequest(run=run(1))))
                # The answer is there, and nobody reads it.
                wire.socket.recv(1, 2)
                held, go_on = threading.Event(), threading.Event()

                def busy(held: threading.Event = held, go_on: threading.Event = go_on) -> None:
                    held.set()
                    go_on.wait(GIVE_UP_S)

                served.loop.call_soon_threadsafe(busy)
                assert held.wait(GIVE_UP_S)
                wire.socket.sendall(frame(RELEASE, 0, pb.ReleaseRequest(lease_ids=[1])))
            go_on.set()
            served.becomes(lambda: served.server.figures().sessions == 0, 5)
