"""The caller's memory: every form lands where it should; every mistake is refused at the door."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from client_kinds import MakeClient, make_client

from kvstored_client import (
    BufferCountError,
    BufferLayoutError,
    BufferSizeError,
    BufferTypeError,
    ClosedError,
    Iov,
    KVClient,
    KVFamily,
    KVPart,
    OptionError,
    RangeError,
    ReadOnlyBufferError,
    Rows,
    UnknownPartError,
    UsageError,
)
from kvstored_client.buffers import Buffers, Regions, Want, destinations, sources
from kvstored_client.memory import Cursor, address_of, checksum

__all__ = ["make_client"]
N, SIZE = 5, 4096
WANT = Want(np.full(N, SIZE, np.int64), np.ones(N, np.bool_), [f"object {i}" for i in range(N)])
DATA = np.random.default_rng(7).integers(0, 256, (N, SIZE), dtype=np.uint8)


def fill(regions: Regions) -> None:
    """Write object i's bytes of DATA, in pieces that end nowhere in particular."""
    for i in range(N):
        data = DATA[i].tobytes()
        cursor = Cursor(regions)
        cursor.seek(i)
        for at in range(0, SIZE, 1000):
            cursor.write(address_of(data) + at, min(1000, SIZE - at))


def fragments(memory: np.ndarray) -> Iov:
    """Each row of `memory` in fragments of 96, 3000 and 1000 bytes, from scattered places."""
    base = memory.ctypes.data
    lengths = [96, 3000, 1000]
    starts = [0, 1096, 96]
    addresses = [base + i * memory.strides[0] + s for i in range(N) for s in starts]
    return Iov(np.array(addresses, np.uint64), lengths * N, np.full(N, 3))


def gathered(memory: np.ndarray) -> np.ndarray:
    """`memory` with each row in the order of `fragments`."""
    return np.concatenate([memory[:, :96], memory[:, 1096:], memory[:, 96:1096]], axis=1)


Form = Callable[[], tuple[Buffers, Callable[[], np.ndarray]]]


def as_bytearray() -> tuple[Buffers, Callable[[], np.ndarray]]:
    memory = bytearray(N * SIZE)
    return memory, lambda: np.frombuffer(memory, np.uint8).reshape(N, SIZE)


def as_float_array() -> tuple[Buffers, Callable[[], np.ndarray]]:
    memory = np.zeros((N, SIZE // 8), np.float64)
    return memory, lambda: memory.view(np.uint8)


def as_mmap() -> tuple[Buffers, Callable[[], np.ndarray]]:
    memory = mmap.mmap(-1, N * SIZE)
    return memory, lambda: np.frombuffer(memory, np.uint8).reshape(N, SIZE)  # type: ignore[return-value]


def as_bfloat16_tensor() -> tuple[Buffers, Callable[[], np.ndarray]]:
    memory = torch.zeros(N, SIZE // 2, dtype=torch.bfloat16)
    return memory, lambda: memory.view(torch.uint8).numpy()


def as_sequence() -> tuple[Buffers, Callable[[], np.ndarray]]:
    parts: list[object] = [
        bytearray(SIZE),
        memoryview(bytearray(SIZE)),
        np.zeros(SIZE, np.uint8),
        torch.zeros(SIZE // 4),
        array.array("d", [0.0] * (SIZE // 8)),
    ]
    return parts, lambda: np.stack(  # type: ignore[return-value]  # of mixed kinds on purpose
        [
            p.view(torch.uint8).numpy() if isinstance(p, torch.Tensor) else np.frombuffer(p, "u1")  # type: ignore[call-overload]
            for p in parts
        ]
    )


def as_rows() -> tuple[Buffers, Callable[[], np.ndarray]]:
    pool = np.zeros((9, 2, SIZE // 4), np.float32)
    return Rows(pool, [8, 0, 3, 7, 2]), lambda: pool.reshape(9, -1)[
        [8, 0, 3, 7, 2], : SIZE // 4
    ].view(np.uint8)


def as_strided_rows() -> tuple[Buffers, Callable[[], np.ndarray]]:
    pool = np.zeros((9, SIZE + 512), np.uint8)
    view = pool[::2, :SIZE]
    return Rows(view, np.arange(N)[::-1]), lambda: view[::-1]


def as_tensor_rows() -> tuple[Buffers, Callable[[], np.ndarray]]:
    pool = torch.zeros(9, 2, SIZE // 2, dtype=torch.bfloat16)[:, 0]
    return Rows(pool, (1, 2, 4, 6, 8)), lambda: np.stack(
        [pool[i].contiguous().view(torch.uint8).numpy() for i in (1, 2, 4, 6, 8)]
    )


def as_iov() -> tuple[Buffers, Callable[[], np.ndarray]]:
    memory = np.zeros((N, SIZE), np.uint8)
    return fragments(memory), lambda: gathered(memory)


FORMS: list[Form] = [
    as_bytearray,
    as_float_array,
    as_mmap,
    as_bfloat16_tensor,
    as_sequence,
    as_strided_rows,
    as_tensor_rows,
    as_iov,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_written_and_read_where_it_lies(form: Form) -> None:
    buffers, contents = form()
    fill(destinations(buffers, WANT))
    assert np.array_equal(contents(), DATA)
    regions = sources(buffers, WANT)
    out = bytearray(SIZE)
    for i in range(N):
        cursor = Cursor(regions)
        cursor.seek(i)
        cursor.read(np.frombuffer(out, np.uint8).ctypes.data, SIZE)
        assert bytes(out) == DATA[i].tobytes()


def test_rows_may_be_longer_than_their_objects_for_a_get_alone() -> None:
    buffers, _ = as_rows()
    destinations(buffers, WANT)
    with pytest.raises(BufferSizeError, match="exactly 4096"):
        sources(buffers, WANT)


def test_a_checksum_is_over_all_fragments_in_order() -> None:
    memory = DATA.copy()
    whole = sources(gathered(memory), WANT)
    scattered = sources(fragments(memory), WANT)
    assert [checksum(whole, i) for i in range(N)] == [checksum(scattered, i) for i in range(N)]


WRAPPING_SIZE = [2**62] * 4 + [SIZE]
"""Lengths whose sum is SIZE modulo 2**64."""

MISTAKES: list[tuple[object, type[UsageError], str]] = [
    (bytearray(N * SIZE - 1), BufferSizeError, "need at least 20480"),
    (bytes(N * SIZE), ReadOnlyBufferError, "read-only"),
    (memoryview(bytes(N * SIZE)), ReadOnlyBufferError, "read-only"),
    (np.zeros((N, SIZE * 2), np.uint8)[:, ::2], BufferLayoutError, "not contiguous"),
    (np.zeros((N * SIZE, 2), np.uint8).T, BufferLayoutError, "not contiguous"),
    (memoryview(bytearray(N * SIZE * 2))[::2], BufferLayoutError, "not contiguous"),
    (torch.zeros(N, SIZE * 2, dtype=torch.uint8)[:, ::2], BufferLayoutError, "not contiguous"),
    (torch.zeros(N, SIZE, dtype=torch.uint8, device="meta"), BufferTypeError, "on meta"),
    ("text", BufferTypeError, "str"),
    (None, BufferTypeError, "NoneType"),
    (12, BufferTypeError, "int"),
    ([bytearray(SIZE)] * (N - 1), BufferCountError, "4 buffers for 5 objects"),
    ([bytearray(SIZE)] * (N + 1), BufferCountError, "6 buffers for 5 objects"),
    ([bytearray(SIZE)] * (N - 1) + [bytearray(SIZE - 1)], BufferSizeError, "destination 4"),
    ([bytearray(SIZE)] * (N - 1) + [bytes(SIZE)], ReadOnlyBufferError, "buffer 4"),
    ([bytearray(SIZE)] * (N - 1) + [None], BufferTypeError, "buffer 4"),
    (Rows(np.zeros((9, SIZE), "u1"), [0, 1, 2, 3]), BufferCountError, "4 rows for 5"),
    (Rows(np.zeros((9, SIZE), "u1"), [0, 1, 2, 3, 9]), BufferCountError, "beyond the 9 rows"),
    (Rows(np.zeros((9, SIZE), "u1"), [0, 1, 2, 3, -1]), BufferCountError, "beyond the 9 rows"),
    (Rows(np.zeros((9, SIZE), "u1"), [0, 1, 2, 3, 3]), BufferCountError, "twice"),
    (Rows(np.zeros((9, SIZE), "u1"), np.zeros(N)), BufferTypeError, "integers"),
    (Rows(np.zeros((9, SIZE - 1), "u1"), range(N)), BufferSizeError, "destination 0"),
    (Rows(np.zeros((9, 2 * SIZE), "u1")[:, ::2], range(N)), BufferLayoutError, "row"),
    (Rows(torch.zeros(9, 2 * SIZE)[:, ::2], range(N)), BufferLayoutError, "row"),
    (Rows(bytearray(N * SIZE), range(N)), BufferLayoutError, "two dimensions"),
    (Iov([1, 2], [4096] * 5, [1] * 5), BufferCountError, "one address and one length"),
    (Iov([1] * 5, [4096] * 5, [1] * 4), BufferCountError, "4 entries for 5"),
    (Iov([1] * 5, [4096] * 5, [1, 1, 1, 1, 2]), BufferCountError, "add up to 6"),
    (Iov([1] * 5, [4096] * 5, [2, 1, 1, 2, -1]), BufferCountError, "fragment"),
    (Iov([1] * 5, [4095] * 5, [1] * 5), BufferSizeError, "destination 0"),
    (Iov([0] * 5, [4096] * 5, [1] * 5), BufferSizeError, "at address 0x0"),
    (Iov([1] * 6, [4096] * 5 + [0], [1] * 4 + [2]), BufferSizeError, "fragment 5 of Iov has 0"),
    (Iov([1] * 5, [4096] * 4 + [-1], [1] * 5), BufferSizeError, "fragment 4 of Iov has -1"),
    (Iov([1] * 6, [4096] * 4 + [2**63 - 1] * 2, [1] * 4 + [2]), BufferSizeError, "fragment 4"),
    # Sums that int64 would bring back to what is asked for.
    (Iov([1] * 9, WRAPPING_SIZE + [4096] * 4, [5, 1, 1, 1, 1]), BufferSizeError, "fragment 0"),
    (Iov([1] * 5, [4096] * 5, [2**62] * 4 + [5]), BufferCountError, "18446744073709551621"),
    (Iov([1] * 5, np.array([2**64 - 4096] * 5, "u8"), [1] * 5), BufferTypeError, "of 64 bits"),
    (
        Iov([1] * 6, [2**27 + 1] * 2 + [4096] * 4, [2, 1, 1, 1, 1]),
        BufferSizeError,
        "at most 268435",
    ),
    (Iov([2**63 - 1] * 5, [4096] * 5, [1] * 5), BufferSizeError, "address"),
    (Iov([-1] * 5, [4096] * 5, [1] * 5), BufferSizeError, "address"),
    (Iov([1] * 5, [2**64] * 5, [1] * 5), BufferTypeError, "of 64 bits"),
]


@pytest.mark.parametrize("case", range(len(MISTAKES)))
def test_mistakes_about_destinations_are_typed_and_say_what_is_wrong(case: int) -> None:
    buffers, error, words = MISTAKES[case]
    with pytest.raises(error, match=words):
        destinations(buffers, WANT)  # type: ignore[arg-type]  # mistakes are the point


def test_read_only_rows() -> None:
    pool = np.zeros((9, SIZE), np.uint8)
    pool.flags.writeable = False
    with pytest.raises(ReadOnlyBufferError):
        destinations(Rows(pool, range(N)), WANT)
    assert len(sources(Rows(pool, range(N)), WANT).addresses) == N


FAMILY = KVFamily(
    "m", "w", "float32", parts=[KVPart("kv", SIZE), KVPart("extra", max_nbytes=2 * SIZE)]
)
PREFIX = FAMILY.prefix(range(64 * N))
NOBODY = "unix:///nonexistent/kvstored.sock"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.get(PREFIX, bytearray(9)), BufferSizeError, "9 bytes"),
        (lambda c: c.get(PREFIX, bytes(N * 3 * SIZE)), ReadOnlyBufferError, "read-only"),
        (lambda c: c.get(PREFIX, bytearray(), parts=["nope"]), UnknownPartError, "'nope'"),
        (lambda c: c.get(PREFIX, bytearray(), parts=[]), UnknownPartError, "non-empty"),
        (lambda c: c.get(PREFIX, bytearray(), parts="kv"), UnknownPartError, "sequence"),
        (lambda c: c.get(PREFIX, bytearray(), parts=["kv", "kv"]), UnknownPartError, "twice"),
        (lambda c: c.get(PREFIX, bytearray(), stop=6), RangeError, r"chunks \[0, 6\)"),
        (lambda c: c.get(PREFIX, bytearray(), start=3, stop=2), RangeError, r"\[3, 2\)"),
        (lambda c: c.get(PREFIX, bytearray(), start=-1), RangeError, r"\[-1, 5\)"),
        (lambda c: c.get(PREFIX, bytearray(), start=1.0), RangeError, "float"),
        (lambda c: c.get(b"key", bytearray()), OptionError, "bytes"),
        (lambda c: c.match("key"), OptionError, "str"),
        (lambda c: c.match(PREFIX, mode="some"), OptionError, "'some'"),
        (lambda c: c.match(PREFIX, depth="deep"), OptionError, "'deep'"),
        (lambda c: c.match(PREFIX, timeout_s=0), OptionError, "timeout_s"),
        (lambda c: c.match(PREFIX, timeout_s=float("nan")), OptionError, "timeout_s"),
        (lambda c: c.match(PREFIX, timeout_s="1"), OptionError, "timeout_s"),
        (lambda c: c.match(PREFIX, tenant="a\nb"), OptionError, "tenant"),
        (lambda c: c.match(PREFIX, request_id="x" * 65), OptionError, "request_id"),
        (lambda c: c.match(PREFIX, colour="red"), OptionError, "'colour'"),
        (lambda c: c.put(PREFIX, bytes(SIZE)), BufferSizeError, "objects end"),
        (lambda c: c.put(PREFIX, bytes(SIZE + 1), parts=["kv"]), BufferSizeError, "whole chunks"),
        (lambda c: c.put(PREFIX, bytes(6 * SIZE), parts=["kv"]), BufferCountError, "6 chunks"),
        (lambda c: c.put(PREFIX, [bytes(SIZE)] * 3), BufferCountError, "2 per chunk"),
        (lambda c: c.put(PREFIX, [bytes(SIZE)] * 2, 5), BufferCountError, "0 from 5 on"),
        (lambda c: c.put(PREFIX, [bytes(SIZE), bytes(2 * SIZE + 1)]), BufferSizeError, "at most"),
        (lambda c: c.put(PREFIX, [bytes(SIZE - 1), None]), BufferSizeError, "exactly 4096"),
        (lambda c: c.put(PREFIX, [bytes(0), None]), BufferSizeError, "empty"),
        (lambda c: c.put(PREFIX, [None, None], durability="no"), OptionError, "'no'"),
        (lambda c: c.put(PREFIX, [None, None], when_full="no"), OptionError, "'no'"),
        (lambda c: c.put(PREFIX, [None, None], ttl_ms=-1), OptionError, "ttl_ms"),
        (lambda c: c.delete(PREFIX, reason="bored"), OptionError, "'bored'"),
        (lambda c: c.touch(PREFIX, 0, 9), RangeError, r"\[0, 9\)"),
        (
            lambda c: c.match(KVFamily("m", "w", "f").prefix([1])),
            UnknownPartError,
            "declares no parts",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    make_client: MakeClient,
    call: Callable[[object], object],
    error: type[Exception],
    words: str,
) -> None:
    # Nobody is there to be asked: whatever reached the network would be a miss, not an exception.
    with pytest.raises(error, match=words):
        call(make_client(NOBODY))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "localhost:1"}, "not understood"),
        ({"target": "unix://relative"}, "not understood"),
        ({"target": "dns:///host"}, "not understood"),
        ({"target": "dns:///host:0"}, "not understood"),
        ({"target": 7}, "str"),
        ({"namespace": ""}, "namespace"),
        ({"tenant": "a\x00"}, "tenant"),
        ({"token": "two words"}, "token"),
        ({"salt": b"short"}, "32 bytes"),
    ],
)
def test_options_are_checked_when_they_are_given(options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        KVClient(**{"target": NOBODY, **options})  # type: ignore[arg-type]  # mistakes on purpose


def test_a_token_never_shows_in_an_error() -> None:
    with pytest.raises(OptionError) as caught:
        KVClient(NOBODY, token="s3cret with blank")
    assert "s3cret" not in str(caught.value)


def test_a_closed_client_says_so(make_client: MakeClient) -> None:
    client = make_client(NOBODY)
    client.close()
    with pytest.raises(ClosedError):
        client.match(PREFIX)


def test_a_buffer_cannot_be_resized_while_it_is_in_use() -> None:
    memory = bytearray(N * SIZE)
    regions = destinations(memory, WANT)
    with pytest.raises(BufferError):
        memory.extend(b"x")
    del regions
    memory.extend(b"x")


def test_addresses_are_taken_from_the_memory_itself() -> None:
    memory = (ctypes.c_ubyte * SIZE)()
    want = Want(np.array([SIZE]), np.array([True]), ["it"])
    assert destinations(memory, want).addresses == [ctypes.addressof(memory)]  # type: ignore[arg-type]
