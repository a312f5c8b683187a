"""Daemons that share a bucket, each with a data directory of its own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support_daemon import GIVE_UP_S, Daemon
from tiers.object_servers import free_port

from kvstored.kvctl.wire import Wire
from kvstored_client import GetResult, KVClient, KVFamily, KVPart, Prefix
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import methods

MIB = 1 << 20
SECRET = "the same on every node of a test"

FAMILY = KVFamily(
    model="test-model",
    weights="w",
    kv_dtype="float32",
    chunk_tokens=64,
    parts=(KVPart("kv", nbytes=MIB),),
)


def bucket_toml(url: str, endpoint: str = "", **more: object) -> str:
    """Section [object] of a server, or of a directory."""
    lines = ["[object]", f'url = "{url}"']
    if endpoint:
        lines += [f'endpoint = "{endpoint}"', 'region = "us-east-1"', "allow_http = true"]
    lines += [
        f"{key} = {str(value).lower() if isinstance(value, bool) else value!r}".replace("'", '"')
        for key, value in more.items()
    ]
    return "\n".join(lines) + "\n"


@dataclass
class Node(Daemon):
    """One daemon over a shared bucket. `toml`: what is added to its configuration."""

    toml: str = ""
    clients: list[KVClient] = field(default_factory=list)
    tcp_port: int = 0

    def _config(self) -> str:
        file = Path(super()._config())
        self.tcp_port = self.tcp_port or free_port()
        listen = f'[listen]\ntcp = "127.0.0.1:{self.tcp_port}"\ninsecure = true'
        secret = f'deployment_secret = "{SECRET}"'
        text = file.read_text().replace("[listen]", f"{secret}\n{listen}", 1)
        file.write_text(text + self.toml)
        return str(file)

    def client(self, *, remote: bool = False) -> KVClient:
        """A client that is closed with the node: through shared memory, or as from elsewhere."""
        made = KVClient(f"dns:///127.0.0.1:{self.tcp_port}" if remote else self.target)
        self.clients.append(made)
        return made

    def status(self) -> admin.StatusReply:
        with closing(Wire(self.admin_target, "default", None, GIVE_UP_S)) as wire:
            return wire.ask(methods.STATUS, admin.StatusRequest(), admin.StatusReply)

    def purge(self, tenant: str = "") -> admin.PurgeReply:
        request = admin.PurgeRequest(namespace="default", tenant=tenant)
        with closing(Wire(self.admin_target, "default", None, GIVE_UP_S)) as wire:
            return wire.ask(methods.PURGE, request, admin.PurgeReply)

    def drained(self) -> admin.StatusReply:
        """Its status, once nothing is owed to the bucket."""
        until = time.monotonic() + GIVE_UP_S
        while (now := self.status()).bucket.backlog_objects:
            assert time.monotonic() < until, self.log
            time.sleep(0.02)  # the daemon has no word for it but its status
        return now

    def wipe(self) -> None:
        """Lose everything that it had on disk; it must not be running."""
        assert self.child is None
        shutil.rmtree(self.folder / "data")


@contextlib.contextmanager
def nodes(count: int, toml: str, spoilt: str = "") -> Iterator[list[Node]]:
    """Started daemons; nothing is left of them afterwards. `spoilt`: a directory of their data
    directories that they cannot have, since a file is in its place.
    """
    with contextlib.ExitStack() as stack:
        made: list[Node] = []
        for _ in range(count):
            folder = Path(tempfile.mkdtemp(prefix="kv"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if spoilt:
                (folder / "data").mkdir()
                (folder / "data" / spoilt).touch()
            node = Node(folder, toml=toml)
            stack.callback(node.kill)
            node.start()
            made.append(node)
        try:
            yield made
        finally:
            for node in made:
                for client in node.clients:
                    client.close()


def prefix(chunks: int, seed: int = 0) -> Prefix:
    rng = np.random.default_rng(seed)
    return FAMILY.prefix(rng.integers(0, 50_000, chunks * 64).tolist())


def payloads(chunks: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng([7, seed])
    return [rng.integers(0, 256, MIB, np.uint8) for _ in range(chunks)]


def got(client: KVClient, of: Prefix, chunks: int) -> tuple[GetResult, list[NDArray[np.uint8]]]:
    """What a get brings, over memory that holds something else before."""
    into = [np.full(MIB, 0xA5, np.uint8) for _ in range(chunks)]
    return client.get(of, into, timeout_s=GIVE_UP_S), into


def same(a: Sequence[NDArray[np.uint8]], b: Sequence[NDArray[np.uint8]]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
