"""A look at every object after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storm_content import Bytes, Chain, offer_of
from storm_ledger import Object

from kvstored_client import ChunkState, KVClient

TIMEOUT_S = 60.0
NOBODYS = -1
"""Stands for the offer of bytes that no offer had."""

_GONE = (
    ChunkState.MISS_CORRUPT,
    ChunkState.MISS_EVICTED,
    ChunkState.MISS_DELETED,
    ChunkState.MISS_NEVER_STORED,
)


@dataclass
class Survey:
    """`found`: whose bytes each object has, NOBODYS where that cannot be said. `refused`: what was
    in the index until the daemon was asked for it: its header is void since a delete or an eviction
    was cut off in the middle, or that of a chunk above it is.
    """

    found: dict[Object, int] = field(default_factory=dict)
    refused: set[Object] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    _seen: set[Object] = field(default_factory=set)

    def look(self, client: KVClient, chain: Chain) -> None:
        """Read what there is of a prefix, each part for itself."""
        for part in chain.sizes:
            match = client.match(chain.prefix, [part], "each", timeout_s=TIMEOUT_S)
            if match.detail:
                self.wrong.append(f"a match: {match.reason}: {match.detail}")
            chunks = [
                chunk
                for chunk, state in enumerate(match.states)
                if state.held and (chain.keys[chunk], part) not in self._seen
            ]
            for first, stop in _runs(chunks):
                self._read(client, chain, part, first, stop)
            self._seen.update((key, part) for key in chain.keys)

    def _read(self, client: KVClient, chain: Chain, part: str, first: int, stop: int) -> None:
        """A part of chunks that follow each other."""
        into = [chain.room(part) for _ in range(first, stop)]
        got = client.get(
            chain.prefix, into, start=first, stop=stop, parts=[part], timeout_s=TIMEOUT_S
        )
        for i, data in enumerate(into):
            obj = chain.keys[first + i], part
            if got.ok[i]:
                self._enter(obj, data, int(got.lengths[i]), chain.nbytes(first + i, part))
            else:
                self._alone(client, chain, part, first + i)

    def _alone(self, client: KVClient, chain: Chain, part: str, chunk: int) -> None:
        """One that did not come with the others."""
        obj = chain.keys[chunk], part
        into = [chain.room(part)]
        got = client.get(
            chain.prefix, into, start=chunk, stop=chunk + 1, parts=[part], timeout_s=TIMEOUT_S
        )
        if got.ok[0]:
            self._enter(obj, into[0], int(got.lengths[0]), chain.nbytes(chunk, part))
        elif got.states[0] in _GONE:
            self.refused.add(obj)
        else:
            self.wrong.append(f"not to be had: {obj[0].hex()} {part}: {got.states[0].name}")

    def _enter(self, obj: Object, data: Bytes, length: int, expected: int) -> None:
        offer = offer_of(*obj, data[:expected]) if length == expected else None
        self.found[obj] = NOBODYS if offer is None else offer


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in ascending order as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
