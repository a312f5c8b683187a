"""Leases of KVClient: how long what one looks at stays, whatever is made from it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from local_clients import (
    FAMILY,
    MIB,
    OBJECT_BYTES,
    LocalServed,
    chunks,
    client_of,
    join_session_threads,
    local_serving,
)

from kvstored.server.limits import Limits, LocalLimits
from kvstored_client import (
    ClosedError,
    KVClient,
    KVFamily,
    KVPart,
    LeaseEndedError,
    LeaseInUseError,
    NotLeasedError,
    RangeError,
)

PREFIX = FAMILY.prefix(range(64 * 8))
OTHER_BYTES = 300_000
OTHER = KVFamily("other sizes", "w", "float32", parts=[KVPart("kv", OTHER_BYTES)])
DATA = chunks(8)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving(cap_bytes=64 * MIB) as running:
        yield running


@pytest.fixture
def client(served: LocalServed) -> Iterator[KVClient]:
    with client_of(served) as made:
        assert made.put(PREFIX, DATA).reason == ""
        yield made


def nothing_leased(served: LocalServed) -> bool:
    return served.ram.leased_bytes == 0


def test_views_are_read_only_and_are_the_bytes(client: KVClient) -> None:
    with client.acquire(PREFIX, start=2) as lease:
        assert len(lease) == lease.chunks == 6
        assert lease.bytes_by_tier == {"ram": 6 * OBJECT_BYTES}
        assert (lease.reason, lease.detail) == ("", "")
        assert [bytes(view) for view in lease] == [row.tobytes() for row in DATA[2:]]
        assert lease[0].readonly
        with pytest.raises(TypeError):
            lease[0][0] = 1
        array = lease.array(1, "kv", np.float32, (128, 128))
        assert (array.view(np.uint8).ravel() == DATA[3]).all()
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
        for wrong in (6, -1):
            with pytest.raises(NotLeasedError):
                lease[wrong]
        with pytest.raises(NotLeasedError, match="'nope'"):
            lease[0, "nope"]
        del array
    with pytest.raises(LeaseEndedError):
        lease[0]
    with pytest.raises(RangeError):
        client.acquire(PREFIX, stop=9)


def test_release_says_so_while_somebody_looks(served: LocalServed, client: KVClient) -> None:
    lease = client.acquire(PREFIX)
    view = lease[3]
    array = np.frombuffer(view, np.uint8)[5:]
    with pytest.raises(LeaseInUseError, match="1 objects"):
        lease.release()
    del view
    with pytest.raises(LeaseInUseError):
        lease.release()
    assert bytes(lease[4]) == DATA[4].tobytes(), "nothing was released"
    assert served.figures.leased_bytes > 0
    del array
    lease.release()
    lease.release()
    served.becomes(lambda: nothing_leased(served))


def torch_tensor(view: memoryview) -> object:
    torch = pytest.importorskip("torch")
    with pytest.warns(UserWarning, match="not writable"):
        return torch.frombuffer(view, dtype=torch.uint8)[1:].view(-1)


KEEPERS = {
    "memoryview": lambda view: view[1:].cast("B")[1:],
    "numpy": lambda view: np.frombuffer(view, np.float32).reshape(4, -1)[1:].T,
    "numpy of numpy": lambda view: np.asarray(np.asarray(view)[10:20]),
    "torch": torch_tensor,
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_the_last_thing_made_from_a_view_keeps_the_lease(
    served: LocalServed, client: KVClient, kind: str
) -> None:
    with client.acquire(PREFIX) as lease:
        kept = KEEPERS[kind](lease[2])
    del lease
    gc.collect()
    assert client.match(PREFIX).chunks == 8  # the session has said what it had to say
    assert served.look(lambda: served.ram.leased_bytes) >= OBJECT_BYTES
    del kept
    served.becomes(lambda: nothing_leased(served))


def test_a_lease_that_is_dropped_ends_in_whatever_thread(
    served: LocalServed, client: KVClient
) -> None:
    leases = [client.acquire(PREFIX) for _ in range(10)]
    for lease in leases[5:]:
        lease.cycle = lease  # type: ignore[attr-defined]  # for the collector alone
    del lease
    thread = threading.Thread(target=leases.clear)
    thread.start()
    thread.join()
    gc.collect()
    served.becomes(lambda: nothing_leased(served))


def test_leases_outlast_the_client(served: LocalServed) -> None:
    with client_of(served) as other:
        other.put(PREFIX, DATA)
        dropped = other.acquire(PREFIX)
        lease = other.acquire(PREFIX)
        view = lease[7]
        other.close()
        with pytest.raises(ClosedError):
            other.acquire(PREFIX)
        assert bytes(view) == DATA[7].tobytes()
        assert bytes(lease[6]) == DATA[6].tobytes()
        del dropped, lease
        assert served.figures.sessions == 1
        assert served.look(lambda: served.ram.leased_bytes) > 0
        del view
        join_session_threads()
    served.becomes(lambda: served.server.figures().sessions == 0 and nothing_leased(served))


def test_a_client_that_is_dropped_ends_its_session(served: LocalServed) -> None:
    other = KVClient(f"unix://{served.path.with_name('k.sock')}")
    assert other.match(PREFIX).reason in ("", "never_stored")
    assert served.figures.sessions == 1
    del other
    gc.collect()
    join_session_threads()
    served.becomes(lambda: served.server.figures().sessions == 0)


def test_a_segment_is_unmapped_when_it_is_asked_back() -> None:
    limits = Limits(
        local=LocalLimits(max_leased_fraction_session=0.9, max_leased_fraction_namespace=0.9)
    )
    with local_serving(limits, cap_bytes=8 * MIB) as small, client_of(small) as client:
        old = FAMILY.prefix(range(64 * 100))
        assert client.put(old, chunks(100)).stored == 100
        before = mapped_segments()
        with client.acquire(old, stop=4) as lease:
            view = lease[0]
            with client.acquire(old) as whole:
                assert len(whole) == 100
                segments = mapped_segments() - before
            assert segments
            # Objects of another size need segments of their own.
            new = OTHER.prefix(range(64 * 8))
            data = chunks(8, 1, OTHER_BYTES)
            assert client.put(new, data).stored == 8
            assert segments - mapped_segments(), "some were given back"
            assert bytes(view) == chunks(100)[0].tobytes()
            del view
        out = np.zeros_like(data)
        assert client.get(new, out).chunks == 8
        assert (out == data).all()
        small.becomes(lambda: nothing_leased(small))
    assert mapped_segments() == before, "and all with the session"


def mapped_segments() -> set[str]:
    """The address ranges at which this process has mapped others' segments."""
    with open("/proc/self/maps") as maps:
        return {line.split()[0] for line in maps if "/memfd:" in line and line.split()[1] == "r--s"}
