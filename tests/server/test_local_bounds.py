"""What bounds all sessions together, and what stays counted while a client may look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server import local_wire as w
from server.local_serving import PART_BYTES, LocalServed, local_serving, run
from server.local_wire import LocalWire

from kvstored.server.local.leases import Budget, Share
from kvstored_client.proto import kvstore_pb2 as pb


@pytest.fixture
def served() -> Iterator[LocalServed]:
    with local_serving() as running:
        yield running


def test_an_area_stays_counted_while_a_quarantined_client_may_have_it_mapped(
    served: LocalServed,
) -> None:
    wire = LocalWire(served.path)
    wire.open()
    request = pb.ReserveRequest(run=run(2), lease_id=5, lengths_bytes=[PART_BYTES] * 2)
    reply = wire.call(w.RESERVE, request)
    assert isinstance(reply, pb.ReserveReply)
    assert bytes(reply.states) == bytes([pb.WANTED]) * 2
    staged = served.figures.staging_bytes
    assert staged >= 2 * PART_BYTES
    wire.send_raw(b"\xff" * 100)
    wire.until_ended()
    served.becomes(lambda: served.ram.usage().charged_bytes == 0)  # the reservation is given up
    assert served.figures.quarantined_sessions == 1
    assert served.figures.staging_bytes == staged
    wire.shut_down()
    served.becomes(lambda: served.server.figures().staging_bytes == 0)
    wire.close()


def test_namespaces_together_keep_no_more_than_the_whole() -> None:
    whole = Share(100)
    one = Budget(Share(80, whole=whole), 80)
    other = Budget(Share(80, whole=whole), 80)
    assert one.charge(75)
    assert not other.charge(30)
    assert other.room_bytes == 25
    assert other.charge(25)
    one.uncharge(75)
    assert whole.used_bytes == 25
    assert other.room_bytes == 55
