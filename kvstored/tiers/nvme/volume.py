"""A volume's directory: lock, superblock, plan and files. Formatting and opening, no objects.

Everything blocks and is meant for a thread. A directory that cannot be used at all is a
DataDirectoryError that says what to do; a damaged part that can be made again is a line in
`problems`.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstored.errors import DataDirectoryError
from kvstored.io.base import Files
from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.device import DataFile, aligned_block
from kvstored.tiers.nvme.failures import VolumeAway
from kvstored.tiers.nvme.format import BLOCK_BYTES, DamagedError, NewerFormatError, Superblock
from kvstored.tiers.nvme.index import Environment
from kvstored.tiers.nvme.index_process import IndexProcess

_log = logging.getLogger(__name__)

LOCK, SUPERBLOCK, DATA, FORMATTING = "LOCK", "superblock", "data", "formatting"
INDEX, SMALL = "index", "small"
_NOT_OURS = {LOCK, "lost+found"}
_ASIDE_MARK = ".damaged-"
ASIDE_KEPT = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """How a volume is to be. Sizes of 0 stand for the default for the cap."""

    directory: Path
    cap_bytes: int
    region_bytes: int = 0
    small_bytes: int = 0
    walk_timeout_s: float = 60.0
    threads: int = 4
    make_directory: bool = True
    """Where it is missing, with what is above it; else it is where a device is to be mounted."""
    read_payload: bool = False
    """Whether the start reads the bytes of small objects, too: the last index child has died."""
    given_up: str = ""
    """An environment that is set aside whatever a walk says: it kills one child after the other."""


@dataclass(slots=True)
class Volume:
    """An open, locked volume."""

    files: Files
    settings: Settings
    superblock: Superblock
    plan: layout.Plan
    data: DataFile
    lock_fd: int
    process: IndexProcess
    regions: int  # that exist; fewer than planned where the file system is full
    fresh: bool  # formatted just now
    problems: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """Where the volume is."""
        return self.settings.directory

    @property
    def cap_bytes(self) -> int:
        """The cap that holds: a file system full below the configured one is a smaller cap."""
        missing = self.plan.regions - self.regions
        return self.plan.cap_bytes - missing * self.plan.region_bytes

    def environment(self, name: str) -> Environment:
        """Open one of the LMDB environments, or make it."""
        path = self.directory / name
        if not _exists(self.files, path):
            self.files.mkdir(path)
            self.files.sync_directory(self.directory)
        size = self.plan.index_bytes if name.startswith(INDEX) else self.plan.small_bytes
        return Environment(self.files, self.process, path, size, self.superblock.volume)

    def footprint_bytes(self) -> int:
        """What the file system says all files of the volume hold."""
        return _held_bytes(self.files, self.directory)

    def set_aside(self, name: str, why: str) -> None:
        """Put a damaged environment out of the way, keeping its beginning to be looked at."""
        self.problems.append(f"{name}: {why}; set aside and made again")
        _log.error("%s/%s: %s; set aside", self.directory, name, why)
        source = self.directory / name
        if not _exists(self.files, source):
            return
        target = self.directory / f"{name}{_ASIDE_MARK}{time.time_ns()}"
        self.files.rename(source, target)
        self._shrink(target / "data.mdb")
        found = sorted(
            (n for n in self.files.listdir(self.directory) if _ASIDE_MARK in n),
            key=lambda n: n.rsplit("-", 1)[1],
        )
        for old in found[:-ASIDE_KEPT]:
            remove_tree(self.files, self.directory / old)
        self.files.sync_directory(self.directory)

    def _shrink(self, path: Path) -> None:
        if not _exists(self.files, path):
            return
        size = self.plan.aside_bytes // ASIDE_KEPT // BLOCK_BYTES * BLOCK_BYTES
        fd = self.files.open(path, os.O_RDWR)
        try:
            self.files.truncate(fd, min(size, self.files.stat(path).st_size))
        finally:
            self.files.close(fd)

    def close(self) -> None:
        """End the index child, close the data file and give the lock back."""
        self.process.close()
        self.data.close()
        self.files.close(self.lock_fd)


def open_volume(files: Files, settings: Settings) -> Volume:
    """Lock and open the volume in a directory, formatting it if the directory is empty.

    Raises DataDirectoryError; VolumeAway where a directory that is not to be made is missing.
    """
    directory = settings.directory
    try:
        if settings.make_directory:
            _make_directory(files, directory)
        else:
            _find_directory(files, directory)
        lock_fd = _lock(files, directory)
        try:
            return _open_with_child(files, settings, lock_fd)
        except BaseException:
            files.close(lock_fd)
            raise
    except OSError as error:
        raise DataDirectoryError(
            f"data directory {directory}: {error.strerror or error}",
            "make it exist, writable for the account kvstored runs as, on a file system with room",
        ) from error


def _open_with_child(files: Files, settings: Settings, lock_fd: int) -> Volume:
    process = IndexProcess(settings.directory)
    try:
        return _open_locked(files, settings, lock_fd, process)
    except BaseException:
        process.close()
        raise


def _open_locked(files: Files, settings: Settings, lock_fd: int, process: IndexProcess) -> Volume:
    directory = settings.directory
    problems: list[str] = []
    names = set(files.listdir(directory)) - _NOT_OURS
    if FORMATTING in names:
        for name in sorted(names - {FORMATTING}):
            remove_tree(files, directory / name)
        names = set()
    if names and SUPERBLOCK not in names and DATA not in names:
        raise DataDirectoryError(
            f"data directory {directory} holds files that are not kvstored's",
            "give kvstored a directory of its own",
        )
    if names:
        superblock = _superblock(files, directory, problems)
    else:
        superblock = _format(files, settings, process)
    plan = _plan(files, settings, superblock)
    _refuse_tiny(settings, plan)
    if names:
        plan = _grown(files, directory, plan, superblock, problems)
    data = DataFile(files, directory / DATA, superblock)
    try:
        regions = _allocate(files, data, plan, directory)
    except BaseException:
        data.close()
        raise
    if regions < plan.regions:
        problems.append(
            f"the file system is full: {regions} of {plan.regions} regions could be allocated"
        )
    return Volume(
        files, settings, superblock, plan, data, lock_fd, process, regions, not names, problems
    )


def _make_directory(files: Files, directory: Path) -> None:
    for path in [*reversed(directory.parents), directory]:
        if not _exists(files, path):
            files.mkdir(path)
            files.sync_directory(path.parent)


def _find_directory(files: Files, directory: Path) -> None:
    """Where its device is not mounted, what was made here would fill the file system below."""
    try:
        found = files.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        what = "does not exist"
    else:
        if stat.S_ISDIR(found.st_mode):
            return
        what = "is not a directory"
    raise VolumeAway(
        f"volume directory {directory} {what}", "mount its device, and make the directory on it"
    )


def _lock(files: Files, directory: Path) -> int:
    fd = files.open(directory / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        files.lock(fd)
    except BlockingIOError as error:
        files.close(fd)
        raise DataDirectoryError(
            f"data directory {directory} is in use by another process",
            "stop the other kvstored, or give this one another data directory",
        ) from error
    return fd


# ---- superblock ---------------------------------------------------------------------------------


def _superblock(files: Files, directory: Path, problems: list[str]) -> Superblock:
    """Of the two copies the one in the data file counts, if it is whole. The other is mended."""
    found: dict[str, Superblock] = {}
    faults = []
    silent: list[OSError] = []
    for name in (DATA, SUPERBLOCK):
        try:
            found[name] = Superblock.decode(_first_block(files, directory / name))
        except NewerFormatError as error:
            raise DataDirectoryError(
                f"data directory {directory} has {error}",
                "run the version of kvstored that wrote it, or give this one an empty directory",
            ) from error
        except (DamagedError, OSError) as error:
            faults.append(f"{name}: {error}")
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                silent.append(error)
    if silent and not found:
        raise DataDirectoryError(
            f"volume directory {directory}: the device does not give its superblocks "
            f"({'; '.join(faults)})",
            "see to the device, and leave what is there: the volume is taken up when it answers",
        ) from silent[0]
    if not found:
        raise DataDirectoryError(
            f"data directory {directory}: both superblocks are unreadable ({'; '.join(faults)})",
            "if nothing in it is needed, empty the directory and start again",
        )
    chosen = found.get(DATA) or found[SUPERBLOCK]
    if any(found.get(name) != chosen for name in (DATA, SUPERBLOCK)):
        problems.append(f"a superblock was mended from its copy ({'; '.join(faults) or 'differs'})")
        if not _exists(files, directory / DATA):
            _create(files, directory / DATA)
        _write_block(files, directory / DATA, chosen.encode())
        _write_superblock_file(files, directory, chosen)
    return chosen


def _first_block(files: Files, path: Path) -> bytes:
    fd = files.open(path, os.O_RDONLY)
    try:
        block = bytearray(BLOCK_BYTES)
        done = files.preadv(fd, [block], 0)
        return bytes(block[:done])
    finally:
        files.close(fd)


def _create(files: Files, path: Path) -> None:
    files.close(files.open(path, os.O_RDWR | os.O_CREAT))


def _write_block(files: Files, path: Path, block: bytes) -> None:
    fd = files.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        if files.pwritev(fd, [block], 0) != len(block):
            raise OSError(errno.EIO, "short write", str(path))
        files.fdatasync(fd)
    finally:
        files.close(fd)


def _write_superblock_file(files: Files, directory: Path, superblock: Superblock) -> None:
    fresh = directory / (SUPERBLOCK + ".new")
    _write_block(files, fresh, superblock.encode())
    files.rename(fresh, directory / SUPERBLOCK)
    files.sync_directory(directory)


def _format(files: Files, settings: Settings, process: IndexProcess) -> Superblock:
    """Make a new volume. Until the marker file is gone, a restart begins anew."""
    directory = settings.directory
    region_bytes = settings.region_bytes or layout.default_region_bytes(settings.cap_bytes)
    region_bytes = region_bytes // BLOCK_BYTES * BLOCK_BYTES
    small_bytes = settings.small_bytes or layout.default_small_bytes(settings.cap_bytes)
    plan = layout.make_plan(settings.cap_bytes, region_bytes, small_bytes)
    _refuse_tiny(settings, plan)
    _create(files, directory / FORMATTING)
    files.sync_directory(directory)
    superblock = Superblock(
        volume=uuid.uuid4().bytes,
        region_bytes=region_bytes,
        table_regions=plan.table_regions,
        created_ms=time.time_ns() // 1_000_000,
    )
    for name, size in ((INDEX, plan.index_bytes), (SMALL, plan.small_bytes)):
        files.mkdir(directory / name)
        env = Environment(files, process, directory / name, size, superblock.volume)
        env.commit()
        env.close()
    _create(files, directory / DATA)
    _write_block(files, directory / DATA, superblock.encode())
    _write_superblock_file(files, directory, superblock)
    files.unlink(directory / FORMATTING)
    files.sync_directory(directory)
    return superblock


# ---- sizes --------------------------------------------------------------------------------------


def _plan(files: Files, settings: Settings, superblock: Superblock) -> layout.Plan:
    """Divide the cap over what exists. A small-object file that exists is not made smaller."""
    small = settings.small_bytes or layout.default_small_bytes(settings.cap_bytes)
    path = settings.directory / SMALL / "data.mdb"
    if _exists(files, path):
        held = files.stat(path).st_size // BLOCK_BYTES * BLOCK_BYTES
        if held <= settings.cap_bytes // 2:
            small = max(small, held)
    return layout.make_plan(
        settings.cap_bytes,
        superblock.region_bytes,
        small,
        table_regions=superblock.table_regions,
    )


def _grown(
    files: Files, directory: Path, plan: layout.Plan, superblock: Superblock, problems: list[str]
) -> layout.Plan:
    """The plan, or what exists already, where the LMDB files are to be longer and the file system
    has no room for that and the regions. Without longer LMDB files, some of the regions will do.
    """
    held = {
        name: _length(files, directory / name) // BLOCK_BYTES * BLOCK_BYTES
        for name in (DATA, f"{INDEX}/data.mdb", f"{SMALL}/data.mdb")
    }
    data, index, small = held.values()
    more = sum(max(0, planned - now) for planned, now in _lmdb(plan, index, small))
    if not more:
        return plan
    system = files.statvfs(directory)
    room = system.f_bavail * system.f_frsize
    if more + max(0, plan.data_bytes - data) <= room:
        return plan
    regions = max(0, data - superblock.data_offset_bytes) // plan.region_bytes
    regions = min(plan.regions, regions)
    problems.append(f"the file system is full: the volume stays at {regions} regions")
    kept = replace(
        plan,
        regions=regions,
        index_bytes=min(plan.index_bytes, index or plan.index_bytes),
        small_bytes=min(plan.small_bytes, small or plan.small_bytes),
    )
    return replace(kept, cap_bytes=kept.total_bytes)


def _lmdb(plan: layout.Plan, index: int, small: int) -> list[tuple[int, int]]:
    """Length planned and length there is of each LMDB file; one that is not there is made anew."""
    return [(p, now) for p, now in ((plan.index_bytes, index), (plan.small_bytes, small)) if now]


def _length(files: Files, path: Path) -> int:
    return files.stat(path).st_size if _exists(files, path) else 0


def _refuse_tiny(settings: Settings, plan: layout.Plan) -> None:
    if plan.regions:
        return
    least = 2 * plan.region_bytes + plan.small_bytes + plan.index_bytes + plan.slack_bytes
    raise DataDirectoryError(
        f"data directory {settings.directory}: a cap of {settings.cap_bytes} B does not hold one "
        f"region of {plan.region_bytes} B beside its index",
        f"raise the cap to {least} B or more, or set smaller regions in an empty directory",
    )


def _allocate(files: Files, data: DataFile, plan: layout.Plan, directory: Path) -> int:
    """Give the data file real blocks for all its regions, or as many as there is room for."""
    start = data.superblock.data_offset_bytes
    size = files.stat(directory / DATA).st_size
    if size > plan.data_bytes:
        files.truncate(data.fd, plan.data_bytes)
    try:
        files.fallocate(data.fd, 0, plan.data_bytes)
        regions = plan.regions
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        regions = _allocate_some(files, data, plan)
        files.truncate(data.fd, start + regions * plan.region_bytes)
    files.fdatasync(data.fd)
    block = aligned_block()
    if files.preadv(data.fd, [block], 0) != BLOCK_BYTES:
        raise OSError(errno.EIO, "short read", str(directory / DATA))
    return regions


def _allocate_some(files: Files, data: DataFile, plan: layout.Plan) -> int:
    """Allocate region by region until the file system refuses; how many there are."""
    files.fallocate(data.fd, 0, data.superblock.data_offset_bytes)
    for region in range(plan.regions):
        try:
            files.fallocate(data.fd, data.superblock.region_offset(region), plan.region_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return region
    return plan.regions


def _exists(files: Files, path: Path) -> bool:
    try:
        files.stat(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(files: Files, path: Path) -> None:
    """Remove a file, or a directory of files; nothing there is as well."""
    try:
        names = files.listdir(path)
    except NotADirectoryError:
        files.unlink(path)
        return
    except FileNotFoundError:
        return
    for name in names:
        remove_tree(files, path / name)
    files.rmdir(path)


def _held_bytes(files: Files, path: Path) -> int:
    """Blocks of a directory and all below it; what vanishes meanwhile counts nothing."""
    try:
        found = files.stat(path)
        total = found.st_blocks * 512
        if stat.S_ISDIR(found.st_mode):
            total += sum(_held_bytes(files, path / name) for name in files.listdir(path))
    except FileNotFoundError:
        return 0
    return total
