"""Which (chunk, part) objects a call is about, and how its prefix is cut into requests. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstored_client.buffers import Want
from kvstored_client.errors import OptionError, RangeError, UnknownPartError
from kvstored_client.identity import KEY_BYTES, KVFamily, KVPart, Prefix, longest_boundary
from kvstored_client.proto import kvstore_pb2 as pb

_CALLS_REMEMBERED = 4  # per prefix: a match and the gets that follow it

MAX_OBJECTS_PER_CALL = 65_536
"""Keys times parts of one request; what docs/protocol.md promises."""


def checked_prefix(prefix: Prefix) -> Prefix:
    """Raises OptionError for what is not a Prefix."""
    if not isinstance(prefix, Prefix):
        raise OptionError(
            f"prefix is a {type(prefix).__name__}", "make one with KVFamily.prefix or .foreign"
        )
    return prefix


def checked_range(prefix: Prefix, start: int, stop: int | None) -> tuple[int, int]:
    """(start, stop) as chunk indices; `stop` None is the prefix's end. Raises RangeError."""
    end = len(prefix) if stop is None else stop
    for name, value in (("start", start), ("stop", end)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise RangeError(f"{name} must be an int, not {type(value).__name__}")
    if not 0 <= start <= end <= len(prefix):
        raise RangeError(
            f"chunks [{start}, {end}) of a prefix of {len(prefix)}",
            "0 <= start <= stop <= len(prefix)",
        )
    return int(start), int(end)


def checked_parts(family: KVFamily, parts: Sequence[str] | None) -> tuple[KVPart, ...]:
    """The parts named, in that order; None: all that the family declares.

    Raises UnknownPartError.
    """
    if not family.parts:
        raise UnknownPartError(f"family {family.model!r} declares no parts", "give it `parts`")
    if parts is None:
        return tuple(family.parts)
    if isinstance(parts, str) or not parts:
        raise UnknownPartError(f"parts {parts!r}", "give a non-empty sequence of part names")
    by_name = {part.name: part for part in family.parts}
    for name in parts:
        if name not in by_name:
            raise UnknownPartError(
                f"part {name!r} is not one of family {family.model!r}",
                "it declares " + ", ".join(map(repr, by_name)),
            )
    if len(set(parts)) != len(parts):
        raise UnknownPartError("parts names one part twice")
    return tuple(by_name[name] for name in parts)


def needed_by_group(prefix: Prefix, parts: Sequence[KVPart], stop: int) -> dict[str, range]:
    """For each group of the parts, the chunks that resuming after `stop` chunks needs."""
    family = prefix.family
    if stop == 0:
        return {part.group: range(0) for part in parts}
    end_token = prefix.end_token(stop - 1)
    return {
        group: family.groups[group].chunks_needed(stop, family.chunk_tokens, end_token)
        for group in {part.group for part in parts}
    }


@dataclass(frozen=True, slots=True, eq=False)
class ObjectTable:
    """The objects of a call over chunks [start, stop), numbered in object order.

    `needed` has shape [chunks, parts]; object k is its k-th True in row-major order, `number` the
    same as a table, -1 where there is no object.
    """

    prefix: Prefix
    start: int
    stop: int
    parts: tuple[KVPart, ...]
    needed: NDArray[np.bool_]
    number: NDArray[np.int64]
    want: Want

    @property
    def chunks(self) -> int:
        """Chunks of the range."""
        return self.stop - self.start

    def run(self, cut: Cut, namespace: str, keys: bytes) -> pb.ChunkRun:
        """The ChunkRun of one request. `keys`: of the whole prefix."""
        return chunk_run(
            self.prefix,
            cut.start,
            cut.stop,
            namespace,
            keys,
            [self.parts[p].name for p in cut.parts],
        )

    def numbers(self, cut: Cut) -> list[int]:
        """Object number for each object index of a request."""
        rows = self.number[cut.start - self.start : cut.stop - self.start]
        numbers: list[int] = rows[:, list(cut.parts)].ravel().tolist()
        return numbers

    def usable(self, delivered: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """(boundary, chunks): after how many chunks from `start` every group's rule holds, and per
        chunk whether all it needed is there. `delivered`: per object.
        """
        got = np.zeros(self.needed.shape, np.bool_)
        got[self.needed] = delivered
        whole: NDArray[np.bool_] = np.logical_and.reduce(got | ~self.needed, axis=1)
        groups = [part.group for part in self.parts]
        present = {
            group: np.logical_and.reduce(got[:, [g == group for g in groups]], axis=1)
            for group in set(groups)
        }
        family = self.prefix.family
        end_token = self.prefix.end_token(self.stop - 1) if self.chunks else 0
        boundary = longest_boundary(
            present, family.groups, family.chunk_tokens, start=self.start, end_token=end_token
        )
        return boundary, whole


@dataclass(frozen=True, slots=True)
class Cut:
    """One request's share: chunks [start, stop), and its parts as indices into the table's."""

    start: int
    stop: int
    parts: tuple[int, ...]


def get_table(prefix: Prefix, start: int, stop: int, parts: tuple[KVPart, ...]) -> ObjectTable:
    """What has to be read so that the prefix can be resumed at `stop`, from `start` on."""
    call = start, stop, *[part.name for part in parts]
    known = prefix.worked_out.get(call)
    if known is not None:
        return ObjectTable(prefix, start, stop, parts, *cast("_Columns", known))
    by_group = needed_by_group(prefix, parts, stop)
    needed = np.zeros((stop - start, len(parts)), np.bool_)
    for column, part in enumerate(parts):
        chunks = by_group[part.group]
        needed[max(chunks.start - start, 0) : max(chunks.stop - start, 0), column] = True
    table = _table(prefix, start, stop, parts, needed)
    while len(prefix.worked_out) >= _CALLS_REMEMBERED:
        prefix.worked_out.pop(next(iter(prefix.worked_out)), None)
    prefix.worked_out[call] = table.needed, table.number, table.want
    return table


def put_table(prefix: Prefix, start: int, stop: int, parts: tuple[KVPart, ...]) -> ObjectTable:
    """Every object of the range."""
    return _table(prefix, start, stop, parts, np.ones((stop - start, len(parts)), np.bool_))


def _table(
    prefix: Prefix, start: int, stop: int, parts: tuple[KVPart, ...], needed: NDArray[np.bool_]
) -> ObjectTable:
    number = np.full(needed.shape, -1, np.int64)
    number[needed] = np.arange(int(needed.sum()))
    columns = np.nonzero(needed)[1]
    room = np.array([part.nbytes or part.max_nbytes or 0 for part in parts], np.int64)
    exact = np.array([part.nbytes is not None for part in parts], np.bool_)
    want = Want(room[columns], exact[columns], _Names(start, parts, needed))
    return ObjectTable(prefix, start, stop, parts, needed, number, want)


_Columns = tuple[NDArray[np.bool_], NDArray[np.int64], Want]


class _Names(Sequence[str]):
    """Objects in words, made only for messages."""

    def __init__(self, start: int, parts: tuple[KVPart, ...], needed: NDArray[np.bool_]) -> None:
        self._start, self._parts, self._needed = start, parts, needed

    def __len__(self) -> int:
        return int(self._needed.sum())

    def __getitem__(self, i: int) -> str:  # type: ignore[override]  # never sliced
        chunks, columns = np.nonzero(self._needed)
        return f"chunk {self._start + int(chunks[i])}, part {self._parts[int(columns[i])].name!r}"


def chunk_run(
    prefix: Prefix, start: int, stop: int, namespace: str, keys: bytes, parts: Sequence[str]
) -> pb.ChunkRun:
    """The ChunkRun of chunks [start, stop). `keys`: of the whole prefix.

    The parent is named for foreign prefixes too: their keys do not hold it, and the daemon needs
    it to evict leaves first.
    """
    return pb.ChunkRun(
        namespace=namespace,
        family=prefix.family.fingerprint,
        keys=keys[start * KEY_BYTES : stop * KEY_BYTES],
        start=start,
        parent=keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b"",
        end_token=prefix.end_token(stop - 1) if stop > start else 0,
        parts=parts,
    )


def spans(start: int, stop: int, parts: int, max_keys: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut so that no request is over the limits on keys and on objects."""
    step = max(1, min(max_keys or MAX_OBJECTS_PER_CALL, MAX_OBJECTS_PER_CALL // max(parts, 1)))
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def get_cuts(table: ObjectTable, max_keys: int) -> list[Cut]:
    """The requests of a get.

    The daemon applies the groups' rules at the end of each request. So where there is more than
    one, they are cut where a group begins to be needed, and name only parts that are needed
    throughout: then a rule at an inner cut asks for the same as the rule at the end.
    """
    everything = tuple(range(len(table.parts)))
    pieces = list(spans(table.start, table.stop, len(everything), max_keys))
    if len(pieces) <= 1:
        return [Cut(a, b, everything) for a, b in pieces]
    changes = np.flatnonzero((table.needed[1:] != table.needed[:-1]).any(axis=1)) + 1
    edges = [table.start, *(table.start + changes).tolist(), table.stop]
    cuts = []
    for left, right in pairwise(edges):
        parts = tuple(np.flatnonzero(table.needed[left - table.start]).tolist())
        if parts:
            cuts += [Cut(a, b, parts) for a, b in spans(left, right, len(parts), max_keys)]
    return cuts


def put_cuts(
    table: ObjectTable, sizes: NDArray[np.int64], max_keys: int, max_bytes: int
) -> list[Cut]:
    """The requests of a put: each within the limits on keys, objects and bytes.

    A single chunk over `max_bytes` makes a request of its own, for the daemon to refuse.
    """
    everything = tuple(range(len(table.parts)))
    per_chunk = sizes.reshape(table.chunks, len(everything)).sum(axis=1).tolist()
    cuts: list[Cut] = []
    for left, right in spans(table.start, table.stop, len(everything), max_keys):
        begin, held = left, 0
        for chunk in range(left, right):
            nbytes = per_chunk[chunk - table.start]
            if max_bytes and held + nbytes > max_bytes and chunk > begin:
                cuts.append(Cut(begin, chunk, everything))
                begin, held = chunk, 0
            held += nbytes
        cuts.append(Cut(begin, right, everything))
    return cuts
