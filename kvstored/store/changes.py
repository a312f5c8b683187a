"""One primitive: wait until something has changed since one looked."""

from __future__ import annotations

import asyncio


class Changes:
    """A counter of changes to wait on. No change is missed, however many wait.

    Note `count`, look, and if there is nothing for you, `await after(count)`. Cancelling a wait
    leaves nothing behind.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something changed: wake everybody."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, count: int) -> None:
        """Wait until `count` is no longer the count."""
        while self.count == count:
            await self._changed.wait()
