"""One read over several volumes: all at once, each object told of as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvstored.tiers.base import VOLUME_SHIFT, Arrived, ObjectRead, ReadOutcome
from kvstored.tiers.nvme.member import Member

PLACE_MASK = (1 << VOLUME_SHIFT) - 1
"""What of a place is the volume's own."""


class SpreadRead:
    """The items of one read, their outcomes, and whom to tell. Used on the loop, once."""

    def __init__(self, items: Sequence[ObjectRead], arrived: Arrived | None) -> None:
        self.outcomes = [ReadOutcome.DOWN] * len(items)
        self._items = items
        self._arrived = arrived
        self._left = set(range(len(items)))

    def settle(self, indices: Iterable[int], outcome: ReadOutcome, pieces: bytes = b"") -> None:
        """Say what became of items; those settled before stay as they are."""
        for i in indices:
            if i in self._left:
                self._left.discard(i)
                self.outcomes[i] = outcome
                if self._arrived is not None:
                    self._arrived(i, outcome, pieces)

    async def run(self, works: Sequence[tuple[Member, list[int]]]) -> None:
        """Read items from their volumes; those in `works` of none are DOWN."""
        going = {i for _, indices in works for i in indices}
        self.settle(sorted(self._left - going), ReadOutcome.DOWN)
        try:
            if len(works) == 1:  # without a task: the volume knows of it before anything else runs
                await self._read(*works[0])
            elif works:
                await self._read_all(works)
        finally:
            self.settle(sorted(self._left), ReadOutcome.FAILED)

    async def _read(self, member: Member, indices: list[int]) -> None:
        if member.tier is None:
            self.settle(indices, ReadOutcome.DOWN)
            return
        items = [replace(self._items[i], place=self._items[i].place & PLACE_MASK) for i in indices]

        def arrived(at: int, outcome: ReadOutcome, pieces: bytes) -> None:
            self.settle((indices[at],), outcome, pieces)

        await member.tier.read(items, arrived)

    async def _read_all(self, works: Sequence[tuple[Member, list[int]]]) -> None:
        """Read from all at once. A delete that comes later waits until each volume knows of it
        (`Member.entering`).
        """
        loop = asyncio.get_running_loop()

        async def enter(entered: asyncio.Future[None], member: Member, indices: list[int]) -> None:
            entered.set_result(None)
            await self._read(member, indices)

        tasks = []
        entering = []
        for member, indices in works:
            entered = loop.create_future()
            member.entering.add(entered)
            entered.add_done_callback(member.entering.discard)
            entering.append(entered)
            tasks.append(loop.create_task(enter(entered, member, indices)))
        cancelled = False
        while waiting := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError:
                cancelled = True  # what is at a device is waited for: its memory is in use
                for task in waiting:
                    task.cancel()
        for entered in entering:
            entered.cancel()  # those that were cancelled before they began
        if cancelled:
            raise asyncio.CancelledError
        for task in tasks:
            task.result()
