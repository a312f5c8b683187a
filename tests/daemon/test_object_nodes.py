"""Two daemons, two data directories, one bucket on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from daemon.object_nodes import (
    MIB,
    SECRET,
    Node,
    bucket_toml,
    got,
    nodes,
    payloads,
    prefix,
    same,
)
from obstore.store import S3Store
from tiers.object_servers import SECRET_KEY, S3Server, free_port

from kvstored.kvctl.command import main as kvctl
from kvstored.tiers.object.format import HEADER_BYTES
from kvstored_client import Prefix
from kvstored_client.identity import derive_namespace_salt

CHUNKS = 6


@pytest.fixture(scope="module")
def toml(s3_server: S3Server) -> str:
    return bucket_toml(s3_server.url(), s3_server.endpoint)


@pytest.fixture(scope="module")
def pair(toml: str) -> Iterator[list[Node]]:
    with nodes(2, toml) as made:
        yield made


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_fresh_node_serves_what_another_stored(pair: list[Node], remote: bool) -> None:
    a, b = pair
    of, data = prefix(CHUNKS, 10 + remote), payloads(CHUNKS, 10 + remote)
    uploaded, fetched = a.drained().bucket.uploaded_bytes, b.status().bucket.fetched_bytes
    assert not a.client(remote=remote).put(of, data).reason
    assert a.drained().bucket.uploaded_bytes - uploaded == CHUNKS * MIB
    there = b.client(remote=remote)
    assert there.match(of).chunks == 0
    found = there.match(of, depth="pool")
    assert (found.chunks, found.nbytes) == (CHUNKS, CHUNKS * MIB)
    assert {state.name for state in found.states} == {"IN_OBJECT"}
    assert found.eta_ms > 0
    answer, into = got(there, of, CHUNKS)
    assert same(into, data)
    assert answer.bytes_by_tier == {"object": CHUNKS * MIB}
    assert {state.name for state in answer.states} == {"IN_OBJECT"}
    assert b.status().bucket.fetched_bytes - fetched == CHUNKS * MIB
    answer, into = got(there, of, CHUNKS)
    assert answer.bytes_by_tier == {"ram": CHUNKS * MIB}


def both_put(pair: list[Node], of: Prefix, seeds: tuple[int, int]) -> None:
    """The same prefix at once, with other bytes by each."""
    threads = [
        threading.Thread(target=node.client().put, args=(of, payloads(CHUNKS, seed)))
        for node, seed in zip(pair, seeds, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def conflicts(pair: list[Node]) -> int:
    return sum(
        outcome.count
        for node in pair
        for outcome in node.drained().bucket.outcomes
        if (outcome.verb, outcome.outcome) == ("upload", "conflict")
    )


def test_both_store_the_same_prefix_at_once_and_both_delete(pair: list[Node]) -> None:
    of, before = prefix(CHUNKS, 2), conflicts(pair)
    both_put(pair, of, (20, 21))
    assert conflicts(pair) - before == CHUNKS
    for node, seed in zip(pair, (20, 21), strict=True):  # each keeps what it acknowledged
        answer, into = got(node.client(), of, CHUNKS)
        assert same(into, payloads(CHUNKS, seed))
        assert "object" not in answer.bytes_by_tier
    for node in pair:
        assert node.client().delete(of).reason == ""
    for node in pair:
        assert node.client().match(of, depth="pool").chunks == 0
        assert not got(node.client(), of, CHUNKS)[0].chunks


def test_a_delete_by_who_never_held_it_reaches_the_bucket(pair: list[Node]) -> None:
    a, b = pair
    of = prefix(2, 3)
    assert not a.client().put(of, payloads(2, 3)).reason
    a.drained()
    assert b.client().match(of, depth="pool").chunks == 2
    assert b.client().delete(of).reason == ""
    assert b.client().match(of, depth="pool").chunks == 0
    assert a.client().match(of).chunks == 2, "what another node holds itself stays"


def test_kvctl_tiers_shows_the_bucket_and_no_secret(
    pair: list[Node], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvctl(["tiers", "--target", pair[0].admin_target]) == 0
    shown = capsys.readouterr().out
    assert "s3://" in shown
    assert "owed" in shown
    assert SECRET_KEY not in shown + pair[0].log + str(pair[0].status())


def test_what_is_left_when_every_disk_is_lost(pair: list[Node], s3_server: S3Server) -> None:
    a, b = pair
    rotten, good = prefix(2, 4), payloads(2, 4)
    assert not a.client().put(rotten, good).reason
    a.drained()
    _spoil(a, s3_server, rotten.keys(derive_namespace_salt(SECRET.encode(), "default"))[:32])
    answer, _ = got(b.client(), rotten, 2)
    assert (answer.chunks, answer.reason) == (0, "corrupt")
    assert not b.client().put(rotten, good).reason
    of = prefix(CHUNKS, 5)
    both_put(pair, of, (50, 51))
    lone, data = prefix(CHUNKS, 6), payloads(CHUNKS, 6)
    assert not a.client().put(lone, data, tenant="acme").reason
    conflicts(pair)
    for node in pair:
        node.kill()
        node.wipe()
    b.start()
    _, into = got(b.client(), rotten, 2)
    assert same(into, good)
    _, into = got(b.client(), of, CHUNKS)
    sides = [payloads(CHUNKS, 50), payloads(CHUNKS, 51)]
    assert all(
        any(np.array_equal(chunk, side[i]) for side in sides) for i, chunk in enumerate(into)
    )
    with b.client().acquire(lone, stop=CHUNKS) as lease:
        assert all(np.array_equal(lease[i], data[i]) for i in range(CHUNKS))
    assert kvctl(["purge", "--target", b.admin_target]) == 2, "it has to be meant"
    assert kvctl(["purge", "--yes", "--tenant", "acme", "--target", b.admin_target]) == 0
    assert b.client().match(lone, depth="pool").chunks == 0
    assert b.client().match(of, depth="pool").chunks == CHUNKS
    assert b.purge().bucket_objects >= CHUNKS + 2
    assert b.client().match(of, depth="pool").chunks == 0


def _spoil(node: Node, server: S3Server, key: bytes) -> None:
    """Flip a byte of the payload of a stored object."""
    store = S3Store.from_url(
        node.status().bucket.url,
        endpoint=server.endpoint,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    (path,) = [
        entry["path"] for page in store.list("v1") for entry in page if key.hex() in entry["path"]
    ]
    body = bytearray(store.get(path).bytes())
    body[HEADER_BYTES + 5] ^= 1
    store.put(path, bytes(body))


def test_that_nothing_owed_is_remembered_is_said(
    s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with nodes(1, bucket_toml(s3_server.url(), s3_server.endpoint), spoilt="object") as (a,):
        assert not a.client().put(prefix(1, 9), payloads(1, 9)).reason
        assert a.drained().bucket.uploaded_bytes == MIB
        assert kvctl(["tiers", "--target", a.admin_target]) == 0
        assert "ok; what is owed is not remembered over a restart" in capsys.readouterr().out


def test_what_was_owed_goes_up_after_a_restart(s3_server: S3Server) -> None:
    with nodes(1, bucket_toml("s3://b/p", f"http://127.0.0.1:{free_port()}")) as (a,):
        of, data = prefix(3, 7), payloads(3, 7)
        assert not a.client().put(of, data, durability="durable").reason
        assert a.status().bucket.backlog_objects == 3
        lone = prefix(1, 8)
        assert not a.client().put(lone, payloads(1, 8)).reason
        answer = a.client().delete(lone, timeout_s=0.5)
        assert answer.reason, "not acknowledged"
        assert "the bucket has not confirmed it" in answer.detail
        assert a.client().match(lone).chunks == 0
        a.stop()
        a.toml = bucket_toml(s3_server.url(), s3_server.endpoint)
        a.start()
        assert a.drained().bucket.uploaded_bytes == 3 * MIB
