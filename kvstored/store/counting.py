"""Turns the outcome of a match or get into hit and miss counts.

A hit counts when its bytes have been delivered (Get). A miss counts where it is answered: in a
Match for the chunks it did not find, in a Get for those asked for and not delivered. A client that
gets what it matched is therefore counted once per chunk.
"""

from __future__ import annotations

from kvstored.store.accounting import Accounts
from kvstored.store.api import Run
from kvstored.store.lookup import FIRST_MISS
from kvstored.tiers.base import TierKind
from kvstored_client.proto import kvstore_pb2 as pb

_TIER_NAMES = {int(TierKind.RAM): "ram", int(TierKind.NVME): "nvme", int(TierKind.OBJECT): "object"}

_HELD = bytes(range(FIRST_MISS))


def reason_label(state: int) -> str:
    """Metric label of a miss, like "evicted" for MISS_EVICTED."""
    return pb.ChunkState.Name(pb.ChunkState.ValueType(state)).removeprefix("MISS_").lower()


def _chunk_nbytes(run: Run) -> int:
    """Bytes that one chunk of the run has at most, for misses, whose real size nobody knows."""
    return sum(run.family.parts[p].bytes or run.family.parts[p].max_bytes for p in run.parts)


def count_match(accounts: Accounts, run: Run, states: bytes) -> None:
    """Count the misses of a match; its finds are counted when they are delivered."""
    if not run.probe:
        _count_misses(accounts, run, states)


def _count_misses(accounts: Accounts, run: Run, states: bytes) -> None:
    missed = set(states.translate(None, _HELD))
    if not missed:
        return
    nbytes = _chunk_nbytes(run)
    model = accounts.model_label(run.family.model)
    for state in missed:
        chunks = states.count(state)
        tokens = chunks * run.family.chunk_tokens
        if states[-1] == state:
            tokens -= run.family.chunk_tokens - run.chunk_tokens(len(states) - 1)
        key = (run.namespace, run.tenant, model, reason_label(state))
        accounts.misses[key].add(chunks, tokens, chunks * nbytes)


def count_leased(accounts: Accounts, run: Run, lengths_bytes: list[int]) -> None:
    """Count a run whose every chunk was handed out from RAM at once."""
    if not run.probe:
        key = (run.namespace, run.tenant, accounts.model_label(run.family.model), "ram")
        tokens = run.chunk_end_token(len(run) - 1) - run.start * run.family.chunk_tokens
        accounts.hits[key].add(len(run), tokens, sum(lengths_bytes))


def count_get(accounts: Accounts, run: Run, states: bytes, sizes: dict[int, int]) -> None:
    """Count a finished get: `sizes` has the bytes delivered per chunk of the run."""
    if run.probe:
        return
    model = accounts.model_label(run.family.model)
    for i, state in enumerate(states):
        if state in _TIER_NAMES:
            key = (run.namespace, run.tenant, model, _TIER_NAMES[state])
            accounts.hits[key].add(1, run.chunk_tokens(i), sizes.get(i, 0))
    _count_misses(accounts, run, states)
