"""Objects that no volume can ever take: said once, counted apart, and nobody else's trouble."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from store.support_store import MIB, client, open_store, payload, tokens

from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb


async def test_what_can_never_be_durable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_store(tmp_path, ram_bytes=96 * MIB) as store:
        large = await client(store, parts=[KVPart("large", nbytes=9 * MIB)])
        other = await client(store, size=MIB)
        assert store.writer is not None
        runs = [large.run(tokens(2, seed=seed)) for seed in (1, 2)]
        data = [payload(i, 9 * MIB) for i in range(2)]
        put_large = [large.put(run, data, durable=True) for run in runs]
        data = [payload(i, MIB) for i in range(2)]
        put_other = other.put(other.run(tokens(2)), data, durable=True)
        *refused, taken = await asyncio.gather(*put_large, put_other)
        assert [list(states) for states in refused] == [[pb.STORED_NOT_DURABLE] * 2] * 2
        assert list(taken) == [pb.STORED] * 2, "also in one batch with those"
        assert store.writer.not_written == {"too_large": 4}
        said = [r.getMessage() for r in caplog.records if "never be durable" in r.getMessage()]
        assert len(said) == 1
        assert f"{9 * MIB} B" in said[0]
        for run in runs:
            await store.delete(run)
