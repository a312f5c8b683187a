"""A durable put of what RAM alone still has sends it down once more."""

from __future__ import annotations

import errno
from pathlib import Path

from store.support_store import MIB, client, open_store, payload, settle, tokens

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import TierKind
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096


async def test_what_the_tier_below_took_badly_is_written_by_the_next_durable_put(
    tmp_path: Path,
) -> None:
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, ram_bytes=16 * MIB, files=files) as store:
        c = await client(store)
        run = c.run(tokens(4))
        contents = [payload(i, SIZE) for i in range(4)]
        files.inject(Fault("pwritev", "*/data", error=errno.EIO))
        await c.put(run, contents)
        await settle(store)
        files.clear()
        nvme = store.tiers[TierKind.NVME]
        assert nvme.usage().objects == 0
        assert await c.put(run, contents, durable=True) == bytes([pb.EXISTED]) * 4
        assert nvme.usage().objects == 4
        assert await c.put(run, contents, durable=True) == bytes([pb.EXISTED]) * 4
        assert nvme.usage().objects == 4
