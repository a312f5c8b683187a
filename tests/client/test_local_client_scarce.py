"""Gets of a client whose session has less room for leases than they ask for."""

from __future__ import annotations

import numpy as np
from local_clients import FAMILY, MIB, chunks, client_of, join_session_threads, local_serving
from support_daemon import running_daemon

from kvstored.server.limits import Limits, LocalLimits
from kvstored_client import KVClient

DATA = chunks(40)
PREFIX = FAMILY.prefix(range(64 * 40))


def test_what_was_declined_is_asked_for_again_as_room_comes_back() -> None:
    limits = Limits(local=LocalLimits(max_leased_fraction_session=1 / 64))
    with local_serving(limits, cap_bytes=64 * MIB) as small, client_of(small) as client:
        assert client.put(PREFIX, DATA).stored == 40
        with client.acquire(PREFIX, stop=14) as lease:  # which leaves two chunks
            assert len(lease) == 14
            out = np.zeros_like(DATA)
            got = client.get(PREFIX, out)
            assert (got.chunks, got.reason) == (40, "")
            assert (out == DATA).all()


def test_a_get_without_any_room_goes_by_grpc() -> None:
    with running_daemon() as daemon, KVClient(daemon.target) as client:
        assert client.put(PREFIX, DATA).stored == 40
        leases, number = [], 0
        while True:  # until this session may lease no more
            other = FAMILY.prefix(range(1 + number, 64 * 40 + 1 + number))
            assert client.put(other, DATA, timeout_s=20).reason == ""
            leases.append(client.acquire(other))
            if leases[-1].reason:
                break
            number += 1
        out = np.zeros_like(DATA)
        assert client.get(PREFIX, out).chunks == 40
        assert (out == DATA).all()
        for lease in leases:
            lease.release()
    join_session_threads()
