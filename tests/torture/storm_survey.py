"""A look at every object after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storm_content import Chain, offer_of
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
    """`listed`: what the daemon says that it holds, before it is asked for it. `found`: whose
    bytes each object has, NOBODYS where that cannot be said.
    """

    listed: set[Object] = field(default_factory=set)
    found: dict[Object, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _seen: set[Object] = field(default_factory=set)

    @property
    def refused(self) -> set[Object]:
        """What was listed and could not be had: its header is void since a delete or an eviction
        was cut off in the middle.
        """
        return self.listed - self.found.keys()

    def list(self, clients: Iterable[KVClient]) -> None:
        """What the namespaces have, before anything is read."""
        self.listed = _listed(clients)

    def list_again(self, clients: Iterable[KVClient]) -> None:
        """Afterwards: all that was read is there, and nothing else."""
        left = _listed(clients)
        if left != self.found.keys():
            self.wrong.append(
                f"{len(self.found.keys() - left)} objects that were read are listed no more, "
                f"{len(left - self.found.keys())} that were refused still are"
            )

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
                self._read(client, chain, part, range(first, stop))
            self._seen.update((key, part) for key in chain.keys)

    def _read(self, client: KVClient, chain: Chain, part: str, chunks: range) -> None:
        """A part of chunks that follow each other; what does not come with the others, alone."""
        into = [chain.room(part) for _ in chunks]
        got = client.get(
            chain.prefix,
            into,
            start=chunks.start,
            stop=chunks.stop,
            parts=[part],
            timeout_s=TIMEOUT_S,
        )
        for i, chunk in enumerate(chunks):
            obj = chain.keys[chunk], part
            if got.ok[i]:
                nbytes = chain.nbytes(chunk, part)
                offer = offer_of(*obj, into[i][:nbytes]) if got.lengths[i] == nbytes else None
                self.found[obj] = NOBODYS if offer is None else offer
            elif len(chunks) > 1:
                self._read(client, chain, part, range(chunk, chunk + 1))
            elif got.states[i] not in _GONE:
                self.wrong.append(f"not to be had: {obj[0].hex()} {part}: {got.states[i].name}")


def _listed(clients: Iterable[KVClient]) -> set[Object]:
    return {
        (entry.key, part)
        for client in clients
        for entry in client.list(timeout_s=TIMEOUT_S)
        for part in entry.parts
    }


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in ascending order as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
