"""What a volume's files hold, looked at again after writes. Used on the verbs' loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from kvstored.tiers.nvme.finishing import Finishing


class Footprint:
    """The latest figure: the file system's own bookkeeping for the files grows a little."""

    def __init__(
        self,
        ask: Callable[[], int],
        executor: Executor,
        note: Callable[[str, Exception | None], None],
        works: Finishing,
    ) -> None:
        """`ask()` blocks, gives bytes, and raises OSError; it is asked now, and then in a thread of
        `executor`. `note("stat", error)` is told where it cannot be.
        """
        self._ask = ask
        self._executor = executor
        self._note = note
        self._works = works
        self._measuring = False
        self.held_bytes = ask()

    def measure(self) -> None:
        """Look at the files again, unless that is under way."""
        if not self._measuring:
            self._measuring = True
            self._works.start(self._measure())

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.held_bytes = await loop.run_in_executor(self._executor, self._ask)
        except OSError as error:
            self._note("stat", error)
        finally:
            self._measuring = False
