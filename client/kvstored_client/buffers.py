"""The caller's memory: from buffers of many kinds to addresses, checked before anything is sent.

Three forms name the memory of a run of objects, in object order: one big buffer that holds them
back to back; a sequence with one buffer per object; `Rows` or `Iov`. A buffer is anything with CPU
memory of its own: bytearray, memoryview, numpy array, torch tensor (known by its methods; torch is
not imported), mmap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstored_client.errors import (
    BufferCountError,
    BufferLayoutError,
    BufferSizeError,
    BufferTypeError,
    ReadOnlyBufferError,
)
from kvstored_client.identity.parts import MAX_OBJECT_BYTES

_MAX_INT64 = 2**63 - 1


@runtime_checkable
class TensorLike(Protocol):
    """What is used of a torch tensor."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def is_contiguous(self) -> bool:
        """Whether the elements lie back to back in row-major order."""

    def element_size(self) -> int:
        """Bytes per element."""

    def numel(self) -> int:
        """Number of elements."""

    def stride(self, dim: int) -> int:
        """Elements from one index of a dimension to the next."""

    def dim(self) -> int:
        """Number of dimensions."""


Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.generic] | TensorLike"


@dataclass(frozen=True, eq=False)
class Rows:
    """Objects as rows of a pool: object i is row `indices[i]` of `view` (shape [rows, ...]).

    Each row is contiguous; the distance between rows is whatever the pool's is. A row is at least
    as long as its object (get), or exactly as long (put).
    """

    view: Buffer
    indices: ArrayLike


@dataclass(frozen=True, eq=False)
class Iov:
    """Objects as scattered fragments: `counts[i]` fragments make up object i, in order.

    `addresses` and `lengths` (bytes) have one entry per fragment, shape [sum of counts]; the
    fragments of one object have at most 256 MiB together, for a get too. The caller vouches for the
    memory and keeps it alive for the call.
    """

    addresses: ArrayLike
    lengths: ArrayLike
    counts: ArrayLike


Buffers: TypeAlias = "Buffer | Sequence[Buffer | None] | Rows | Iov"


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Where objects lie. Fragments of object i: rows first[i] to first[i + 1] of the columns
    `addresses` and `lengths` (bytes), shape [fragments]; `first` has shape [objects + 1].

    `sizes`, shape [objects], is the room (get) or length (put) per object, 0 for one that is not
    offered. `keep` holds exports of the buffers, so that none is freed or resized meanwhile.
    """

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keep: list[object]

    def select(self, numbers: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Regions:
        """Where the first `nbytes[k]` bytes of objects `numbers[k]` lie, at most their `sizes`.

        Both of shape [k]. Fragments behind those bytes are left out, a last one is shortened.
        """
        begin = self.first[numbers]
        counts = self.first[numbers + 1] - begin
        if (counts == 1).all():
            first = np.arange(len(numbers) + 1)
            return Regions(self.addresses[begin], nbytes, first, nbytes, self.keep)
        ahead = np.cumsum(counts) - counts
        rows = np.repeat(begin - ahead, counts) + np.arange(int(counts.sum()))
        lengths = self.lengths[rows]
        running = np.concatenate([[0], np.cumsum(lengths)])
        offsets = running[:-1] - np.repeat(running[ahead], counts)  # of fragments in their objects
        lengths = np.clip(np.repeat(nbytes, counts) - offsets, 0, lengths)
        used = lengths > 0
        kept = np.concatenate([[0], np.cumsum(used)])
        first = kept[np.concatenate([ahead, [len(rows)]])]
        return Regions(self.addresses[rows][used], lengths[used], first, nbytes, self.keep)


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """What the objects ask of the buffers: bytes per object, shape [objects].

    `exact` False: the object may be shorter than `nbytes`. `names` tells an object in words.
    """

    nbytes: NDArray[np.int64]
    exact: NDArray[np.bool_]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.nbytes)


def destinations(into: Buffers, want: Want) -> Regions:
    """Where a get writes. One big buffer has room for `nbytes` of each object.

    Raises BufferTypeError, BufferLayoutError, ReadOnlyBufferError, BufferSizeError,
    BufferCountError.
    """
    regions = _regions(into, want, writable=True)
    small = regions.sizes < want.nbytes
    if small.any():
        i = int(np.argmax(small))
        raise BufferSizeError(
            f"destination {i} ({want.names[i]}) has {regions.sizes[i]} bytes",
            f"the object needs {want.nbytes[i]}",
        )
    return regions


def sources(views: Buffers, want: Want) -> Regions:
    """What a put offers. None in a sequence: that object is not offered.

    Raises as `destinations`; lengths that the part does not allow are a BufferSizeError.
    """
    regions = _regions(views, want, writable=False)
    sizes = regions.sizes
    wrong = (sizes != 0) & ((sizes > want.nbytes) | (want.exact & (sizes != want.nbytes)))
    if wrong.any():
        i = int(np.argmax(wrong))
        most = "exactly" if want.exact[i] else "at most"
        raise BufferSizeError(
            f"source {i} ({want.names[i]}) has {sizes[i]} bytes",
            f"the part declares {most} {want.nbytes[i]}",
        )
    return regions


def chunks_offered(views: Buffers, parts: int, chunk_bytes: int | None) -> int:
    """How many whole chunks the views of a put hold.

    `chunk_bytes`: of all parts together, None where sizes vary. Raises BufferCountError and what
    `sources` raises.
    """
    if isinstance(views, Rows):
        count = len(_column("Rows.indices", views.indices))
    elif isinstance(views, Iov):
        count = len(_column("Iov.counts", views.counts))
    elif isinstance(views, list | tuple):
        count = len(views)
    else:
        nbytes = _span("buffer", views, writable=False)[1]
        if chunk_bytes is None:
            raise BufferSizeError(
                "one buffer does not tell where objects end",
                "give one buffer per object where a part's sizes vary",
            )
        if nbytes % chunk_bytes:
            raise BufferSizeError(
                f"the buffer has {nbytes} bytes", f"give whole chunks of {chunk_bytes} bytes"
            )
        return nbytes // chunk_bytes
    if count % parts:
        raise BufferCountError(f"{count} buffers", f"give {parts} per chunk, one per part")
    return count // parts


def _regions(buffers: Buffers, want: Want, *, writable: bool) -> Regions:
    if isinstance(buffers, Iov):
        return _iov_regions(buffers, want)
    if isinstance(buffers, Rows):
        return _rows_regions(buffers, want, writable)
    if isinstance(buffers, list | tuple):
        return _sequence_regions(buffers, want, writable)
    return _single_region(buffers, want, writable)


def _single_region(buffer: object, want: Want, writable: bool) -> Regions:
    address, nbytes, export = _span("buffer", buffer, writable)
    ends = np.cumsum(want.nbytes)
    total = int(ends[-1]) if len(ends) else 0
    if nbytes < total or (not writable and nbytes != total):
        bound = "at least" if writable else "exactly"
        raise BufferSizeError(
            f"the buffer has {nbytes} bytes", f"{len(want)} objects need {bound} {total}"
        )
    starts = ends - want.nbytes + address
    sizes = want.nbytes.copy()
    return Regions(starts, sizes, np.arange(len(want) + 1), sizes, [export])


def _sequence_regions(buffers: Sequence[Buffer | None], want: Want, writable: bool) -> Regions:
    if len(buffers) != len(want):
        raise BufferCountError(
            f"{len(buffers)} buffers for {len(want)} objects", "give one per object, in order"
        )
    addresses: list[int] = []
    lengths: list[int] = []
    keep: list[object] = []
    for i, buffer in enumerate(buffers):
        if buffer is None and not writable:
            addresses.append(0)
            lengths.append(0)
            continue
        address, nbytes, export = _span(f"buffer {i}", buffer, writable)
        if nbytes == 0:
            raise BufferSizeError(f"buffer {i} ({want.names[i]}) is empty")
        addresses.append(address)
        lengths.append(nbytes)
        keep.append(export)
    sizes = np.array(lengths, np.int64)
    first = np.arange(len(want) + 1)
    return Regions(np.array(addresses, np.int64), sizes, first, sizes, keep)


def _rows_regions(rows: Rows, want: Want, writable: bool) -> Regions:
    address, count, row_bytes, step, export = _pool(rows.view, writable)
    indices = _column("Rows.indices", rows.indices)
    if len(indices) != len(want):
        raise BufferCountError(f"Rows names {len(indices)} rows for {len(want)} objects")
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        raise BufferCountError(f"Rows.indices go beyond the {count} rows of the pool")
    if writable and len(np.unique(indices)) != len(indices):
        raise BufferCountError("Rows.indices name a row twice: two objects cannot share it")
    sizes = np.full(len(indices), row_bytes, np.int64)
    starts = indices * step + address
    return Regions(starts, sizes, np.arange(len(indices) + 1), sizes, [export])


def _iov_regions(iov: Iov, want: Want) -> Regions:
    addresses = _column("Iov.addresses", iov.addresses)
    lengths = _column("Iov.lengths", iov.lengths)
    counts = _column("Iov.counts", iov.counts)
    if len(counts) != len(want):
        raise BufferCountError(f"Iov.counts has {len(counts)} entries for {len(want)} objects")
    # Each value is bounded before any are added: int64 sums wrap, and may wrap to what is right.
    spoilt = (counts < 0).any() or (counts > len(lengths)).any()
    if len(addresses) != len(lengths) or spoilt or counts.sum() != len(lengths):
        raise BufferCountError(
            f"Iov has {len(addresses)} addresses, {len(lengths)} lengths and counts that add up to "
            f"{sum(counts.tolist())}",
            "give one address and one length per fragment",
        )
    _check_fragments(addresses, lengths)
    first = np.concatenate([[0], np.cumsum(counts)])
    running = np.concatenate([[0], np.cumsum(lengths)])
    sizes = (running[first[1:]] - running[first[:-1]]).astype(np.int64)
    large = sizes > MAX_OBJECT_BYTES
    if large.any():
        i = int(np.argmax(large))
        raise BufferSizeError(
            f"the fragments of Iov for object {i} ({want.names[i]}) have {sizes[i]} bytes",
            f"an object has at most {MAX_OBJECT_BYTES}",
        )
    return Regions(addresses, lengths, first, sizes, [iov])


def _check_fragments(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    wrong = (lengths <= 0) | (lengths > MAX_OBJECT_BYTES)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise BufferSizeError(
            f"fragment {i} of Iov has {lengths[i]} bytes",
            f"a fragment has 1 to {MAX_OBJECT_BYTES}; leave empty ones out",
        )
    wrong = (addresses <= 0) | (addresses > _MAX_INT64 - MAX_OBJECT_BYTES)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise BufferSizeError(f"fragment {i} of Iov is at address {addresses[i]:#x}: not memory")


def _column(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BufferTypeError(
            f"{name} must be integers of 64 bits, shape [n], not {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.size and array.dtype.kind == "u" and int(array.max()) > _MAX_INT64:
        raise BufferTypeError(f"{name} must be integers of 64 bits, signed, not {array.max()}")
    return array.astype(np.int64)


def _span(name: str, buffer: object, writable: bool) -> tuple[int, int, object]:
    """(address, bytes, what keeps it alive) of one contiguous buffer."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise BufferLayoutError(f"{name} is not contiguous", "give a C-contiguous array")
        if writable and not buffer.flags.writeable:
            raise ReadOnlyBufferError(f"{name} is read-only")
        return buffer.ctypes.data, buffer.nbytes, buffer
    if isinstance(buffer, TensorLike):
        _check_on_cpu(name, buffer)
        if not buffer.is_contiguous():
            raise BufferLayoutError(f"{name} is not contiguous", "give a contiguous tensor")
        return buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer
    view = _memoryview(name, buffer)
    if not view.c_contiguous:
        raise BufferLayoutError(f"{name} is not contiguous")
    if writable and view.readonly:
        raise ReadOnlyBufferError(f"{name} is read-only", "give a bytearray or a writable view")
    flat = np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(0, np.uint8)
    return flat.ctypes.data, view.nbytes, (flat, view)


def _pool(view: object, writable: bool) -> tuple[int, int, int, int, object]:
    """(address, rows, bytes per row, bytes from row to row, what keeps it alive)."""
    if isinstance(view, TensorLike) and not isinstance(view, np.ndarray):
        _check_on_cpu("Rows.view", view)
        shape: tuple[int, ...] = tuple(getattr(view, "shape", ()))
        if view.dim() < 2:
            raise BufferLayoutError("Rows.view needs at least two dimensions")
        width = view.element_size()
        expected = 1
        for dim in range(view.dim() - 1, 0, -1):
            if shape[dim] != 1 and view.stride(dim) != expected:
                raise BufferLayoutError("a row of Rows.view is not contiguous")
            expected *= shape[dim]
        return view.data_ptr(), shape[0], expected * width, view.stride(0) * width, view
    array = view if isinstance(view, np.ndarray) else np.asarray(_memoryview("Rows.view", view))
    if array.ndim < 2:
        raise BufferLayoutError("Rows.view needs at least two dimensions")
    if writable and not array.flags.writeable:
        raise ReadOnlyBufferError("Rows.view is read-only")
    if len(array) and not array[0].flags.c_contiguous:
        raise BufferLayoutError("a row of Rows.view is not contiguous")
    row_bytes = int(np.prod(array.shape[1:])) * array.itemsize
    return array.ctypes.data, len(array), row_bytes, array.strides[0], (array, view)


def _check_on_cpu(name: str, tensor: TensorLike) -> None:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise BufferTypeError(f"{name} is on {device}", "give memory of the CPU")


def _memoryview(name: str, buffer: object) -> memoryview:
    try:
        return memoryview(cast("bytes", buffer))  # whatever exports memory: mmap, array.array, ...
    except (TypeError, ValueError) as error:
        raise BufferTypeError(
            f"{name} is a {type(buffer).__name__}, which has no memory to address: {error}",
            "give a bytearray, a memoryview, a numpy array or a torch tensor on the CPU",
        ) from error
