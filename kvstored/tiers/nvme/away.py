"""What is known of volumes that are away, kept durable off the loop. Belongs to the loop.

Memory is ahead of the registry's files: a tombstone counts from the moment it is added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import xxhash

from kvstored.errors import DataDirectoryError
from kvstored.io.base import Files
from kvstored.tiers.nvme.registry import Known, Registry, Tombstone
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable

_log = logging.getLogger(__name__)

R = TypeVar("R")
_UNSEEN = "dir-"


class Away:
    """Known volumes, and deletes that those away have not been told of."""

    def __init__(self, files: Files, directory: Path, timeout_s: float) -> None:
        """`timeout_s`: how long the registry's own disk may take before a delete is refused."""
        self._registry = Registry(files, directory)
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nvme-registry")
        self._pending: dict[str, list[Tombstone]] = {}

    async def load(self) -> None:
        """Read the registry. Raises DataDirectoryError."""
        try:
            self._pending = await self._do(self._registry.load)
        except OSError as error:
            raise DataDirectoryError(
                f"volume registry {self._registry.directory}: {error.strerror or error}",
                "make daemon.data_dir writable for the account kvstored runs as",
            ) from error

    @property
    def problems(self) -> tuple[str, ...]:
        """What was found damaged."""
        return tuple(self._registry.problems)

    def known(self, uuid: str) -> Known | None:
        """What is known of a volume."""
        return self._registry.known.get(uuid)

    def at(self, directory: Path) -> Known | None:
        """The volume that was last seen in a directory."""
        for known in self._registry.known.values():
            if known.directory == str(directory) and not known.uuid.startswith(_UNSEEN):
                return known
        return None

    def expected(self, directory: Path) -> Known | None:
        """The volume that belongs in a directory, or what stands in for it."""
        return self.at(directory) or self.known(unseen(directory))

    def all_known(self) -> list[Known]:
        """Every volume known."""
        return list(self._registry.known.values())

    async def remember(self, known: Known) -> None:
        """Know a volume as it is said to be; in its directory it replaces any other. Raises
        OSError.
        """
        await self._do(self._registry.put, known)

    async def expect(self, directory: Path, name: str) -> str:
        """The UUID, or what stands in for it, of the volume that belongs in a directory."""
        known = self.at(directory)
        if known is not None:
            return known.uuid
        stand_in = unseen(directory)
        if self.known(stand_in) is None:
            await self.remember(Known(stand_in, str(directory), name))
        return stand_in

    def pending(self, uuid: str) -> list[Tombstone]:
        """What a volume is to be told; a copy."""
        return list(self._pending.get(uuid, ()))

    def absent(self, present: Collection[str]) -> list[str]:
        """Known volumes that are none of those."""
        return [uuid for uuid in self._registry.known if uuid not in present]

    async def add(self, uuid: str, tombstones: Sequence[Tombstone]) -> None:
        """Have chunks not come back with a volume; durable on return.

        Raises DeleteNotDurable; in this run they do not come back all the same.
        """
        if not tombstones:
            return
        known = self.known(uuid)
        if known is None or known.empty:
            return
        self._pending.setdefault(uuid, []).extend(tombstones)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._do(self._registry.append, uuid, tombstones)
        except (OSError, TimeoutError) as error:
            raise DeleteNotDurable(
                f"{len(tombstones)} deletes could not be noted for volume {known.name}, which is "
                f"away: {error or 'no answer'}",
                "look at the disk of daemon.data_dir, and delete once more",
            ) from error
        now = self.known(uuid)
        if now is not None and now.empty:
            self._pending.pop(uuid, None)

    async def void(self, uuid: str) -> None:
        """Have a volume come back empty. Raises OSError."""
        known = self.known(uuid)
        if known is not None:
            await self.remember(replace(known, empty=True))
            self._pending.pop(uuid, None)

    async def told(self, uuid: str, count: int, *, emptied: bool = False) -> None:
        """A volume has been told the first `count` of its tombstones, durably. Raises OSError."""
        left = self._pending.get(uuid, [])[count:]
        if left:
            self._pending[uuid] = left
        else:
            self._pending.pop(uuid, None)
            if count:
                await self._do(self._registry.clear, uuid)
        known = self.known(uuid)
        if emptied and known is not None:
            await self.remember(replace(known, empty=False))

    async def drop(self, uuid: str) -> None:
        """Know a volume no longer. Raises OSError."""
        self._pending.pop(uuid, None)
        await self._do(self._registry.drop, uuid)

    async def _do(self, call: Callable[..., R], *arguments: object) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, call, *arguments)

    def close(self) -> None:
        """Take no more; what is under way is not waited for."""
        self._pool.shutdown(wait=False)


def unseen(directory: Path) -> str:
    """Stands in for the UUID of a volume that has not been seen yet."""
    return _UNSEEN + xxhash.xxh3_64_hexdigest(str(directory).encode())
