"""[nvme] and its [[nvme.volumes]]: which directories the tier is in, and how much of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from kvstored.config import disks
from kvstored.config import host as hosts
from kvstored.config.disks import Disk
from kvstored.config.namespaces import NAME
from kvstored.config.paths import absolute_or_none
from kvstored.config.reader import Report, Section
from kvstored.config.settings import NvmeSettings, VolumeSettings
from kvstored.config.sizes import format_size
from kvstored.config.sources import Table, name_of

MIB = 1 << 20
GIB = 1 << 30

DEFAULT_VOLUME = "nvme"
"""The volume, and its folder in the data directory, where none is listed."""

REGISTRY = "volumes"
"""Folder of the data directory that is no volume's: what is known of those that are away."""

MOST_VOLUMES = 64
LEAST_BYTES = 16 * MIB
STEP_BYTES = 64 * MIB  # so that the default does not change with every byte of the disk
DEFAULT_BYTES = 10 * GIB
DEFAULT_SCRUB_BYTES_PER_S = 8 * MIB  # some 700 GB a day

_HEADER = "[[nvme.volumes]]"
_PATH = ("path", "", absolute_or_none, "write an absolute path")


def build_nvme(
    section: Section, tables: Sequence[Table], data_dir: Path, report: Report
) -> NvmeSettings:
    """The tier: of the volumes listed, or of one in the data directory where none is."""
    scrub_bytes_per_s = section.size("scrub_bytes_per_s", DEFAULT_SCRUB_BYTES_PER_S, least=0)
    nvme = _tier(section, tables, data_dir, report)
    return replace(nvme, scrub_bytes_per_s=scrub_bytes_per_s if nvme.enabled else 0)


def _tier(
    section: Section, tables: Sequence[Table], data_dir: Path, report: Report
) -> NvmeSettings:
    if not tables:
        return _one_volume(section, data_dir, report)
    enabled = section.boolean("enabled", default=True)
    inner = Report()
    volumes = _Listed(tables, data_dir, inner, enabled=enabled).build()
    cap_bytes = section.auto(
        "cap_bytes",
        sum(volume.cap_bytes for volume in volumes),
        f'each of {_HEADER} has a cap_bytes of its own: remove this one, or write "auto"',
    )
    report.add(inner)  # shown after [nvme], as TOML has it
    if not enabled:
        return NvmeSettings(enabled=False, cap_bytes=0)
    usable = (
        VolumeSettings(v.name, v.path, v.cap_bytes, v.drain) for v in volumes if v.path is not None
    )
    return NvmeSettings(enabled, cap_bytes, tuple(usable))


def _one_volume(section: Section, data_dir: Path, report: Report) -> NvmeSettings:
    try:
        disk_bytes = hosts.disk_for(data_dir)
    except OSError as error:
        section.complain("cap_bytes", f"the disk of {data_dir} cannot be asked: {error.strerror}")
        disk_bytes = 2 * DEFAULT_BYTES
    default = _default_bytes(disk_bytes)
    room = default >= LEAST_BYTES
    # Who gives a cap wants the tier: only the default does without it where the disk is small.
    enabled = section.boolean("enabled", default=room or not section.automatic("cap_bytes"))
    cap_bytes = section.size_or_auto("cap_bytes", max(default, LEAST_BYTES), least=LEAST_BYTES)
    if not enabled:
        if not room and not section.given("enabled"):
            report.warnings.append(
                f"the disk of {data_dir} has room for {format_size(disk_bytes)} only: there is no "
                "NVMe tier, and a restart loses everything"
            )
        return NvmeSettings(enabled=False, cap_bytes=0)
    path = data_dir / DEFAULT_VOLUME
    if cap_bytes > disk_bytes and disks.holds_volume(path):
        report.warnings.append(_smaller(DEFAULT_VOLUME, path, cap_bytes, disk_bytes))
    elif cap_bytes > disk_bytes:
        section.complain(
            "cap_bytes",
            f"{format_size(cap_bytes)} is above what the disk of {data_dir} can hold: "
            f"{format_size(disk_bytes)} (free space and what kvstored holds there already); lower "
            "it, or set nvme.enabled = false to do without the tier",
        )
    only = VolumeSettings(DEFAULT_VOLUME, path, cap_bytes, drain=False, listed=False)
    return NvmeSettings(enabled=True, cap_bytes=cap_bytes, volumes=(only,))


def _default_bytes(disk_bytes: int, volumes: int = 1) -> int:
    """Cap of each of some volumes on a disk, where none is given."""
    return min(DEFAULT_BYTES, disk_bytes // 2 // volumes // STEP_BYTES * STEP_BYTES)


def _smaller(names: str, path: Path, cap_bytes: int, room_bytes: int) -> str:
    """What is there already is no mistake of the configuration: others may have filled the disk."""
    return (
        f"{names}: {format_size(cap_bytes)} is above what the file system of {path} can hold: "
        f"{format_size(room_bytes)} (free space and what kvstored holds there already); until "
        "something is freed there, and the daemon started again, the cap is that much smaller"
    )


@dataclass(slots=True)
class _Volume:
    """One table while it is read. `path` None: it has none that can be used."""

    section: Section
    name: str
    path: Path | None
    drain: bool
    disk: Disk | None = None
    cap_bytes: int = 0


class _Listed:
    """Reads the listed volumes, and notes what is wrong with each and with all together."""

    def __init__(
        self, tables: Sequence[Table], data_dir: Path, report: Report, *, enabled: bool
    ) -> None:
        self._tables = tables
        self._data_dir = data_dir
        self._report = report
        self._enabled = enabled

    def build(self) -> list[_Volume]:
        """The volumes in order."""
        if len(self._tables) > MOST_VOLUMES:
            self._report.problems.append(
                f"nvme.volumes: {len(self._tables)} volumes; at most {MOST_VOLUMES} can be used"
            )
        self._names_differ()
        disk_of = self._look() if self._enabled else {}
        rooms = self._rooms(disk_of)
        volumes = [self._read(i, table, disk_of, rooms) for i, table in enumerate(self._tables, 1)]
        if self._enabled:
            self._paths_differ(volumes)
            self._caps_fit(volumes)
            self._warn(volumes)
        return volumes

    # ---- each ------------------------------------------------------------------------------------

    def _look(self) -> dict[Path, Disk]:
        silent = Report()
        paths = [Section("", table, silent).text(*_PATH) for table in self._tables]
        return disks.look_at(path for path in paths if path is not None)

    def _rooms(self, disk_of: dict[Path, Disk]) -> dict[int, tuple[int, int]]:
        """Device of each file system -> (bytes it can hold, volumes on it)."""
        rooms: dict[int, tuple[int, int]] = {}
        for disk in disk_of.values():
            if disk.known:
                held_bytes, count = rooms.get(disk.device, (disk.free_bytes, 0))
                rooms[disk.device] = (held_bytes + disk.held_bytes, count + 1)
        return rooms

    def _read(
        self,
        number: int,
        table: Table,
        disk_of: dict[Path, Disk],
        rooms: dict[int, tuple[int, int]],
    ) -> _Volume:
        label = name_of(table) or f"#{number}"
        section = Section(f"nvme.volumes.{label}", table, self._report, _HEADER)
        name = section.text("name", label, str, "write a text in quotes")
        faults = len(self._report.problems)
        path = section.text(*_PATH)
        if path is None and len(self._report.problems) == faults:
            section.complain("path", "give the absolute path of the volume's directory")
        volume = _Volume(section, name, path, section.boolean("drain", default=False))
        if path is not None and not NAME.fullmatch(name):
            section.complain(
                "name", "give a name of 1 to 64 letters, digits, dots, dashes and underscores"
            )
        volume.disk = disk_of.get(path) if path is not None else None
        default = DEFAULT_BYTES
        if volume.disk is not None and volume.disk.known:
            default = max(LEAST_BYTES, _default_bytes(*rooms[volume.disk.device]))
        volume.cap_bytes = section.size_or_auto("cap_bytes", default, least=LEAST_BYTES)
        section.finish()
        if volume.disk is not None and volume.disk.fault:
            section.complain("path", volume.disk.fault)
        return volume

    # ---- all together ----------------------------------------------------------------------------

    def _names_differ(self) -> None:
        names = Counter(name_of(table) for table in self._tables)
        for name, count in sorted(names.items()):
            if name and count > 1:
                self._report.problems.append(
                    f'nvme.volumes "{name}": {count} volumes of that name; give each a name of its '
                    "own (without one it is the last component of the path)"
                )

    def _paths_differ(self, volumes: Sequence[_Volume]) -> None:
        there = [(v, v.path, v.disk) for v in volumes if v.path is not None and v.disk is not None]
        data_dir = self._data_dir.resolve()
        registry = data_dir / REGISTRY
        for volume, _, disk in there:
            if disk.real == registry or registry in disk.real.parents:
                volume.section.complain("path", f"{self._data_dir / REGISTRY} is the daemon's own")
            if disk.real == data_dir or disk.real in data_dir.parents:
                volume.section.complain(
                    "path", f"must not hold daemon.data_dir, which is {self._data_dir}"
                )
        for (_, path_a, a), (later, _, b) in combinations(there, 2):
            same = (a.device, a.inode) == (b.device, b.inode) if a.known and b.known else False
            if same or a.real == b.real:
                later.section.complain("path", f"is the directory of another volume, {path_a}")
            elif a.real in b.real.parents or b.real in a.real.parents:
                where = "in" if a.real in b.real.parents else "above"
                later.section.complain(
                    "path", f"lies {where} another volume's, {path_a}; give each its own"
                )

    def _caps_fit(self, volumes: Sequence[_Volume]) -> None:
        for on_it in _by_file_system(volumes).values():
            caps_bytes = sum(v.cap_bytes for v, _ in on_it)
            room_bytes = on_it[0][1].free_bytes + sum(disk.held_bytes for _, disk in on_it)
            if caps_bytes <= room_bytes:
                continue
            fresh = [(v, disk) for v, disk in on_it if not disk.used]
            fresh_room_bytes = on_it[0][1].free_bytes + sum(disk.held_bytes for _, disk in fresh)
            if sum(v.cap_bytes for v, _ in fresh) <= fresh_room_bytes and len(fresh) < len(on_it):
                path = on_it[-1][1].real
                warning = _smaller(_names(on_it), path, caps_bytes, room_bytes)
                self._report.warnings.append(warning)
                continue
            last = (fresh or on_it)[-1][0]
            others = _names([other for other in on_it if other[0] is not last])
            more = f", with those of {others}," if others else ""
            last.section.complain(
                "cap_bytes",
                f"{format_size(caps_bytes)}{more} is above what the file system of {last.path} can "
                f"hold: {format_size(room_bytes)} (free space and what kvstored holds there "
                "already)",
            )

    def _warn(self, volumes: Sequence[_Volume]) -> None:
        warnings = self._report.warnings
        for volume in volumes:
            if volume.disk is not None and volume.disk.missing:
                warnings.append(
                    f"volume {volume.name}: {volume.path} {volume.disk.missing}; until it is back, "
                    "what it holds is missed"
                )
        for on_it in _by_file_system(volumes).values():
            if len(on_it) > 1:
                warnings.append(
                    f"volumes {_names(on_it)} are on one file system: they share its speed, and "
                    "fail together"
                )
        if all(volume.drain for volume in volumes):
            warnings.append("every volume is to be drained: nothing new is kept across a restart")


def _by_file_system(volumes: Sequence[_Volume]) -> dict[int, list[tuple[_Volume, Disk]]]:
    """The volumes whose directories are there, by device."""
    found: dict[int, list[tuple[_Volume, Disk]]] = {}
    for volume in volumes:
        if volume.disk is not None and volume.disk.known:
            found.setdefault(volume.disk.device, []).append((volume, volume.disk))
    return found


def _names(volumes: Sequence[tuple[_Volume, Disk]]) -> str:
    return ", ".join(volume.name for volume, _ in volumes)
