"""Whatever the store does, the engine's answers are the same, and its blocks come back."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_support import NO_EOS, TINY, Answer, DictStore, same_bits, tiny_model, tiny_prompt
from numpy.typing import NDArray

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool
from kvstored_client.engine.engine import Engine, PromptError, make_engine
from kvstored_client.engine.family import family_of
from kvstored_client.engine.hook import KVStoreHook
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.types import EngineLimits, Loaded, PendingLoad, Request
from kvstored_client.identity import KVFamily, Prefix

WEIGHTS = "ef" * 32
SHORT = Sampling(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return tiny_model()


class SlowStore(DictStore):
    """A store whose puts wait until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(
        self, prefix: Prefix, views: Sequence[NDArray[np.uint8]], start: int, **options: object
    ) -> Answer:
        assert self.gate.wait(60)
        return super().put(prefix, views, start, **options)


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.gate.set()


def with_store(model: Model, store: DictStore, queue: int = 64) -> Engine:
    return make_engine(
        model, NO_EOS, store=store, weights=WEIGHTS, context_tokens=512, max_queued_chunks=queue
    )


def test_a_store_that_fails_is_a_miss_and_said_once(
    tiny: Model, caplog: pytest.LogCaptureFixture
) -> None:
    store = DictStore()
    store.broken = True
    engine = with_store(tiny, store)
    prompt = tiny_prompt(200)
    expected = make_engine(tiny, NO_EOS).generate(prompt, SHORT, keep_logits=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = engine.generate(prompt, SHORT, keep_logits=True)
            assert got.cached_tokens == 0
            assert same_bits(got, expected)
        assert engine.close(60)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert engine.hook is not None
    assert engine.hook.stats.failures == 4
    assert engine.pool.used_blocks() == 0


@pytest.mark.parametrize(("reason", "again"), [("unreachable", True), ("too_large", False)])
def test_refused_chunks_are_counted_and_offered_again_where_that_helps(
    reason: str, again: bool, tiny: Model
) -> None:
    store = DictStore()
    store.refuses = reason
    limits = EngineLimits(max_running=1)
    engine = make_engine(tiny, NO_EOS, store=store, weights=WEIGHTS, limits=limits, blocks=16)
    assert isinstance(engine.hook, KVStoreHook)
    prompt = tiny_prompt(200)
    engine.generate(prompt, SHORT)
    assert engine.hook.drain(60)
    assert engine.hook.stats.refused_chunks >= 3
    store.refuses = ""
    assert engine.generate(prompt, SHORT).cached_tokens == 192
    assert engine.hook.drain(60)
    assert engine.hook.stats.stored_chunks == (3 if again else 0)
    assert engine.close(60)


def test_blocks_of_a_put_under_way_are_not_reused(tiny: Model, slow: SlowStore) -> None:
    engine = with_store(tiny, slow)
    first, second = tiny_prompt(130), tiny_prompt(450, seed=9)
    engine.generate(first, SHORT)
    assert engine.pool.used_blocks() == 2
    engine.generate(second, SHORT)
    slow.gate.set()
    assert engine.close(60)
    plain = make_engine(tiny, NO_EOS)
    check = with_store(tiny, slow)
    for prompt, hit in ((first, 128), (second, 448)):
        got = check.generate(prompt, SHORT, keep_logits=True)
        assert got.cached_tokens == hit
        assert same_bits(got, plain.generate(prompt, SHORT, keep_logits=True))


def test_a_full_queue_drops_the_tail_and_never_blocks(tiny: Model, slow: SlowStore) -> None:
    engine = with_store(tiny, slow, queue=3)
    assert engine.hook is not None
    prompt = tiny_prompt(330)
    engine.generate(prompt, SHORT)
    engine.generate(tiny_prompt(200, seed=4), SHORT)
    assert engine.pool.used_blocks() == 3
    # The first run's tail is offered again when its sequence ends, and dropped again.
    assert engine.hook.stats.dropped_chunks == 2 + 2 + 3 + 3
    assert not engine.hook.drain(0)
    slow.gate.set()
    assert engine.hook.drain(60)
    assert engine.hook.stats.stored_chunks == 3
    assert engine.generate(prompt, SHORT).cached_tokens == 3 * CHUNK_TOKENS


def test_only_computed_tokens_are_stored(tiny: Model) -> None:
    """126 prompt tokens and 3 sampled: the third has no KV, so one full chunk would be too many."""
    store = DictStore()
    engine = with_store(tiny, store)
    engine.generate(tiny_prompt(125), SHORT)
    engine.generate(tiny_prompt(126, seed=5), SHORT)
    assert engine.close(60)
    prefixes = [family_of(TINY, WEIGHTS).prefix(tiny_prompt(n, s)) for n, s in ((125, 0), (126, 5))]
    assert len(store.chunks) == 1 + 2
    assert store.match(prefixes[0]).chunks == 1


class GatedStore(DictStore):
    """A store whose gets tell that they have begun, and wait until `gate` is set. Whatever their
    deadline: so late is no KVClient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.eta_ms = 0.0

    def match(self, prefix: Prefix, **options: object) -> Answer:
        return dataclasses.replace(super().match(prefix, **options), eta_ms=self.eta_ms)

    def get(
        self,
        prefix: Prefix,
        into: Sequence[NDArray[np.uint8]],
        start: int,
        stop: int,
        **options: object,
    ) -> Answer:
        self.begun.set()
        assert self.gate.wait(60)
        return super().get(prefix, into, start, stop, **options)


class Loads:
    """Loads of one prompt of 3 chunks that the store holds, as the engine would begin them."""

    def __init__(self, model: Model) -> None:
        self.store = GatedStore()
        self.prompt = tiny_prompt(192)
        filling = with_store(model, self.store)
        filling.generate(self.prompt, SHORT)
        assert filling.close(60)
        self.pool = BlockPool(TINY, 8)
        self.hook = KVStoreHook(self.store, family_of(TINY, WEIGHTS), self.pool, deadline_s=60)
        self.woken = threading.Semaphore(0)
        self.hook.on_change(self.woken.release)

    def begin(self, tokens_per_s: float = 0.0, start: int = 0) -> PendingLoad:
        request = Request("one", self.prompt)
        return self.hook.begin_match(request, self.prompt, start, self.pool.take, tokens_per_s)

    def settle(self, load: PendingLoad) -> Loaded:
        while not load.ready():
            assert self.woken.acquire(timeout=60)
        return load.finish()

    def all_free(self) -> None:
        while self.pool.free_blocks() < 8:
            assert self.woken.acquire(timeout=60)


@pytest.fixture
def loads(tiny: Model) -> Iterator[Loads]:
    loads = Loads(tiny)
    yield loads
    loads.store.gate.set()
    assert loads.hook.close(60)
    loads.all_free()


def test_a_load_hands_over_what_came_and_zeroes_what_did_not(loads: Loads) -> None:
    loads.store.gate.set()
    loads.store.delivers = 1
    loaded = loads.settle(loads.begin())
    assert len(loaded.blocks) == 1
    assert loads.pool.free_blocks() == 7
    assert loads.pool.kv[loaded.blocks[0]].any()
    # A block that goes back to the pool with NaN in it would spoil whoever has it next.
    assert loads.pool.kv.isfinite().all()
    loads.pool.drop(loaded.blocks)
    loads.store.delivers = None
    later = loads.settle(loads.begin(start=2))
    assert len(later.blocks) == 1
    assert later.reason == ""
    loads.pool.drop(later.blocks)


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_a_load_that_comes_late_keeps_its_blocks_until_then(loads: Loads, end: str) -> None:
    loads.hook._deadline_s = 0.05 if end == "deadline" else 60.0
    load = loads.begin()
    assert loads.store.begun.wait(60)
    if end == "deadline":
        loaded = loads.settle(load)
        assert (loaded.blocks, loaded.reason) == ([], "deadline")
        assert loads.hook.stats.late == 1
    else:
        load.cancel()
    assert loads.pool.free_blocks() == 5  # the store may still write to them
    loads.store.gate.set()
    loads.all_free()
    assert loads.hook.stats.loaded_chunks == 0


def test_what_was_decided_and_is_then_cancelled_goes_back(loads: Loads) -> None:
    loads.store.gate.set()
    load = loads.begin()
    while not load.ready():
        assert loads.woken.acquire(timeout=60)
    load.cancel()
    loads.all_free()


def test_what_takes_longer_than_computing_is_declined(loads: Loads) -> None:
    loads.store.gate.set()
    loads.store.eta_ms = 300.0
    assert loads.settle(loads.begin(tokens_per_s=640.0)).reason == ""
    loads.store.eta_ms = 301.0
    declined = loads.settle(loads.begin(tokens_per_s=640.0))
    assert (declined.blocks, declined.reason) == ([], "declined")
    assert loads.hook.stats.declined == 1
    assert loads.pool.used_blocks() == 3
    loads.pool.drop([block for block in range(8) if loads.pool.references(block)])


def test_a_fast_engine_waits_no_longer_than_it_would_compute(loads: Loads) -> None:
    loaded = loads.settle(loads.begin(tokens_per_s=192_000.0))
    assert loaded.reason == "deadline"


def test_request_salt_keeps_prompts_apart(tiny: Model) -> None:
    engine = with_store(tiny, DictStore())
    prompt = tiny_prompt(100)
    assert engine.hook is not None
    for salt, hit in ((b"a", 0), (b"b", 0), (b"a", 64), (b"", 0)):
        assert engine.generate(prompt, SHORT, request_salt=salt).cached_tokens == hit
        assert engine.hook.drain(60)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([0] * 600, "do not fit into 512"),
        ([256], "outside 0 to 255"),
        ([-1], "outside"),
    ],
)
def test_prompts_that_cannot_run_are_refused(tiny: Model, prompt: list[int], problem: str) -> None:
    engine = make_engine(tiny, NO_EOS, context_tokens=512)
    with pytest.raises(PromptError, match=problem):
        engine.generate(prompt, SHORT)


def test_the_longest_prompt_runs_with_a_hit_and_a_full_queue(tiny: Model, slow: SlowStore) -> None:
    engine = with_store(tiny, slow, queue=8)
    one = Sampling(max_tokens=1)
    prompt = tiny_prompt(511)
    slow.gate.set()
    engine.generate(prompt, one)
    assert engine.hook is not None
    assert engine.hook.drain(60)
    slow.gate.clear()
    engine.generate(tiny_prompt(511, seed=2), one)
    assert engine.pool.used_blocks() == 7
    assert engine.generate(prompt, one).cached_tokens == 448
    assert engine.generate(prompt[:448], Sampling(max_tokens=64)).cached_tokens == 447
    with pytest.raises(PromptError, match="512 prompt tokens and 1 more do not fit into 512"):
        engine.generate([*prompt, 0], one)


def test_stops_at_the_end_token(tiny: Model) -> None:
    prompt = tiny_prompt(10)
    free = make_engine(tiny, NO_EOS).generate(prompt, Sampling(max_tokens=8))
    assert free.finish_reason == "length"
    stopping = make_engine(tiny, free.token_ids[2])
    seen: list[int] = []
    got = stopping.generate(prompt, Sampling(max_tokens=8), on_token=seen.append)
    first = free.token_ids.index(free.token_ids[2]) + 1
    assert got.token_ids == seen == free.token_ids[:first]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    "other",
    [
        family_of(TINY, "aa" * 32),
        family_of(TINY, WEIGHTS, weights_epoch=1),
        family_of(dataclasses.replace(TINY, rope_theta=5e5), WEIGHTS),
        family_of(dataclasses.replace(TINY, layers=4), WEIGHTS),
    ],
    ids=["weights", "epoch", "rope", "layers"],
)
def test_what_changes_the_bytes_changes_the_family(other: KVFamily) -> None:
    family = family_of(TINY, WEIGHTS)
    assert family.parts[0].nbytes == 3 * 2 * 64 * 2 * 16 * 4
    assert other.fingerprint != family.fingerprint


def test_prefill_says_how_far_it_is(tiny: Model) -> None:
    steps: list[tuple[int, int]] = []
    store = DictStore()
    for prompt, expected in (
        (tiny_prompt(130), [(0, 130), (64, 130), (128, 130), (130, 130)]),
        (tiny_prompt(130), [(128, 130), (130, 130)]),
        (tiny_prompt(128), [(127, 128), (128, 128)]),
    ):
        engine = with_store(tiny, store)
        steps.clear()
        engine.generate(prompt, SHORT, on_prefill=lambda *step: steps.append(step))
        assert steps == expected
        assert engine.close(60)
