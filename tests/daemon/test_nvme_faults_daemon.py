"""A daemon of two volumes, one of which does each thing that a device can do wrong.

It costs misses, and copies that are not durable, said as such; the other volume and RAM do not
notice; once it ends all is as before; and no device keeps the daemon from stopping.
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daemon.daemon_helpers import Process, config_file, counters, fetch, process
from server.serving import Wire, header, run

from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 6  # of a prefix, so that each volume holds some
LARGE_BYTES = 256 << 10  # lies in a slot
SMALL_BYTES = 8 << 10  # lies in LMDB
HITS = {pb.IN_NVME, pb.IN_RAM}

SERVE = """
import json, os, sys, threading
from functools import partial
from kvstored.stopping import block_signals
block_signals()
from pathlib import Path
from kvstored import config, daemon
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.nvme import breaker, tier
tier.Patience = partial(
    breaker.Patience, probe_first_s=0.05, probe_longest_s=0.2, look_every_s=0.02
)
files = FaultyFiles(RealFiles())
loaded = config.load(Path(sys.argv[1]), os.environ)

def obey():
    stuck, faults = threading.Event(), []
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        for fault in asked or ():
            if fault.pop("stuck", False):
                fault["stuck"] = stuck
            faults.append(files.inject(Fault(**fault)))
        hits = sum(fault.hits for fault in faults)
        if asked == []:
            files.clear()
            stuck.set()
            stuck, faults = threading.Event(), []
        print(f"obeyed {number}: {hits}.", file=sys.stderr, flush=True)

threading.Thread(target=obey, daemon=True).start()
daemon.serve(loaded, files)
"""


@dataclass
class Daemon:
    """A daemon that does as it is told to its volume "bad"."""

    child: Process
    wire: Wire
    http: str
    told: int = field(default=0)

    def inject(self, **fault: object) -> None:
        """Have a fault of the volume from now on."""
        path = fault.pop("path", "/*")
        self._tell([{**fault, "path": f"*/bad{path}"}])

    def clear(self) -> None:
        """End the fault."""
        self._tell([])

    def hits(self) -> int:
        """How often the fault that there is has hit."""
        return self._tell(None)

    def _tell(self, what: list[dict[str, object]] | None) -> int:
        assert self.child.child.stdin is not None
        self.child.child.stdin.write(json.dumps(what) + "\n")
        self.child.child.stdin.flush()
        line = self.child.wait_line(f"obeyed {self.told}: ")
        self.told += 1
        return int(line.rsplit(" ", 1)[1].rstrip("."))

    def metrics(self) -> dict[str, float]:
        return counters(fetch(self.http, "/metrics")[1])

    def errors(self, volume: str) -> dict[str, float]:
        """Of a volume, by stage."""
        found = {
            name.partition('stage="')[2].partition('"')[0]: value
            for name, value in self.metrics().items()
            if name.startswith("kvstored_volume_errors_total") and f'volume="{volume}"' in name
        }
        return {stage: value for stage, value in found.items() if value}


def volumes_config(folder: Path) -> Path:
    file = config_file(folder)
    text = file.read_text().replace('[nvme]\ncap_bytes = "128MiB"\n', "[nvme]\n")
    text = text.replace("stop_timeout_s = 20", "stop_timeout_s = 2")
    for name in ("bad", "good"):
        (folder / name).mkdir()
        text += (
            f'[[nvme.volumes]]\nname = "{name}"\npath = "{folder}/{name}"\ncap_bytes = "64MiB"\n'
        )
    file.write_text(text)
    return file


@dataclass(frozen=True)
class Prefix:
    """Chunks of one length under a salt of their own."""

    salt: str
    length: int = LARGE_BYTES

    @property
    def data(self) -> list[bytes]:
        texts = [bytes([i]) + self.salt.encode() for i in range(CHUNKS)]
        return [(text * (self.length // len(text) + 1))[: self.length] for text in texts]

    def put(
        self, wire: Wire, *, durable: bool = True, offered: Sequence[int] = range(CHUNKS)
    ) -> set[int]:
        """States of the chunks offered, all of which must be wanted."""
        lengths = [self.length if i in offered else 0 for i in range(CHUNKS)]
        head = header(CHUNKS, lengths=lengths, salt=self.salt.encode(), parts=["extra"])
        head.durability = pb.DURABLE if durable else pb.ACCEPTED
        _, states = wire.put(head, [self.data[i] for i in offered])
        return {states[i] for i in offered}

    def get(self, wire: Wire, deadline_ms: int = 0) -> list[int]:
        """States by chunk, once what came is what was put."""
        request = pb.GetRequest(run=run(CHUNKS, salt=self.salt.encode(), parts=["extra"]))
        request.ctx.deadline_ms = deadline_ms
        objects, states, _ = wire.get(request)
        data = self.data
        assert all(content == data[i] for i, content in objects.items())
        assert {i for i, state in enumerate(states) if state in HITS} == set(objects)
        return list(states)


READ_FAULTS: dict[str, tuple[dict[str, object], set[int]]] = {
    # What happens to every read of a volume, and the states that chunks there come to. What lies
    # behind a corrupt chunk goes with it.
    "error": ({"operation": "preadv", "error": errno.EIO}, {pb.MISS_TIER_DOWN}),
    "nothing read": ({"operation": "preadv", "short": 0.0}, {pb.MISS_TIER_DOWN}),
    "half read": ({"operation": "preadv", "short": 0.5, "times": 3}, HITS),
    "slow": ({"operation": "preadv", "delay_s": 0.02}, HITS),
    "flip": ({"operation": "preadv", "flip": 8 * 5000}, {pb.MISS_CORRUPT, pb.MISS_EVICTED}),
    "stuck": ({"operation": "preadv", "stuck": True}, {pb.MISS_DEADLINE, pb.MISS_TIER_DOWN}),
}

WRITE_FAULTS: dict[str, tuple[dict[str, object], int]] = {
    # What happens to every change of a volume, and the length of objects that it concerns.
    "write error": ({"operation": "pwritev", "error": errno.EIO}, LARGE_BYTES),
    "write full": ({"operation": "pwritev", "error": errno.ENOSPC}, LARGE_BYTES),
    "half written": ({"operation": "pwritev", "short": 0.5, "times": 3}, LARGE_BYTES),
    "sync error": ({"operation": "fdatasync", "error": errno.EIO, "times": 1}, LARGE_BYTES),
    "slow sync": ({"operation": "fdatasync", "delay_s": 0.05}, LARGE_BYTES),
    "commit error": ({"operation": "commit", "error": errno.EIO}, LARGE_BYTES),
    "small commit error": ({"operation": "commit", "error": errno.ENOSPC}, SMALL_BYTES),
}


def prepare(folder: Path) -> Path:
    """A volume that holds what the reads are of, and no daemon; the configuration."""
    file = volumes_config(folder)
    with process("-m", "kvstored", "serve", "--config", str(file)) as first:
        first.wait_event("ready")
        wire = Wire(f"unix:{folder}/run/k.sock")
        wire.hello()
        for name in READ_FAULTS:
            assert Prefix(name).put(wire) == {pb.STORED}
        wire.close()
        first.child.terminate()
        assert first.status() == 0
    return file


def read_through(daemon: Daemon, name: str) -> None:
    """Have one read fault, and its end."""
    fault, states = READ_FAULTS[name]
    cold = Prefix(name)
    daemon.inject(**fault)
    found = cold.get(daemon.wire, deadline_ms=1000 if name == "stuck" else 0)
    assert daemon.hits() > 0
    assert set(found) <= states | HITS
    if not states & HITS:
        assert set(found) & states, "some of it lies on that volume"
        assert states != {pb.MISS_TIER_DOWN} or set(found) & HITS, "and some on the other"
    assert set(Prefix("warm").get(daemon.wire)) == {pb.IN_RAM}, "the RAM tier is undisturbed"
    daemon.clear()
    corrupt = pb.MISS_CORRUPT in found
    while not set(found) <= HITS:
        found = cold.get(daemon.wire)  # the tier probes by itself
        gone = [i for i, state in enumerate(found) if state not in HITS]
        if corrupt and gone:
            assert cold.put(daemon.wire, offered=gone) == {pb.STORED}, "it may be stored again"


def write_through(daemon: Daemon, name: str) -> None:
    """Have one write fault, and its end."""
    fault, length = WRITE_FAULTS[name]
    daemon.inject(**fault)
    numbers = itertools.count()
    while not daemon.hits():  # nothing is placed on a volume that has not yet recovered
        written = Prefix(f"{name} {next(numbers)}", length)
        assert written.put(daemon.wire) <= {pb.STORED, pb.STORED_NOT_DURABLE}
        assert set(written.get(daemon.wire)) == {pb.IN_RAM}
    daemon.clear()
    while Prefix(f"{name} {next(numbers)}", length).put(daemon.wire) != {pb.STORED}:
        pass  # the tier probes by itself


def test_each_fault_of_a_volume(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    with process("-c", SERVE, str(file)) as child:
        http = str(child.wait_event("ready")["http"])
        wire = Wire(f"unix:{tmp_path}/run/k.sock")
        wire.hello()
        daemon = Daemon(child, wire, http)
        Prefix("warm").put(wire)
        for name in READ_FAULTS:
            read_through(daemon, name)
        for name in WRITE_FAULTS:
            write_through(daemon, name)
        stages = {"read", "write", "sync", "commit"}
        while not stages <= daemon.errors("bad").keys():
            pass  # /metrics shows what was counted some time ago
        assert daemon.errors("good") == {}
        assert daemon.metrics()['kvstored_volume_state{state="ok",volume="bad"}'] == 1
        # And one that never ends: what it keeps from being durable is said, and no more.
        last = Prefix("last")
        daemon.inject(operation="*", stuck=True)
        last.put(wire, durable=False)
        assert set(last.get(wire)) == {pb.IN_RAM}
        wire.close()
        child.child.terminate()
        assert child.status() == 0
