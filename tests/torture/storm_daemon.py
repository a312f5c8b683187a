"""The daemon of the storm: its volumes, what it wrote down of evictions, and its end."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from local.torture_daemon import MIB, SmallDaemon
from storm_content import SECRET
from storm_ledger import Left, Object
from support_daemon import GIVE_UP_S

from kvstored.fsck.check import Options, check_volume
from kvstored.fsck.findings import DAMAGE

SLACK_BYTES = 1 << 20
"""By which du and footprint may differ: files that come and go."""


@dataclass
class StormDaemon(SmallDaemon):
    """As SmallDaemon, with volumes of its own. `capped_bytes`: cap of a namespace, 0 for none."""

    volumes_mib: tuple[int, ...] = (96,)
    capped_mib: int = 0
    _journal_at: int = 0
    _log_at: int = 0

    def __post_init__(self) -> None:
        # By a name that has no local session beside it, a client goes by gRPC.
        (self.folder / "g.sock").symlink_to(self.folder / "k.sock")
        for path in self.volume_paths:
            path.mkdir()

    @property
    def remote_target(self) -> str:
        return f"unix://{self.folder}/g.sock"

    @property
    def volume_paths(self) -> list[Path]:
        return [self.folder / f"v{n}" for n in range(len(self.volumes_mib))]

    @property
    def namespaces(self) -> list[str]:
        return ["default", "capped"] if self.capped_mib else ["default"]

    @property
    def _journal(self) -> Path:
        return self.folder / "left"

    def _program(self) -> list[str]:
        return [str(Path(__file__).with_name("storm_serve.py")), str(self._journal)]

    def _config(self) -> str:
        for path in self.volume_paths:
            path.mkdir(exist_ok=True)
        volumes = "".join(
            f'[[nvme.volumes]]\npath = "{path}"\ncap_bytes = "{mib}MiB"\n'
            for path, mib in zip(self.volume_paths, self.volumes_mib, strict=True)
        )
        capped = f'[[namespace]]\nname = "capped"\nnvme_cap_bytes = "{self.capped_mib}MiB"\n'
        file = self.folder / "kvstored.toml"
        file.write_text(
            f"""
[daemon]
data_dir = "{self.folder}/data"
deployment_secret = "{SECRET}"
stop_timeout_s = 30
[listen]
unix = "{self.folder}/k.sock"
http = "{self.folder}/h.sock"
[ram]
cap_bytes = {self.ram_bytes}
{volumes}
{capped if self.capped_mib else ""}"""
        )
        return str(file)

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, and wait until it is ready. What it said and wrote before is another life's."""
        self._log_at = len(self.log) if (self.folder / "log").exists() else 0
        super().start()

    def strike(self) -> None:
        """SIGKILL, now, from any thread; `kill` waits for the end."""
        if self.child is not None:
            self.child.send_signal(signal.SIGKILL)

    def die_starting(self, after_s: float) -> bool:
        """Start it, and kill it so much later. Gives whether it was ready before."""
        timer = threading.Timer(after_s, self.strike)
        timer.start()
        ready = True
        try:
            self.start()
        except AssertionError:
            assert self.child is not None
            if self.child.wait(GIVE_UP_S) != -signal.SIGKILL:
                raise
            ready = False
        timer.join()
        self.kill()
        return ready

    def begin_stop(self) -> None:
        """SIGTERM; `ended` waits for the end."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Exit status, waited for."""
        assert self.child is not None
        child, self.child = self.child, None
        return child.wait(GIVE_UP_S)

    @property
    def said(self) -> str:
        """What it said in this life, or the last one."""
        return self.log[self._log_at :]

    def lose_indexes(self, random: Random) -> None:
        """Take from each volume the LMDB index of its slots, or half of it. It must not run."""
        for path in self.volume_paths:
            index = path / "index" / "data.mdb"
            if index.exists():
                if random.random() < 0.5:
                    index.unlink()
                else:
                    os.truncate(index, index.stat().st_size // 2)

    # ---- what it wrote down ----------------------------------------------------------------------

    def left(self) -> dict[Object, list[Left]]:
        """What it has written down since this was last asked for, by object."""
        notes: dict[Object, list[Left]] = defaultdict(list)
        for line in self._lines():
            at, _, key, part, tier, reason, kept = line.split()
            note = Left(int(at), tier, reason, "" if kept == "-" else kept)
            notes[bytes.fromhex(key), part].append(note)
        return notes

    def _lines(self) -> list[str]:
        if not self._journal.exists():
            return []
        with self._journal.open("rb") as file:
            file.seek(self._journal_at)
            text = file.read()
            self._journal_at = file.tell()
        return text.decode().splitlines()

    # ---- caps ------------------------------------------------------------------------------------

    def cap_faults(self) -> list[str]:
        """What is wrong with its figures, by its own account and by the file system's."""
        told = self.metrics()
        faults = []
        for number, (path, mib) in enumerate(zip(self.volume_paths, self.volumes_mib, strict=True)):
            held, name = held_bytes(path), f"v{number}"
            footprint = told[f"kvstored_volume_footprint_bytes:{name}"]
            charged = told[f"kvstored_volume_charged_bytes:{name}"]
            if held > mib * MIB or footprint > mib * MIB or charged > footprint:
                faults.append(f"{name}: {held} B held, {footprint=}, {charged=}, cap {mib} MiB")
            if abs(held - footprint) > SLACK_BYTES:
                faults.append(f"{name}: {footprint=}, but it holds {held} B")
        whole = told["kvstored_tier_charged_bytes:nvme"]
        for what, parts in (
            ("volumes", _sum(told, "kvstored_volume_charged_bytes:")),
            ("tenants", _sum(told, "kvstored_tenant_charged_bytes:", ":nvme")),
        ):
            if parts != whole:
                faults.append(f"charged to the tier: {whole}, to its {what}: {parts}")
        if self.capped_mib:
            charged = told["kvstored_namespace_charged_bytes:capped:nvme"]
            if charged > self.capped_mib * MIB:
                faults.append(f"namespace: {charged=}, cap {self.capped_mib} MiB")
        return faults

    def counters(self) -> dict[str, int]:
        """Of what may not happen, or must agree with what is written down."""
        told = self.metrics()
        return {
            "rotten": int(_sum(told, "kvstored_checksum_failures_total:")),
            "dropped at the start": int(_sum(told, "kvstored_recovery_dropped_objects:")),
            "tasks that died": int(_sum(told, "kvstored_task_restarts_total:")),
            "objects": int(told["kvstored_tier_objects:nvme"]),
        }

    def damage(self) -> list[str]:
        """What `kvctl fsck` finds in its volumes; it must not be running."""
        found = []
        for path in self.volume_paths:
            if (path / "superblock").exists():
                report = check_volume(path, Options(threads=2), lambda _: None)
                found += [
                    f"{path.name}: {f.kind} {f.where} {f.detail}"
                    for f in report.findings
                    if f.kind in DAMAGE
                ]
        return found


def _sum(told: dict[str, float], begin: str, end: str = "") -> float:
    return sum(v for k, v in told.items() if k.startswith(begin) and k.endswith(end))


def held_bytes(folder: Path) -> int:
    """What the file system holds of a directory, as du counts."""
    return sum(os.lstat(path).st_blocks * 512 for path in _all(folder))


def _all(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
