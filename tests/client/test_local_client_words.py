"""What the client says in its log, of slots and of holds."""

from __future__ import annotations

import logging
import os

import pytest
from local_clients import FAMILY, MIB, chunks, client_of, local_serving

from kvstored_client import LeaseEndedError
from kvstored_client.failures import DEADLINE_PASSED, Failure, FailureKind
from kvstored_client.session import SessionKeeper

DATA = chunks(4)
PREFIX = FAMILY.prefix(range(64 * 4))


def test_trouble_that_comes_and_goes_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstored_client")
    keeper = SessionKeeper("unix:///nowhere", "default", None)
    for _ in range(50):
        keeper.noted(DEADLINE_PASSED)
        keeper.noted(None)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "misses" not in caplog.text
    refused = SessionKeeper("unix:///nowhere", "default", None)
    refused.noted(Failure(FailureKind.REFUSED, "deleted here, but the bucket has not confirmed it"))
    assert "the bucket has not confirmed it" in caplog.text
    assert "misses" not in caplog.text
    other = SessionKeeper("unix:///nowhere", "default", None)
    other.noted(Failure(FailureKind.UNREACHABLE, "gone"))
    assert "calls are misses until this ends" in caplog.text


def test_slots_that_are_wanted_their_words_and_their_commit_in_a_child() -> None:
    with local_serving(cap_bytes=64 * MIB) as served, client_of(served) as client:
        assert client.put(FAMILY.prefix(range(64 * 2)), DATA[:2]).stored == 2
        with client.reserve(PREFIX) as slots:
            assert slots.wanted == [2, 3]
            assert "2 to write" in repr(slots)
            for i in slots.wanted:
                slots[i][:] = DATA[i].tobytes()
            pid = os.fork()
            if not pid:
                try:
                    slots.commit()
                except LeaseEndedError:
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
            assert slots.commit().stored == 2
            assert "ended" in repr(slots)
        match = client.match(PREFIX, hold=True)
        assert match.hold is not None
        assert repr(match.hold) == "<Hold: 1 of 1 live>"
        match.hold.release()
        assert repr(match.hold) == "<Hold: 0 of 1 live>"
