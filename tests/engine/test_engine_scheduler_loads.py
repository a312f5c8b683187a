"""Loads in the background: others compute meanwhile, and a late one touches nothing."""

from __future__ import annotations

import pytest
from engine_scheduling import Bench, HandHook, numbers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstored_client.engine.engine import QueueFullError

PROMPT = numbers(200)


def stored(blocks: int = 40, **limits: int | bool) -> tuple[Bench, HandHook]:
    """An engine that has nothing of its own any more; the store has three chunks of PROMPT."""
    bench = Bench(blocks=blocks, hook=True, **limits)
    assert bench.hook is not None
    bench.add("cold", PROMPT, count=1)
    bench.finish()
    assert bench.hook.offered == [("cold", 0, 3)]
    bench.engine.tree.clear()
    return bench, bench.hook


def test_others_compute_while_a_load_is_under_way() -> None:
    bench, hook = stored()
    bench.add("loads", PROMPT)
    bench.add("computes", numbers(100, seed=1), count=9)
    for _ in range(4):
        bench.step()
    assert bench.events["loads"] == []
    assert bench.engine.loading_requests() == 1
    assert len(bench.tokens("computes")) == 4
    hook.loads[0].arrive()
    bench.step()
    assert len(bench.tokens("loads")) == 1
    bench.finish()
    assert bench.right("loads")
    assert bench.right("computes")
    cache = bench.events["loads"][0].cache
    assert (cache.own_tokens, cache.loaded_tokens, cache.cached_tokens) == (0, 192, 192)
    assert cache.bytes_by_tier == {"ram": 3}
    assert bench.engine.stats.loaded_tokens == 192


def test_an_engine_that_only_loads_waits_until_it_is_told() -> None:
    bench, hook = stored()
    bench.add("a", PROMPT)
    assert bench.engine.wait(0.0)
    assert bench.step() == []
    assert not bench.engine.wait(0.0)
    hook.loads[0].arrive()
    assert bench.engine.wait(0.0)
    assert len(bench.step()) == 1


def test_what_was_loaded_is_kept_and_not_offered_again() -> None:
    bench, hook = stored()
    hook.at_once = True
    bench.add("a", [*PROMPT, *numbers(100, seed=2)], count=1)
    bench.finish()
    assert hook.offered[1:] == [("a", 3, 4)]
    bench.add("b", PROMPT, count=1)
    bench.finish()
    assert bench.events["b"][0].cache.own_tokens == 192
    assert hook.offered[2:] == []
    assert bench.right("a")
    assert bench.right("b")


def test_chunks_of_an_answer_are_offered_once_at_its_end() -> None:
    bench, hook = stored()
    bench.add("a", numbers(60, seed=4), count=4 + 64)
    bench.add("b", numbers(60, seed=4), count=4 + 65)
    bench.finish()
    # 127 tokens of the one have KV and 128 of the other: the last one sampled never has.
    assert hook.offered[1:] == [("a", 0, 1), ("b", 1, 2)]


def test_what_the_store_did_not_take_is_offered_again_from_own_blocks() -> None:
    bench, hook = stored()
    bench.add("a", PROMPT, count=1)
    bench.add("b", PROMPT, count=1, salt=b"other")
    hook.kept.clear()
    bench.finish()
    assert hook.offered[1:] == [("a", 0, 3), ("b", 0, 3)]
    bench.add("c", PROMPT, count=1)
    bench.finish()
    assert hook.offered[3:] == []
    hook.offers[1].lost = True  # a's: the store was away
    bench.add("d", PROMPT, count=1)
    bench.add("e", PROMPT, count=1, salt=b"other")
    bench.finish()
    assert bench.events["d"][0].cache.own_tokens == 192
    assert hook.offered[3:] == [("d", 0, 3)]
    bench.add("f", PROMPT, count=1)
    bench.finish()
    assert hook.offered[4:] == []


def test_what_found_the_queue_full_is_offered_again_from_own_blocks() -> None:
    bench = Bench(hook=True)
    assert bench.hook is not None
    bench.hook.queue_chunks = 1
    for name in ("a", "b", "c"):
        bench.add(name, PROMPT, count=1)
        bench.finish()
    assert bench.hook.offered == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)]


def test_chunks_of_a_request_that_was_aborted_are_offered_by_the_next() -> None:
    bench, hook = stored()
    hook.kept.clear()
    bench.add("a", PROMPT)
    bench.step()
    bench.engine.abort("a")
    bench.add("b", PROMPT, count=1)
    bench.finish()
    assert bench.events["b"][0].cache.own_tokens > 0
    assert hook.offered[1:] == [("b", 0, 3)]


def test_a_late_load_keeps_its_blocks_and_touches_nothing() -> None:
    bench, hook = stored()
    bench.add("a", PROMPT)
    bench.step()
    (load,) = hook.loads
    loading = list(load.blocks)
    load.expire()
    bench.step()
    (sequence,) = bench.engine._scheduler.running
    assert not set(sequence.table.blocks) & set(loading)
    bench.step()
    load.land()
    bench.finish()
    assert bench.right("a")
    cache = bench.events["a"][0].cache
    assert (cache.cached_tokens, cache.miss_reason) == (0, "deadline")


def test_a_late_load_may_keep_the_only_blocks_there_are() -> None:
    bench, hook = stored(blocks=6)
    bench.add("a", PROMPT)
    bench.step()
    (load,) = hook.loads
    load.expire()
    bench.step()
    assert bench.engine.waiting_requests() == 1
    assert bench.engine.running_requests() == 0
    bench.step()
    load.land()
    assert bench.engine.wait(0.0)
    bench.finish()
    assert bench.right("a")
    assert len(hook.rates) == 2  # it did not ask the store again


@pytest.mark.parametrize("arrived", [True, False])
def test_a_request_aborted_while_it_loads(arrived: bool) -> None:
    bench, hook = stored()
    bench.add("a", PROMPT)
    bench.step()
    (load,) = hook.loads
    if arrived:
        load.arrive()
    bench.engine.abort("a")
    bench.step()
    assert bench.events["a"][-1].finish_reason == "abort"
    assert bench.pool.used_blocks() == (0 if arrived else 3)
    if not arrived:
        load.land()
    bench.check_blocks()
    assert bench.pool.used_blocks() == 0
    bench.add("b", PROMPT)
    bench.step()
    hook.loads[0].arrive()
    bench.finish()
    assert bench.right("b")


def test_the_same_chunks_are_loaded_once() -> None:
    bench, hook = stored()
    bench.add("a", PROMPT)
    bench.add("b", [*PROMPT, 1, 2, 3])
    bench.add("c", numbers(100, seed=3), count=9)
    bench.step()
    assert len(hook.loads) == 1
    assert len(bench.tokens("c")) == 1  # those behind one that is deferred are not held up
    assert bench.engine.stats.deferred >= 1
    hook.loads[0].arrive()
    bench.step()
    bench.step()
    running = [sequence.request.id for sequence in bench.engine._scheduler.running]
    assert running == ["a", "b", "c"]  # by age, which says who gives way, not by admission
    bench.finish()
    assert all(bench.right(name) for name in "abc")
    assert bench.events["b"][0].cache.own_tokens == 192


def test_who_gives_way_offers_what_it_computed_and_loads_it_again() -> None:
    bench, hook = stored()
    hook.at_once = True
    bench.add("a", numbers(70, seed=5), count=100)
    for _ in range(80):
        bench.step()
    assert hook.offered[1:] == [("a", 0, 1)]
    (sequence,) = bench.engine._scheduler.running
    bench.engine._scheduler.preempt(sequence)
    assert hook.offered[2:] == [("a", 1, 2)]
    assert sequence.table.blocks == []
    bench.engine.tree.clear()
    bench.step()
    (segment,) = bench.model.calls[-1]
    assert segment.start == 128
    bench.finish()
    assert bench.right("a")
    assert hook.offered[3:] == []


def test_who_gives_way_while_it_loads_offers_nothing() -> None:
    bench, hook = stored()
    bench.add("short", PROMPT[:100], count=1)
    bench.step()
    hook.loads[0].arrive()
    bench.finish()
    bench.add("a", PROMPT)
    bench.step()
    (sequence,) = bench.engine._scheduler.running
    assert (sequence.settled, len(hook.loads[0].blocks)) == (1, 2)
    bench.engine._scheduler.preempt(sequence)
    assert hook.offered[1:] == []
    hook.loads[0].land()
    bench.check_blocks()


def test_the_hook_is_told_how_fast_prompts_are_computed() -> None:
    bench, hook = stored()
    assert hook.rates == [0.0]
    bench.add("a", PROMPT)
    bench.step()
    assert hook.rates[1] == bench.engine.stats.prefill_tokens_per_s > 0


STEMS = [numbers(320, seed=seed) for seed in (20, 21)]


class Requests(RuleBasedStateMachine):
    """Requests come and go, loads arrive, are late, or land after all, prefixes are evicted: no
    block is lost or written by two, and every answer is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(blocks=14, hook=True, max_running=3, max_waiting=6, prefill_tokens=128)
        assert self.bench.hook is not None
        self.hook = self.bench.hook
        self.names = 0
        self.aborted: set[str] = set()

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.sampled_from([1, 64, 65, 128, 129, 200, 256, 320]),
        tail=st.integers(0, 2),
        count=st.sampled_from([1, 3, 70]),
        salt=st.sampled_from([b"", b"", b"s"]),
    )
    def add(self, stem: list[int], length: int, tail: int, count: int, salt: bytes) -> None:
        self.names += 1
        try:
            self.bench.add(f"{self.names}", [*stem[:length], *range(tail)], count, salt)
        except QueueFullError:
            self.names -= 1

    @rule(times=st.integers(1, 30))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.bench.step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = f"{data.draw(st.integers(1, self.names))}"
        if name not in self.bench.ended:
            self.aborted.add(name)
        self.bench.engine.abort(name)

    @precondition(lambda self: any(load.state == "under way" for load in self.hook.loads))
    @rule(arrives=st.booleans())
    def end_load(self, arrives: bool) -> None:
        load = next(load for load in self.hook.loads if load.state == "under way")
        if arrives:
            load.arrive()
        else:
            load.expire()

    @precondition(lambda self: any(x.state in ("late", "cancelled") for x in self.hook.loads))
    @rule()
    def land(self) -> None:
        next(x for x in self.hook.loads if x.state in ("late", "cancelled")).land()

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.bench.engine.tree.evict(count)

    @rule()
    def other_weights(self) -> None:
        """The same ones, under another epoch: what was computed must not be used any more."""
        self.bench.engine.update_weights(self.bench.model, self.hook.epoch + 1)
        assert len(self.bench.engine.tree) == 0

    @invariant()
    def blocks_add_up(self) -> None:
        self.bench.check_blocks()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.bench.engine.has_requests():
                break
            for load in list(self.hook.loads):
                if load.state == "under way":
                    load.arrive()
                elif load.state != "arrived":
                    load.land()
            self.bench.step()
        assert not self.bench.engine.has_requests()
        for name in self.bench.prompts:
            right = self.bench.right(name)
            assert right or (
                name in self.aborted and self.bench.events[name][-1].finish_reason == "abort"
            )
        for load in list(self.hook.loads):
            load.land()
        assert self.bench.engine.close()
        assert self.bench.pool.used_blocks() == 0


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
