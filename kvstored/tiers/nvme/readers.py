"""Who reads what just now: an object is deleted once nobody does. Used on the verbs' loop."""

from __future__ import annotations

import asyncio
from collections import Counter


class Readers:
    """Readers of each place of one volume."""

    def __init__(self) -> None:
        self._readers: Counter[int] = Counter()
        self._awaited: dict[int, asyncio.Future[None]] = {}

    def came(self, place: int) -> None:
        """One more reads it."""
        self._readers[place] += 1

    def went(self, place: int) -> None:
        """One of them is through."""
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            waiting = self._awaited.pop(place, None)
            if waiting is not None:
                waiting.set_result(None)

    async def none(self, place: int) -> None:
        """Wait until nobody reads it; nobody new may come."""
        if self._readers[place]:
            loop = asyncio.get_running_loop()
            await self._awaited.setdefault(place, loop.create_future())
