"""Everything that a network or an S3 server can do wrong, under load, between it and a daemon.

Engines get verified bytes or misses, by their deadline; each failure is counted under its own name;
and once it ends, the first probe that goes through brings the tier back, without a restart.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from daemon.object_nodes import Node, bucket_toml
from numpy.typing import NDArray
from object_proxy import ANY, OBJECTS, Fault, FaultProxy
from support_daemon import GIVE_UP_S
from tiers.object_servers import S3Server

from kvstored.tiers.object.guarded import PATIENCE, PROBE_TIMEOUT_S
from kvstored_client import GetResult, KVFamily, KVPart, Prefix

KIB = 1 << 10
SEED = 5
DEADLINE_S = 1.5
RANGE_TIMEOUT_S = 30  # only a caller's deadline ends a read that hangs

PROGRAM = """
import sys
from kvstored.stopping import block_signals
block_signals()
from dataclasses import replace
from pathlib import Path
from kvstored.tiers.object import assembly, obstore_bucket
from kvstored.tiers.nvme.breaker import Patience
quick = Patience(failures=8, probe_first_s=0.05, probe_longest_s=0.4, look_every_s=0.02)
assembly.make_pool.__kwdefaults__["patience"] = quick
nameless = Path(sys.argv[-1]).parent / "nameless"

class Bucket(obstore_bucket.ObstoreBucket):
    # its endpoint's name is one that nobody has, while there is that file
    @property
    def _open_store(self):
        if not nameless.exists():
            return self._store
        return obstore_bucket.make_store(
            replace(self._settings, endpoint="http://nobody.invalid")
        )

assembly.ObstoreBucket = Bucket
from kvstored.cli import run
run()
"""


def family(name: str, nbytes: int) -> KVFamily:
    return KVFamily(
        model=name,
        weights="w",
        kv_dtype="float32",
        chunk_tokens=16,
        parts=(KVPart("kv", nbytes=nbytes),),
    )


LARGE = family("large", 4096 * KIB + 80 * KIB)  # two ranges
SMALL = family("small", 200 * KIB)


class FaultyNode(Node):
    """One whose endpoint can lose its name, and whose breaker probes often."""

    def _program(self) -> list[str]:
        return ["-c", PROGRAM]

    def _config(self) -> str:
        file = Path(super()._config())
        text = file.read_text().replace('"128MiB"', '"20MiB"')
        file.write_text(text.replace('[nvme]\ncap_bytes = "192MiB"', "[nvme]\nenabled = false"))
        return str(file)

    def outcomes(self) -> Counter[tuple[str, str]]:
        found = self.status().bucket.outcomes
        return Counter({(row.verb, row.outcome): row.count for row in found})


@dataclass(frozen=True)
class Stored:
    """A prefix, and what its objects are."""

    prefix: Prefix
    data: list[NDArray[np.uint8]]

    @classmethod
    def make(cls, of: KVFamily, chunks: int, seed: int) -> Stored:
        rng = np.random.default_rng(seed)
        nbytes = of.parts[0].nbytes
        data = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(chunks)]
        return cls(of.prefix(rng.integers(0, 50_000, chunks * 16).tolist()), data)


def sample(count: int, seed: int) -> list[Stored]:
    """More than the RAM tier takes."""
    return [
        Stored.make(LARGE, 2, seed * 1000 + i) if i % 3 == 0 else Stored.make(SMALL, 5, seed + i)
        for i in range(count)
    ]


@dataclass
class Engines:
    """Threads that read prefixes, and store what they miss and what is new, as engines do."""

    node: FaultyNode
    stored: list[Stored]
    stop: threading.Event = field(default_factory=threading.Event)
    gets: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)
    failed: list[BaseException] = field(default_factory=list)

    def get(self, it: Stored, rng: random.Random) -> GetResult:
        """What a get brings, every byte of it compared."""
        into = [np.full(len(data), rng.randrange(256), np.uint8) for data in it.data]
        result = self.client.get(it.prefix, into, timeout_s=DEADLINE_S)
        for number in np.flatnonzero(result.ok):
            assert np.array_equal(into[number], it.data[number])
        return result

    def run(self, seed: int) -> None:
        try:
            rng = random.Random(seed)
            while not self.stop.is_set():
                it = rng.choice(self.stored)
                result = self.get(it, rng)
                self.gets.update(result.bytes_by_tier)
                self.reasons.add(result.reason)
                if result.chunks < len(it.data):
                    self.client.put(it.prefix, it.data, timeout_s=DEADLINE_S)
                if rng.random() < 0.2:
                    new = Stored.make(SMALL, 2, rng.randrange(1 << 40))
                    self.client.put(new.prefix, new.data, timeout_s=DEADLINE_S)
        except BaseException as error:  # told of by the test's own thread
            self.failed.append(error)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.client = self.node.client()
        threads = [threading.Thread(target=self.run, args=(SEED + i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
            assert self.failed == []

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait for something to become so while they work; only a status tells."""
        end = time.monotonic() + GIVE_UP_S
        while not true():
            assert not self.failed
            assert time.monotonic() < end, f"{what}: {self.node.status().bucket}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port, SEED) as made:
        yield made


@pytest.fixture(scope="module")
def node(proxy: FaultProxy, s3_server: S3Server) -> Iterator[FaultyNode]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    toml = bucket_toml(s3_server.url(), proxy.endpoint, range_timeout_s=RANGE_TIMEOUT_S)
    made = FaultyNode(folder, toml=toml + "janitor = false\n")  # then listings are probes
    try:
        made.start()
        yield made
    finally:
        for client in made.clients:
            client.close()
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def engines(node: FaultyNode) -> Iterator[Engines]:
    """Working, over prefixes that are in the bucket."""
    made = Engines(node, sample(9, SEED))
    client = node.client()
    for it in made.stored:
        assert client.put(it.prefix, it.data).reason == ""
        node.drained()
    with made.running():
        yield made


FAULTS = {
    # kind -> the outcome it is counted as, and whom it concerns
    "short": ("short", OBJECTS),
    "cut": ("short", OBJECTS),
    "long": ("long", OBJECTS),
    "whole": ("long", OBJECTS),
    "wrong": ("corrupt", OBJECTS),
    "500": ("server", ANY),
    "502": ("server", ANY),
    "429": ("throttled", ANY),
    "slow_down": ("throttled", ANY),
    "held": ("deadline", ANY),
    "reset": ("network", ANY),
    "lost": ("network", ANY),
    "expired": ("denied", ANY),
    "no_bucket": ("no_bucket", ANY),
    "nameless": ("name", ANY),
}
ALWAYS = {"ok", "absent", "existed", "conflict", "open", "cancelled", "deadline"}
PROBES = 3
"""One that goes well would do, but what failed late may have opened the breaker once more."""

REASONS = {"", "never_stored", "evicted", "tier_down", "deadline", "corrupt", "after_gap"}


@pytest.fixture(autouse=True)
def no_fault_stays(node: FaultyNode, proxy: FaultProxy) -> Iterator[None]:
    yield
    proxy.clear()
    (node.folder / "nameless").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_a_miss_under_its_own_name_and_passes(
    kind: str, engines: Engines, node: FaultyNode, proxy: FaultProxy
) -> None:
    outcome, methods = FAULTS[kind]
    rng = random.Random(f"{SEED} {kind}")
    before = node.outcomes()

    def grown() -> Counter[tuple[str, str]]:
        return node.outcomes() - before

    def named() -> bool:
        verbs = {verb for verb, name in grown() if name == outcome}
        uploads = kind in ("held", "nameless") or methods is OBJECTS or "put" in verbs
        return bool(verbs & {"get", "range"}) and uploads

    def begin(share: float) -> None:
        if kind == "nameless":
            (node.folder / "nameless").touch()
        else:
            proxy.inject(Fault(kind, methods, share=share, after=rng.randrange(12)))

    begin(rng.uniform(0.3, 0.7))  # but nobody loses a name now and then
    engines.until(named, f"{kind} now and then")
    begin(1.0)
    if kind == "wrong":  # whose bytes are wrong is there: what is read is dropped, and no more
        engines.until(lambda: grown()["get", "corrupt"] > 3, kind)
        assert node.status().bucket.health == "ok"
    else:
        engines.until(lambda: node.status().bucket.health != "ok", f"{kind} always")
        assert "open" in node.status().bucket.health
    if kind == "held":  # the daemon itself has ended what nobody has answered yet
        assert grown()["get", "deadline"]
    fetched = node.status().bucket.fetched_bytes
    if kind == "nameless":
        (node.folder / "nameless").unlink()
    else:
        proxy.clear()
    engines.until(lambda: node.status().bucket.fetched_bytes > fetched, f"after {kind}")
    assert proxy.seen["LIST"] <= PROBES
    assert {name for _, name in grown()} <= ALWAYS | {outcome}
    assert engines.reasons <= REASONS


def test_a_slow_network_costs_no_more_than_its_time(
    engines: Engines, node: FaultyNode, proxy: FaultProxy
) -> None:
    before, gets = node.outcomes(), engines.gets["object"]
    fault = proxy.inject(Fault("delay", delay_s=0.03))
    engines.until(lambda: fault.hits > 50 and engines.gets["object"] > gets, "delays")
    proxy.clear()
    assert {name for _, name in node.outcomes() - before} <= ALWAYS


def test_a_tier_that_is_back_is_noticed_within_ten_seconds() -> None:
    """A probe under way when the fault ends may run into its own time; the next one goes well."""
    assert PROBE_TIMEOUT_S + PATIENCE.probe_longest_s + PATIENCE.look_every_s < 10
