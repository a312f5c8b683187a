"""An exception that comes anywhere in a same-node call, as a signal handler's may."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from local_clients import FAMILY, MIB, LocalServed, chunks, client_of, local_serving

from kvstored_client import KVClient

DATA = chunks(2)
PREFIX = FAMILY.prefix(range(64 * 2))


class Struck(BaseException):
    """What the handler raises."""


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving(cap_bytes=64 * MIB) as running:
        yield running


def struck_at(count: int, call: Callable[[], object]) -> bool:
    """Run `call`, and raise Struck in it where the interpreter looks for signals for the `count`-th
    time in the client's own code: where a function begins, and after each call. False if it does
    not so often.
    """
    left = count

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event not in ("call", "return", "c_return"):
            return
        if "kvstored_client/local" not in frame.f_code.co_filename or in_finaliser(frame):
            return
        left -= 1
        if not left:
            sys.setprofile(None)
            raise Struck

    sys.setprofile(look)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.setprofile(None)
    return False


def in_finaliser(frame: FrameType | None) -> bool:
    """Whether what is raised here goes nowhere."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def calls(client: KVClient, out: np.ndarray[Any, Any]) -> dict[str, Callable[[int], object]]:
    """By name; the argument makes the call a new one."""

    def fresh(number: int) -> Any:
        return FAMILY.prefix(range(1 + number, 129 + number))

    return {
        "get": lambda number: client.get(PREFIX, out),
        "put": lambda number: client.put(fresh(number), DATA),
        "acquire": lambda number: client.acquire(PREFIX),
        "match": lambda number: client.match(PREFIX, hold=True),
        "reserve": lambda number: client.reserve(fresh(number)).commit(),
    }


@pytest.mark.parametrize("verb", ["get", "put", "acquire", "match", "reserve"])
def test_wherever_a_call_is_interrupted_the_next_ones_work_and_nothing_stays_lent(
    served: LocalServed, verb: str
) -> None:
    with client_of(served) as client:
        assert client.put(PREFIX, DATA).reason == ""
        out = np.zeros_like(DATA)
        call = calls(client, out)[verb]
        with client.acquire(PREFIX) as lease:
            view = lease[0]
        count = 1
        while struck_at(count, partial(call, count)):
            put = client.put(FAMILY.prefix([7, count] * 64), DATA, timeout_s=5)
            assert (put.reason, put.detail) == ("", ""), count
            assert client.get(PREFIX, out).chunks == 2
            count += 1
        assert count > 40
        assert bytes(view) == DATA[0].tobytes()
        del view, lease
        served.becomes(lambda: served.server.figures().sessions == 1)
        served.becomes(lambda: served.server.figures().leased_bytes == 0)
    served.becomes(lambda: served.server.figures().sessions == 0 and served.nothing_held())
