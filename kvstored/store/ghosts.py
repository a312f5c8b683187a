"""Why a chunk is not held any more: a bounded memory, so that a miss can name its reason."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from kvstored_client.identity import KEY_BYTES
from kvstored_client.proto import kvstore_pb2 as pb


class Ghosts:
    """The last `capacity` chunks of one namespace that were dropped, with the reason.

    Keys are remembered by 8 of their 32 bytes: a clash would misname a miss, never make a hit.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._reasons: dict[bytes, int] = {}

    def remember(self, key: bytes, reason: pb.ChunkState) -> None:
        """Note why a chunk went; the oldest note is forgotten when there are too many."""
        short = key[:8]
        self._reasons.pop(short, None)
        self._reasons[short] = int(reason)
        if len(self._reasons) > self._capacity:
            del self._reasons[next(iter(self._reasons))]

    def remember_many(self, keys: Sequence[bytes], reason: pb.ChunkState) -> None:
        """Note it of many; only the last ones can be remembered."""
        for key in keys[-self._capacity :]:
            self.remember(key, reason)

    def __len__(self) -> int:
        """Chunks remembered."""
        return len(self._reasons)

    def forget(self, key: bytes) -> None:
        """The chunk is held again."""
        self._reasons.pop(key[:8], None)

    def reason(self, key: bytes) -> int:
        """Why the chunk is not held: a ChunkState of 16 or more."""
        return self._reasons.get(key[:8], pb.MISS_NEVER_STORED)

    def reasons(self, packed: bytes) -> list[int]:
        """`reason` of every key; whole keys back to back."""
        if not self._reasons:
            return [int(pb.MISS_NEVER_STORED)] * (len(packed) // KEY_BYTES)
        shorts = np.frombuffer(packed, "V8")[:: KEY_BYTES // 8].tolist()
        return list(map(self._reasons.get, shorts, repeat(int(pb.MISS_NEVER_STORED))))
