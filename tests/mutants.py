"""Breaks the code on purpose, one rule at a time, and shows that the tests notice.

``make mutants``. Each mutant is a small edit to a copy of the tree; the tests named with it must
fail there. Exit status 1 if any mutant survives, or an edit no longer applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    """One edit (`old` becomes `new`, everywhere in `file`) and the tests that must go red."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "published though the bytes are not those announced",
        "kvstored/store/putting.py",
        "if announced and announced != got.checksum:",
        "if False:",
        ("tests/store/test_store_ram.py",),
    ),
    Mutant(
        "published before the bytes are hashed",
        "kvstored/server/frames.py",
        "        self._received.append(Received(index, self._whole.digest(), "
        'b"".join(self._pieces)))',
        "        self._received.append(Received(index, bytes(16), b''.join(self._pieces)))",
        ("tests/server",),
    ),
    Mutant(
        "readable when room is reserved",
        "kvstored/store/putting.py",
        "        self._open[self._next_ticket] = opened\n",
        "        self._open[self._next_ticket] = opened\n"
        "        for o in list(objects):\n"
        "            self._publish(opened, Received(o.index, bytes(16), bytes(8)),\n"
        "                          ns.index.find_many(offer.run.packed))\n",
        ("tests/store/test_store_ram.py",),
    ),
    Mutant(
        "namespace salt left out of the chain",
        "client/kvstored_client/identity/hashing.py",
        "encode_bytes(namespace_salt) + encode_bytes(fingerprint)",
        "encode_bytes(fingerprint)",
        ("tests/identity",),
    ),
    Mutant(
        "request salt left out of the chain",
        "client/kvstored_client/identity/hashing.py",
        " + encode_bytes(request_salt)",
        "",
        ("tests/identity",),
    ),
    Mutant(
        "usage counted from zero after a restart",
        "kvstored/tiers/nvme/volume_tier.py",
        "self._space.load(found.index, found.small)",
        "None",
        ("tests/store/test_store_nvme.py", "tests/tiers"),
    ),
    Mutant(
        "accounts counted from zero after a restart",
        "kvstored/store/recovery.py",
        "residency.place_many(one.ns, one.objects, tier, places)",
        "one.ns.index.place_many(one.objects, tier, places)",
        ("tests/store/test_store_nvme.py",),
    ),
    Mutant(
        "a lease ignored by eviction",
        "kvstored/store/store.py",
        "self.ram.leased(places[row])",
        "False",
        ("tests/store/test_store_ram.py",),
    ),
    Mutant(
        "a leased place freed at once",
        "kvstored/tiers/ram/places.py",
        "        if self._table.readers[row]:\n            self._table.state[row] = DOOMED\n"
        "        else:\n            self._free(row)",
        "        self._free(row)",
        ("tests/store/test_store_ram.py", "tests/tiers"),
    ),
    Mutant(
        "seals left off",
        "kvstored/tiers/ram/segment.py",
        "        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)\n",
        "",
        ("tests/tiers",),
    ),
    Mutant(
        "a segment that may be written through a new mapping",
        "kvstored/tiers/ram/segment.py",
        " | F_SEAL_FUTURE_WRITE\n",
        "\n",
        ("tests/tiers",),
    ),
    Mutant(
        "NVMe bytes handed out unverified",
        "kvstored/store/loader.py",
        "if outcome is not ReadOutcome.OK:",
        "if outcome not in (ReadOutcome.OK, ReadOutcome.CORRUPT):",
        ("tests/store/test_store_nvme.py",),
    ),
    Mutant(
        "a delete that does not wait for the disk",
        "kvstored/store/deleting.py",
        "        for tier in self._tiers:\n            await self._trash.flush(tier)\n",
        "",
        ("tests/store/test_store_nvme.py",),
    ),
    Mutant(
        "a delete that forgets the writes under way",
        "kvstored/store/deleting.py",
        "(dying := self._writer.dying(ns))",
        "(dying := [])",
        ("tests/store/test_store_faults.py",),
    ),
    Mutant(
        "a prefetch that keeps what it loaded leased",
        "kvstored/store/store.py",
        "future.add_done_callback(self._release_loaded)",
        "pass",
        ("tests/store/test_store_nvme.py",),
    ),
    Mutant(
        "views that outlive their put",
        "kvstored/store/putting.py",
        "let_go(wanted.view)",
        "pass",
        ("tests/store/test_store_ram.py",),
    ),
    Mutant(
        "leased chunks evicted all the same",
        "kvstored/store/store.py",
        "                self.ram.leased(places[row])\n",
        "                False\n",
        ("tests/server/test_local_machine.py",),
    ),
    Mutant(
        "a release that forgets the grants on their way",
        "kvstored/server/local/leases.py",
        "        if grants.stop is not None:\n            grants.stop()\n",
        "        grants.released = grants.stop is None\n",
        ("tests/server/test_local_machine.py",),
    ),
    Mutant(
        "memory counted as free that a client has not unmapped",
        "kvstored/tiers/ram/retirement.py",
        "self.segment is None and (self.clients is None or self.clients.done())",
        "self.segment is None",
        ("tests/server/test_local_machine.py",),
    ),
)


def run(mutant: Mutant, copy: Path) -> str:
    """Apply, test, put back. Gives "killed", "SURVIVED" or "DOES NOT APPLY"."""
    file = copy / mutant.file
    original = file.read_text()
    if mutant.old not in original:
        return "DOES NOT APPLY"
    file.write_text(original.replace(mutant.old, mutant.new))
    environment = dict(os.environ, PYTHONPATH=f"{copy}:{copy / 'client'}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=60", *mutant.tests]
    command.append("--hypothesis-profile=unshrunk")
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "killed (hung)"
    finally:
        file.write_text(original)
    if done.returncode == 1:
        return "killed"
    return "SURVIVED" if done.returncode == 0 else f"DOES NOT RUN: {done.stdout[-300:]!r}"


def main() -> int:
    """Run every mutant (or those whose name contains the argument)."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignore)
        for mutant in MUTANTS:
            if wanted in mutant.name:
                outcome = run(mutant, copy)
                bad += not outcome.startswith("killed")
                print(f"{outcome:16} {mutant.name}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
