"""With a real daemon or without, the same bits: in every dtype and family, whatever becomes of it.

108 prompts on small random Llama, Qwen2 and Qwen3: logits and tokens of each, cold, hit in full and
in part, after a restart, after eviction, and with the daemon killed while they are computed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_support import NO_EOS, TINY, random_tensors
from numpy.typing import NDArray
from safetensors.torch import save_file
from support_daemon import Daemon

from kvstored_client import KVClient, KVFamily, KVPart, Timeouts
from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.checkpoint import Checkpoint, TokenizerSpec, load
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.family import family_of
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.hook import KVStoreHook
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.shadow import ShadowedHook
from kvstored_client.engine.types import EngineLimits, Request
from kvstored_client.identity import Prefix

FAMILIES = {
    "llama": replace(TINY, layers=2),
    "qwen2": replace(TINY, layers=2, kv_heads=1, qkv_bias=True),
    "qwen3": replace(TINY, layers=2, kv_heads=1, qk_norm=True, head_dim=24),
}
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (1, 40, 64, 65, 100, 127, 128, 129, 150, 180, 192, 200)
TIMEOUTS = Timeouts(match_s=30, get_s=60, put_s=60)
# A deadline of the hook's is a miss here, as it is anywhere; a busy machine must not make one.
DEADLINE_S = 60.0
PUT_S = 60.0
NVME_BYTES = 192 << 20
"""What the daemon's volume may hold; RAM has less."""


@dataclass
class Case:
    """One model, its prompts, and what it says to them without a store."""

    model: Model
    weights: str
    prompts: list[list[int]]
    logits: list[list[torch.Tensor]]

    def engine(self, client: KVClient | None, **options: Any) -> Engine:
        engine = make_engine(
            self.model,
            NO_EOS,
            store=client,
            weights=self.weights,
            blocks=50,
            limits=EngineLimits(own_prefixes=False, prefill_tokens=512),
            **options,
        )
        hook = engine.hook.hook if isinstance(engine.hook, ShadowedHook) else engine.hook
        if isinstance(hook, KVStoreHook):
            hook._deadline_s = DEADLINE_S
        return engine

    def requests(self) -> list[Request]:
        return [
            Request(
                f"{n}",
                prompt,
                Sampling(max_tokens=5, temperature=0.8 * (n % 2), seed=n, ignore_eos=True),
                keep_logits=True,
            )
            for n, prompt in enumerate(self.prompts)
        ]


class Running:
    """The prompts of one case under way at a time on one engine, stepped by the test."""

    def __init__(self, case: Case, engine: Engine) -> None:
        self.case = case
        self.engine = engine
        self.logits: list[list[torch.Tensor]] = [[] for _ in case.prompts]
        self.cached = [0] * len(case.prompts)
        self.bytes: dict[str, int] = {}
        self.reasons: set[str] = set()
        for request in case.requests():
            engine.add_request(request)

    def step(self) -> bool:
        """Whether there is more to come."""
        self.engine.wait(0.2)
        for event in self.engine.step():
            assert event.logits is not None
            at = int(event.request_id)
            if not self.logits[at]:
                self.cached[at] = event.cached_tokens
                self.reasons.add(event.cache.miss_reason)
                for tier, count in event.cache.bytes_by_tier.items():
                    self.bytes[tier] = self.bytes.get(tier, 0) + count
            self.logits[at].append(event.logits)
        assert self.engine.pool.free_blocks() + self.engine.pool.used_blocks() == 50 + 65
        return self.engine.has_requests()

    def finish(self) -> Running:
        while self.engine.has_requests():
            self.step()
        assert self.engine.close(PUT_S)
        assert self.engine.pool.used_blocks() == 0
        return self

    def right(self) -> list[bool]:
        """Of each prompt: whether its logits, and so its tokens, have the bits they should have."""
        return [
            len(got) == len(expected) and all(map(torch.equal, got, expected))
            for got, expected in zip(self.logits, self.case.logits, strict=True)
        ]


def run(case: Case, client: KVClient | None, **options: Any) -> Running:
    return Running(case, case.engine(client, **options)).finish()


def full_hits(case: Case) -> list[int]:
    """The last token is always computed."""
    return [min(n // CHUNK_TOKENS * CHUNK_TOKENS, n - 1) for n in LENGTHS]


def make_case(family: str, dtype: str, seed: int) -> Case:
    config = FAMILIES[family]
    kind = getattr(torch, dtype)
    tensors = {name: t.to(kind) for name, t in random_tensors(config, seed).items()}
    tokenizer = TokenizerSpec([], [], [], NO_EOS, "")
    model = Model(Checkpoint(Path("tiny"), 0, config, tokenizer, tensors))
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, config.vocab_size, n).tolist() for n in LENGTHS]
    case = Case(model, f"{seed:064x}", prompts, [])
    engine = make_engine(
        model, NO_EOS, blocks=50 + 64, limits=EngineLimits(own_prefixes=False, prefill_tokens=512)
    )
    case.logits = [[] for _ in prompts]
    case.logits = Running(case, engine).finish().logits
    return case


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Nine models, twelve prompts each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            make_case(family, dtype, 10 * n + m)
            for n, family in enumerate(FAMILIES)
            for m, dtype in enumerate(DTYPES)
        ]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Another number of threads may give other bits; and here one is fastest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SmallDaemon(Daemon):
    """Its RAM tier is soon full."""

    def _config(self) -> str:
        file = Path(super()._config())
        text = file.read_text().replace('"128MiB"', '"32MiB"')
        file.write_text(text)
        return str(file)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # Short: the path of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kvstored-"))
    daemon = SmallDaemon(folder)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(folder)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Witness]:
    with Witness(daemon.target, timeouts=TIMEOUTS) as client:
        yield client
        assert client.differing == 0


class Witness(KVClient):
    """Keeps what was put by any of them, and compares all that is got with it."""

    stored: ClassVar[dict[bytes, NDArray[np.uint8]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compared = 0
        self.differing = 0

    @staticmethod
    def keys(prefix: Prefix, start: int, count: int) -> list[bytes]:
        packed = prefix.family.fingerprint + prefix.keys(bytes(32))
        at = [32 * (1 + n) for n in range(start, start + count)]
        return [packed[:32] + packed[i : i + 32] for i in at]

    def put(self, prefix: Prefix, views: Any, start: int = 0, **options: Any) -> Any:
        with self.lock:
            for key, view in zip(self.keys(prefix, start, len(views)), views, strict=True):
                self.stored.setdefault(key, view.copy())
        return super().put(prefix, views, start, **options)

    def get(
        self, prefix: Prefix, into: Any, start: int = 0, stop: Any = None, **options: Any
    ) -> Any:
        got = super().get(prefix, into, start, stop, **options)
        with self.lock:
            for key, view in zip(self.keys(prefix, start, got.chunks), into, strict=False):
                self.compared += 1
                self.differing += not np.array_equal(self.stored[key], view)
        return got


class Killer(Witness):
    """Gets one at a time; at the twentieth the daemon dies, so that some loads came and some do
    not.
    """

    daemon: Daemon
    gets = 0
    turn = threading.Lock()

    def get(
        self, prefix: Prefix, into: Any, start: int = 0, stop: Any = None, **options: Any
    ) -> Any:
        with self.turn:
            self.gets += 1
            if self.gets == 20:
                self.daemon.kill()
            return super().get(prefix, into, start, stop, **options)


def prefixes(case: Case) -> list[Prefix]:
    """Of the prompts that have whole chunks."""
    family = family_of(case.model.config, case.weights, dtype=case.model.dtype)
    whole = [prompt[: len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS] for prompt in case.prompts]
    return [family.prefix(tokens) for tokens in whole if tokens]


def fill(case: Case, client: KVClient) -> None:
    """Have the store hold all chunks of the case's prompts."""
    if any(client.match(prefix).chunks < len(prefix) for prefix in prefixes(case)):
        assert all(run(case, client).right())


def test_cold_in_full_and_in_part(cases: list[Case], client: Witness) -> None:
    for case in cases:
        cold = run(case, client)
        assert cold.cached == [0] * len(LENGTHS)
        assert all(cold.right())
        warm = run(case, client)
        assert warm.cached == full_hits(case)
        assert all(warm.right())
        for prefix in prefixes(case):
            assert client.delete(prefix, start=1).chunks == len(prefix) - 1
        part = run(case, client)
        assert part.cached == [min(64, hit) for hit in full_hits(case)]
        assert all(part.right())
    assert client.compared == len(cases) * sum(n // 64 + min(1, n // 64) for n in LENGTHS)


def test_after_a_restart_of_the_daemon(cases: list[Case], daemon: Daemon, client: Witness) -> None:
    for case in cases:
        fill(case, client)
    daemon.stop()
    daemon.start()
    for case in cases:
        restarted = run(case, client)
        assert (restarted.cached, restarted.reasons) == (full_hits(case), {""})
        assert set(restarted.bytes) == {"nvme"}
        assert all(restarted.right())
    assert client.compared > 0


def test_after_eviction(cases: list[Case], client: Witness) -> None:
    for case in cases:
        fill(case, client)
    nbytes = 2 << 20
    family = KVFamily("other", "none", "bytes", 64, [KVPart("kv", nbytes=nbytes)])
    data = np.ones(nbytes, np.uint8)
    for number in range(NVME_BYTES // nbytes * 5 // 4):
        # One chunk each: no chain that would have to go from its end.
        stored = KVClient.put(client, family.prefix([number] * 64), [data], when_full="wait")
        assert stored.stored == 1
    hits, full = [], []
    for case in cases:
        evicted = run(case, client)
        hits += evicted.cached
        full += full_hits(case)
        assert all(evicted.right())
    assert sum(hits) < sum(full)


def test_daemon_killed_midway(cases: list[Case], daemon: Daemon, client: Witness) -> None:
    """All nine engines are under way, some prompts loaded, some about to be, when it dies."""
    for case in cases:
        fill(case, client)
    try:
        with Killer(daemon.target, timeouts=TIMEOUTS) as killer:
            killer.daemon = daemon
            running = [Running(case, case.engine(killer)) for case in cases]
            while under_way := [each for each in running if each.engine.has_requests()]:
                for each in under_way:
                    each.step()
            for each in running:
                assert all(each.finish().right())
        cached = [tokens for each in running for tokens in each.cached]
        assert 0 < sum(cached) < sum(n for case in cases for n in full_hits(case))
        assert killer.differing == 0
        for case in cases[: len(DTYPES)]:
            away = run(case, client)
            assert sum(away.cached) == 0
            assert all(away.right())
    finally:
        daemon.start()
    for case in cases[: len(DTYPES)]:
        fill(case, client)
        resumed = run(case, client)
        assert resumed.cached == full_hits(case)
        assert all(resumed.right())


def test_one_corrupt_chunk_fails_it(cases: list[Case], client: Witness) -> None:
    long = len(LENGTHS) - 1
    for case in cases:
        fill(case, client)
        engine = case.engine(client, shadow_fraction=1.0)
        assert isinstance(engine.hook, ShadowedHook)
        prefix = prefixes(case)[-1]
        wrong = np.empty((3, engine.pool.block_bytes), np.uint8)
        assert KVClient.get(client, prefix, list(wrong)).chunks == 3
        values = torch.from_numpy(wrong[0]).view(case.model.dtype)
        values[: len(values) // 2] += 0.5
        assert client.delete(prefix, reason="corrupt").chunks == 3
        assert KVClient.put(client, prefix, list(wrong)).stored == 3
        got = Running(case, engine)
        while got.step():
            pass
        assert got.cached == full_hits(case)
        assert got.right() == [True] * long + [False]
        assert engine.hook.checked.mismatched_chunks >= 1
        assert engine.hook.checked.checks == sum(n >= CHUNK_TOKENS for n in LENGTHS)
        assert engine.close(PUT_S)
        assert client.delete(prefix, reason="corrupt").chunks == 3
    assert client.differing == len(cases)
    client.differing = 0


# ---- what is another family --------------------------------------------------------------------


class Directory:
    """A small random Llama as a Hugging Face directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = random_tensors(FAMILIES["llama"])
        self.tensors["lm_head.weight"] = self.tensors["model.embed_tokens.weight"].clone()
        self.config: dict[str, object] = {
            "model_type": "llama",
            "vocab_size": TINY.vocab_size,
            "hidden_size": TINY.hidden_size,
            "intermediate_size": TINY.intermediate_size,
            "num_hidden_layers": 2,
            "num_attention_heads": TINY.heads,
            "num_key_value_heads": TINY.kv_heads,
            "head_dim": TINY.head_dim,
            "rope_theta": TINY.rope_theta,
            "rms_norm_eps": TINY.rms_epsilon,
            "max_position_embeddings": 1024,
            "hidden_act": "silu",
        }
        folder.mkdir()
        self.save()

    def save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))

    def engine(self, client: KVClient, dtype: str = "bfloat16") -> Engine:
        model = Model(load(self.folder, dtype=dtype))
        weights = weights_fingerprint(self.folder, 0, self.folder.parent / "cache")
        engine = make_engine(model, NO_EOS, store=client, weights=weights, context_tokens=512)
        assert isinstance(engine.hook, KVStoreHook)
        engine.hook._deadline_s = DEADLINE_S
        return engine


@dataclass
class Asked:
    """One prompt that nobody had before, and a store that has the first engine's chunks of it."""

    directory: Directory
    client: KVClient
    prompt: list[int]

    def hit(self, engine: Engine) -> int:
        """Tokens that an engine does not compute; what it computes gets stored."""
        done = engine.generate(self.prompt, Sampling(max_tokens=2, ignore_eos=True))
        assert engine.hook is not None
        assert engine.hook.drain(PUT_S)
        return done.cached_tokens


@pytest.fixture
def asked(tmp_path: Path, client: Witness) -> Asked:
    directory = Directory(tmp_path / "model")
    seed = int.from_bytes(os.urandom(4))
    asked = Asked(directory, client, np.random.default_rng(seed).integers(0, 256, 150).tolist())
    assert asked.hit(directory.engine(client)) == 0
    assert asked.hit(directory.engine(client)) == 128
    return asked


def test_bfloat16_written_float16_reads_a_miss(asked: Asked) -> None:
    assert asked.hit(asked.directory.engine(asked.client, "float16")) == 0
    assert asked.hit(asked.directory.engine(asked.client, "float16")) == 128


def test_one_weight_changed_is_a_miss(asked: Asked) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    changed = asked.directory.tensors[name].clone()
    changed[3, 5] += 0.01
    asked.directory.tensors[name] = changed
    asked.directory.save()
    assert asked.hit(asked.directory.engine(asked.client)) == 0
    assert asked.hit(asked.directory.engine(asked.client)) == 128


def test_other_rope_theta_is_a_miss(asked: Asked) -> None:
    """Also where the fingerprint of the weights is that of the tensors alone, as of a GGUF file."""
    model = Model(load(asked.directory.folder, dtype="bfloat16"))
    other = Model(
        replace(
            load(asked.directory.folder, dtype="bfloat16"),
            config=replace(model.config, rope_theta=5e5),
        )
    )
    for each, hit in ((model, 0), (model, 128), (other, 0), (other, 128), (model, 128)):
        engine = make_engine(
            each, NO_EOS, store=asked.client, weights="77" * 32, context_tokens=512
        )
        assert isinstance(engine.hook, KVStoreHook)
        engine.hook._deadline_s = DEADLINE_S
        assert asked.hit(engine) == hit


def test_epoch_bumped_is_a_miss(asked: Asked) -> None:
    engine = asked.directory.engine(asked.client)
    engine.update_weights(engine.model, 1)
    assert asked.hit(engine) == 0
    assert asked.hit(engine) == 128
    engine.update_weights(engine.model, 0)
    assert asked.hit(engine) == 128


def test_another_salt_is_a_miss_and_costs_no_bit(asked: Asked) -> None:
    engine = asked.directory.engine(asked.client)
    greedy = Sampling(max_tokens=2, ignore_eos=True)
    plain = engine.generate(asked.prompt, greedy, keep_logits=True)
    salted = engine.generate(asked.prompt, greedy, request_salt=b"other", keep_logits=True)
    assert (plain.cached_tokens, salted.cached_tokens) == (128, 0)
    assert all(map(torch.equal, plain.logits, salted.logits))
