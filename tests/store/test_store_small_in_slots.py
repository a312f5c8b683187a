"""Small objects beyond what LMDB takes of them lie in slots, and are charged for what they take."""

from __future__ import annotations

from pathlib import Path

from store.support_store import MIB, client, open_store, payload, settle, tokens
from store.test_store_storm import check_figures

from kvstored.store.index import NONE
from kvstored.store.store import Store
from kvstored.tiers.base import TierKind
from kvstored.tiers.nvme.format import is_small
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

LENGTH = 18_000
CHATS = 30
CHUNKS = 32


def in_slots(store: Store) -> tuple[int, int]:
    """Objects on NVMe: how many lie in slots, how many in LMDB."""
    index = store.namespaces["default"].index
    rows = [
        row
        for chunk in range(index.chunk_rows)
        if index.held(chunk)
        for row in index.object_rows(chunk)
    ]
    places = [place for row in rows if (place := index.place[TierKind.NVME][row]) != NONE]
    small = sum(map(is_small, places))
    return len(places) - small, small


async def test_accounts_agree_with_the_tier(tmp_path: Path) -> None:
    data = payload(1, LENGTH)
    for opened in range(2):
        async with open_store(tmp_path, nvme_bytes=20 * MIB) as store:
            check_figures(store)
            to = await client(store, parts=[KVPart("kv", nbytes=LENGTH)])
            for chat in range(CHATS):
                run = to.run(tokens(CHUNKS, 100 * opened + chat))
                states = await to.put(run, [data] * CHUNKS, durable=True)
                assert set(states) == {pb.STORED}
            await settle(store)
            slots, small = in_slots(store)
            assert slots
            assert small
            check_figures(store)
