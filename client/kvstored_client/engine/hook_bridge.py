"""Lets the engine use a hook that loads at once instead of in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockTable
from kvstored_client.engine.hook import KVStoreHook
from kvstored_client.engine.types import Loaded, PendingLoad, Request, StoreHook, TakeBlocks


def hook_face(hook: KVStoreHook) -> StoreHook:
    """What the engine calls."""
    return _LoadsAtOnce(hook)


@dataclass(frozen=True, slots=True)
class _Done:
    loaded: Loaded

    def ready(self) -> bool:
        return True

    def finish(self) -> Loaded:
        return self.loaded

    def cancel(self) -> None:
        self.loaded.blocks.clear()


class _LoadsAtOnce:
    def __init__(self, hook: KVStoreHook) -> None:
        self._hook = hook

    @property
    def max_queued_chunks(self) -> int:
        return self._hook.max_queued_chunks

    def begin_match(
        self,
        request: Request,
        token_ids: Sequence[int],
        start: int,
        take_blocks: TakeBlocks,
        tokens_per_s: float,
    ) -> PendingLoad:
        del tokens_per_s
        if start:
            return _Done(Loaded(reason="declined"))
        table = BlockTable(self._hook._pool)
        table.append(take_blocks(len(token_ids) // CHUNK_TOKENS))
        loaded = self._hook.load(token_ids, table, request.request_salt)
        came = table.blocks[: loaded.chunks]
        table.blocks = table.blocks[loaded.chunks :]
        table.release()
        return _Done(Loaded(came, loaded.bytes_by_tier, loaded.reason))

    def store(
        self, request: Request, token_ids: Sequence[int], table: BlockTable, start: int
    ) -> int:
        return self._hook.store(token_ids, table, start, request.request_salt)

    def on_change(self, wake: Callable[[], None]) -> None:
        del wake

    def set_epoch(self, weights_epoch: int) -> None:
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        return self._hook.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        return self._hook.close(timeout_s)
