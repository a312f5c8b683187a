"""The client on a real daemon: what is put comes back, in every form, and the small verbs work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from client_kinds import MakeClient, OnLoop, make_client
from support_daemon import TOKEN, Daemon, daemon

from kvstored_client import (
    AuthError,
    ChunkState,
    Extra,
    GroupRule,
    Hints,
    Iov,
    KVClient,
    KVFamily,
    KVPart,
    Prefix,
    PutState,
    Rows,
)
from kvstored_client.sending import PutSender

__all__ = ["daemon", "make_client"]
KIB = 1 << 10
SIZES = {"kv": 300 * KIB, "small": 4 * KIB}
CHUNKS = 6
_families = iter(range(1000))


def new_family(**changes: object) -> KVFamily:
    """A family that no other test has."""
    fields: dict[str, object] = {
        "parts": [KVPart("kv", SIZES["kv"]), KVPart("small", SIZES["small"])],
        **changes,
    }
    return KVFamily("m", f"w{next(_families)}", "float32", **fields)  # type: ignore[arg-type]


def objects(family: KVFamily, seed: int = 0, chunks: int = CHUNKS) -> list[bytes]:
    """Contents for every object of a prefix."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, part.nbytes, dtype=np.uint8).tobytes()
        for _ in range(chunks)
        for part in family.parts
    ]


def prefix_of(family: KVFamily) -> Prefix:
    """Six chunks, the last of them short."""
    return family.prefix(range(64 * CHUNKS - 10))


def test_what_is_put_comes_back_in_every_form(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    client = make_client(daemon.target)
    assert client.match(prefix).reason == "never_stored"
    put = client.put(prefix, data)
    assert (put.stored, put.reason) == (CHUNKS, "")
    again = client.put(prefix, b"".join(data))
    assert (again.stored, again.existed) == (0, CHUNKS)

    match = client.match(prefix)
    assert (match.chunks, match.tokens, match.nbytes) == (
        CHUNKS,
        64 * CHUNKS - 10,
        sum(map(len, data)),
    )
    assert match.eta_ms > 0

    big = bytearray(sum(map(len, data)))
    got = client.get(prefix, big)
    assert bytes(big) == b"".join(data)
    assert got.chunks == CHUNKS
    assert got.ok.all()
    assert sum(got.bytes_by_tier.values()) == got.nbytes == len(big)
    assert got.lengths.tolist() == list(map(len, data))

    apart = [bytearray(len(d)) for d in data]
    assert client.get(prefix, apart).chunks == CHUNKS
    assert apart == data

    kv = data[::2]
    pool = np.zeros((9, SIZES["kv"] + 64), np.uint8)
    rows = [8, 1, 3, 0, 7, 5]
    assert client.get(prefix, Rows(pool, rows), parts=["kv"]).chunks == CHUNKS
    assert [pool[r, : SIZES["kv"]].tobytes() for r in rows] == kv
    assert not pool[:, SIZES["kv"] :].any()
    assert not pool[[2, 4, 6]].any()

    memory = np.zeros(4 * SIZES["kv"], np.uint8)
    pieces = np.array([SIZES["kv"] - 5000, 5000])
    base = memory.ctypes.data
    iov = Iov(
        [base + 5000, base, base + SIZES["kv"] * 2, base + SIZES["kv"]],
        np.tile(pieces, 2),
        [2, 2],
    )
    assert client.get(prefix, iov, start=2, stop=4, parts=["kv"]).chunks == 2
    assert memory[5000 : SIZES["kv"]].tobytes() + memory[:5000].tobytes() == kv[2]

    swapped = bytearray(SIZES["kv"] + SIZES["small"])
    client.get(prefix, swapped, start=5, parts=["small", "kv"])
    assert bytes(swapped) == data[11] + data[10]


def test_parts_are_put_by_one_rank_each(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    client = make_client(daemon.target)
    assert client.put(prefix, data[0::2], parts=["kv"]).stored == CHUNKS
    assert client.match(prefix, parts=["kv"]).chunks == CHUNKS
    assert client.match(prefix).chunks == 0
    assert client.put(prefix, data[1:7:2], parts=["small"]).stored == 3
    assert client.match(prefix).chunks == 3
    into = [bytearray(len(d)) for d in data]
    got = client.get(prefix, into)
    assert got.chunks == 3
    assert got.ok.tolist() == [True] * 3 + [False] * 3
    assert into[:6] == data[:6]


def test_sizes_that_vary(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family(parts=[KVPart("kv", max_nbytes=64 * KIB)])
    prefix = family.prefix(range(192))
    data = [bytes([i + 1]) * n for i, n in enumerate((4 * KIB, 64 * KIB, 10_001))]
    client = make_client(daemon.target)
    assert client.put(prefix, data).stored == 3
    into = bytearray(3 * 64 * KIB)
    got = client.get(prefix, into)
    assert got.lengths.tolist() == [4 * KIB, 64 * KIB, 10_001]
    for i, d in enumerate(data):
        assert bytes(into[i * 64 * KIB :][: len(d)]) == d
    assert client.put(prefix, [d + b"x" for d in data[:1]]).outcomes == (PutState.REFUSED_LENGTH,)


def test_start_continues_a_prefix(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    client = make_client(daemon.target)
    assert client.put(prefix, data[:4]).stored == 2
    assert client.put(prefix, data[4:], start=2).stored == 4
    assert client.match(prefix).chunks == CHUNKS
    into = bytearray(sum(map(len, data[6:10])))
    assert client.get(prefix, into, start=3, stop=5).chunks == 2
    assert bytes(into) == b"".join(data[6:10])
    assert client.get(prefix, bytearray(), start=3, stop=3).chunks == 0
    empty = family.prefix([])
    assert client.match(empty).chunks == 0
    assert client.put(empty, []).outcomes == ()


def test_images_and_salts_keep_prefixes_apart_and_foreign_hashes_work(
    daemon: Daemon, make_client: MakeClient
) -> None:
    family = new_family()
    data = objects(family)
    client = make_client(daemon.target)
    plain = prefix_of(family)
    client.put(plain, data)
    picture = family.prefix(range(64 * CHUNKS - 10), extras=[Extra(130, 140, b"i" * 32)])
    assert client.match(picture).chunks == 2
    assert client.match(family.prefix(range(64 * CHUNKS), request_salt=b"user")).chunks == 0
    foreign = family.foreign([bytes([i]) * 8 for i in range(CHUNKS)], tokens=64 * CHUNKS - 1)
    assert client.match(foreign).chunks == 0
    assert client.put(foreign, data).stored == CHUNKS
    assert client.match(foreign).tokens == 64 * CHUNKS - 1


def test_a_hybrid_family_needs_only_what_its_rules_ask(
    daemon: Daemon, make_client: MakeClient
) -> None:
    size = 8 * KIB
    family = new_family(
        parts=[
            KVPart("kv", size),
            KVPart("win", size, group="swa"),
            KVPart("st", size, group="ssm"),
        ],
        groups={
            "default": GroupRule.all(),
            "swa": GroupRule.trailing(100),
            "ssm": GroupRule.last(),
        },
    )
    prefix = family.prefix(range(64 * CHUNKS))
    data = objects(family)
    # States after chunks 2 and 4 alone, as an engine would keep them.
    offered = [d if i % 3 < 2 or i // 3 in (2, 4) else None for i, d in enumerate(data)]
    client = make_client(daemon.target)
    assert client.put(prefix, offered).refused == 0
    match = client.match(prefix)
    assert match.chunks == 5
    needed = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)]
    assert match.nbytes == size * len(needed)
    into = bytearray(size * len(needed))
    got = client.get(prefix, into, stop=5)
    assert got.chunks == 5
    assert bytes(into) == b"".join(data[3 * chunk + part] for chunk, part in needed)
    lost = client.get(prefix, [bytearray(size) for _ in range(6 + 2 + 1)])
    assert lost.chunks == 0, "without the state after chunk 5 nothing can be resumed there"
    assert lost.ok.tolist() == [True] * 5 + [False]


def test_the_small_verbs(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    client = make_client(daemon.target, tenant="acme")
    client.put(prefix, data, ttl_ms=3_600_000)
    for verb in ("touch", "prefetch", "pin"):
        result = getattr(client, verb)(prefix)
        assert result.chunks == CHUNKS, verb
        assert set(result.states) == {ChunkState.IN_RAM}, verb
        assert result.reason == ""
    assert client.unpin(prefix).chunks == CHUNKS
    assert client.delete(prefix, 2, 4).chunks == 2
    match = client.match(prefix, mode="each")
    assert match.chunks + 2 <= CHUNKS
    assert match.states[2] is ChunkState.MISS_DELETED
    assert client.match(prefix).chunks == 2
    assert client.delete(prefix, 2, 4).chunks == 0
    assert client.touch(prefix, 2, 3).reason == "deleted"
    client.match(prefix, hints=Hints(session_id="s", turn=2, probe=True), request_id="r-1")


def test_usage_list_and_status(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    client = make_client(daemon.target, tenant="lister")
    client.put(prefix, data, durability="durable")
    entries = listed(client, family.fingerprint, 4)
    keys = prefix.keys(b"?" * 32)
    assert len(entries) == CHUNKS == len(keys) // 32
    assert {e.depth for e in entries} == set(range(CHUNKS))
    assert {e.end_token for e in entries} == {64, 128, 192, 256, 320, 64 * CHUNKS - 10}
    for entry in entries:
        assert entry.family == family.fingerprint
        assert entry.tenant == "lister"
        assert entry.nbytes == SIZES["kv"] + SIZES["small"]
        assert sorted(entry.parts) == ["kv", "small"]
    usage = client.usage()
    mine = {t.tier: t.charged_bytes for t in usage.tenants if t.tenant == "lister"}
    assert mine["ram"] >= sum(map(len, data))
    assert mine["nvme"] >= sum(map(len, data))
    assert {t.tier for t in usage.tiers} == {"ram", "nvme"}
    with pytest.raises(AuthError):
        client.status()
    status = make_client(daemon.admin_target).status()
    assert status.phase == "ready"
    assert status.objects >= len(data)
    assert {tier.name for tier in status.tiers} == {"ram", "nvme"}


def listed(client: KVClient | OnLoop, family: bytes, page: int) -> list:
    if isinstance(client, KVClient):
        return list(client.list(family, page))

    async def collect() -> list:
        return [entry async for entry in client.inner.list(family, page)]

    return client._wait(collect())


def test_a_namespace_needs_its_token(daemon: Daemon, make_client: MakeClient) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    for token in (None, "wrong-token-of-somebody"):
        client = make_client(daemon.target, "locked", token)
        assert client.match(prefix).reason == "unauthenticated"
        assert client.put(prefix, data).reason == "unauthenticated"
        with pytest.raises(AuthError):
            client.check()
    owner = make_client(daemon.target, "locked", TOKEN)
    assert owner.put(prefix, data).stored == CHUNKS
    assert owner.match(prefix).chunks == CHUNKS
    assert make_client(daemon.target).match(prefix).chunks == 0


def test_bytes_that_change_under_way_are_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = new_family()
    prefix, data = prefix_of(family), objects(family)
    memory = bytearray(b"".join(data))
    plan = PutSender.plan

    def meddle(sender: PutSender, message: bytes) -> None:
        memory[-1] ^= 1  # after the checksums were taken
        plan(sender, message)

    monkeypatch.setattr(PutSender, "plan", meddle)
    with KVClient(daemon.target) as client:
        client._transport._local = None  # there what counts is the copy that the daemon takes
        result = client.put(prefix, memory)
    assert result.outcomes[:-1] == (PutState.STORED,) * (CHUNKS - 1)
    assert result.outcomes[-1] is PutState.REFUSED_CHECKSUM


@pytest.fixture(autouse=True)
def _alive(daemon: Daemon) -> Iterator[None]:
    yield
    assert daemon.child is not None
    assert daemon.child.poll() is None, daemon.log
