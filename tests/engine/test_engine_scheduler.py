"""Many requests at a time: each gets its own answer, its share, and no block is lost."""

from __future__ import annotations

import threading

import pytest
from engine_scheduling import Bench, SumModel, answer, next_token, numbers

from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.engine import PromptError, QueueFullError
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.types import EngineLimits, Request


@pytest.mark.parametrize("own_prefixes", [True, False])
def test_every_request_gets_its_own_answer(own_prefixes: bool) -> None:
    bench = Bench(blocks=60, own_prefixes=own_prefixes, max_running=5)
    shared = numbers(130)
    lengths = (1, 63, 64, 65, 128, 129, 130, 200)
    for n in lengths:
        bench.add(f"own {n}", numbers(n, seed=n), count=3 + n % 5)
        bench.add(f"shared {n}", [*shared, *numbers(200, seed=1)][:n], count=70)
    bench.finish()
    assert all(bench.right(name) for name in bench.prompts)
    assert bench.engine.stats.finished == 16
    assert (bench.engine.stats.own_hit_tokens > 0) == own_prefixes
    assert bench.engine.close()
    assert bench.pool.used_blocks() == 0


def test_answers_come_at_every_step_while_a_long_prompt_is_computed() -> None:
    bench = Bench(blocks=100, prefill_tokens=128)
    bench.add("first", numbers(20), count=40)
    bench.step()
    bench.add("long", numbers(2000, seed=1), count=2)
    bench.step()
    bench.add("short", numbers(30, seed=2), count=20)
    for step in range(10):
        named = {event.request_id for event in bench.step()}
        assert "first" in named
        assert step == 0 or "short" in named
        segments = bench.model.calls[-1]
        assert sum(len(s.token_ids) for s in segments if len(s.token_ids) > 1) <= 128
    assert bench.events["long"] == []
    bench.finish()
    assert all(bench.right(name) for name in bench.prompts)


def test_long_prompts_share_the_budget() -> None:
    bench = Bench(blocks=100, prefill_tokens=64)
    for n in range(3):
        bench.add(f"{n}", numbers(640, seed=n), count=1)
    done = []
    for _ in range(30):
        done.append({sequence.computed for sequence in bench.engine._scheduler.running})
        bench.step()
    assert all(max(at) - min(at) <= CHUNK_TOKENS for at in done if at)
    assert all(bench.right(name) for name in bench.prompts)


def test_steps_end_where_chunks_end_and_keep_the_budget() -> None:
    bench = Bench(prefill_tokens=200)
    bench.add("a", numbers(500))
    bench.finish()
    cuts = [[(s.start, len(s.token_ids)) for s in call] for call in bench.model.calls[:3]]
    assert cuts == [
        [(0, 64), (64, 64), (128, 64)],
        [(192, 64), (256, 64), (320, 64)],
        [(384, 64), (448, 52)],
    ]


def test_what_two_prompts_begin_with_is_computed_once() -> None:
    bench = Bench(blocks=60, prefill_tokens=256)
    shared = numbers(256)
    for n in range(4):
        bench.add(f"{n}", [*shared, *numbers(20, seed=n + 1)], count=2)
    bench.finish()
    assert all(bench.right(name) for name in bench.prompts)
    assert bench.engine.stats.prefill_tokens == 256 + 4 * 20
    assert sorted(bench.events[f"{n}"][0].cached_tokens for n in range(4)) == [0, 256, 256, 256]
    assert len(bench.engine.tree) == 4
    bench.add("later", [*shared, 5], count=1)
    bench.add("salted", [*shared, 5], count=1, salt=b"other")
    bench.finish()
    assert bench.events["later"][0].cached_tokens == 256
    assert bench.events["salted"][0].cached_tokens == 0


def test_the_same_prompt_twice_at_a_time() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name, numbers(128), count=5)
    bench.finish()
    assert bench.right("a")
    assert bench.right("b")
    assert bench.engine.stats.prefill_tokens == 128 + 64


def test_a_whole_hit_computes_the_last_token_in_a_block_of_its_own() -> None:
    bench = Bench()
    prompt = numbers(128)
    bench.add("cold", prompt, count=1)
    bench.finish()
    kept = bench.pool.kv.clone()
    bench.add("warm", prompt, count=2)
    bench.step()
    (segment,) = bench.model.calls[-1]
    assert (segment.start, len(segment.token_ids)) == (127, 1)
    assert bench.pool.used_blocks() == 2  # once it is whole, the copy is one too many
    bench.finish()
    assert bench.right("warm")
    assert bench.events["warm"][0].cached_tokens == 127
    shared = [node.block for node in bench.engine.tree._order]
    assert bool((bench.pool.kv[shared] == kept[shared]).all())
    assert bench.pool.used_blocks() == 2


def test_shared_blocks_refuse_to_be_written() -> None:
    bench = Bench()
    bench.add("a", numbers(200), count=9)
    bench.step()
    (sequence,) = bench.engine._scheduler.running
    assert sequence.table.sealed == 2
    row = bench.pool.kv[0, 0, 0, :1]
    with pytest.raises(ValueError, match="block 1 is shared"):
        sequence.table.write(0, 127, row, row)


@pytest.mark.parametrize("own_prefixes", [True, False])
def test_the_youngest_is_computed_again_when_blocks_run_out(own_prefixes: bool) -> None:
    bench = Bench(blocks=12, own_prefixes=own_prefixes)
    for n in range(8):
        bench.add(f"{n}", numbers(100 + n, seed=n), count=160)
    bench.finish(3000)
    assert bench.engine.stats.preemptions > 0
    assert all(bench.right(name) for name in bench.prompts)
    # The oldest never gives way, and who gave way is before those who never ran.
    assert bench.ended == [f"{n}" for n in range(8)]


def test_a_block_for_each_that_runs_stays_in_reserve() -> None:
    bench = Bench(blocks=4, own_prefixes=False)
    for n in range(2):
        bench.add(f"{n}", numbers(100, seed=n), count=60)
    bench.finish()
    assert all(bench.right(name) for name in bench.prompts)
    assert bench.engine.stats.preemptions == 0


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    bench = Bench(blocks=9, own_prefixes=False)
    bench.add("first", numbers(100), count=30)
    bench.add("large", numbers(440, seed=1), count=2)
    bench.add("small", numbers(20, seed=2), count=2)
    bench.finish()
    assert all(bench.right(name) for name in bench.prompts)
    assert bench.ended[0] == "first"  # the small one waited with the large one


def test_a_preempted_request_draws_on_where_it_was() -> None:
    """Tokens drawn at random are the same whether a request was computed twice or once."""

    class Flat(SumModel):
        def _segment(self, segment):  # type: ignore[no-untyped-def]
            logits = super()._segment(segment)
            return None if logits is None else logits * 0.5

    drawn = []
    for blocks in (30, 12):
        bench = Bench(blocks=blocks)
        bench.engine.model = Flat()
        for n in range(4):
            sampling = Sampling(max_tokens=150, temperature=1.0, seed=n)
            bench.engine.add_request(Request(f"{n}", numbers(100, seed=n), sampling))
            bench.events[f"{n}"] = []
        bench.finish(1500)
        drawn.append([bench.tokens(f"{n}") for n in range(4)])
    assert bench.engine.stats.preemptions > 0
    assert drawn[0] == drawn[1]


def test_kept_prefixes_give_way_to_requests() -> None:
    bench = Bench(blocks=9)
    for n in range(5):
        bench.add(f"{n}", numbers(400, seed=n), count=3)
        bench.finish()
        assert bench.right(f"{n}")
    assert bench.engine.stats.preemptions == 0
    assert bench.engine.tree.evicted_blocks > 0


@pytest.mark.parametrize("after", range(8))
def test_an_aborted_request_gives_its_blocks_back(after: int) -> None:
    bench = Bench(own_prefixes=False, prefill_tokens=64, max_running=2)
    bench.add("other", numbers(70), count=9)
    bench.add("a", numbers(200, seed=1), count=3)
    for _ in range(after):
        bench.step()
    bench.engine.abort("a")
    bench.engine.abort("a")
    bench.engine.abort("nobody")
    bench.step()
    last = bench.events["a"][-1]
    assert (last.token_id, last.finish_reason) == (None, "abort") or after == 7
    bench.add("a", numbers(20, seed=3), count=3)
    bench.finish()
    assert bench.right("other")
    assert bench.right("a")
    assert bench.pool.used_blocks() == 0


def test_the_queue_is_bounded_and_ids_are_used_once() -> None:
    bench = Bench(max_running=1, max_waiting=2)
    bench.add("a", numbers(10), count=3)
    bench.step()
    bench.add("b", numbers(10))
    bench.add("c", numbers(10))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        bench.add("d", numbers(10))
    with pytest.raises(ValueError, match="'a' is under way"):
        bench.add("a", numbers(10))
    assert bench.engine.stats.refused == 1
    assert (bench.engine.waiting_requests(), bench.engine.running_requests()) == (2, 1)
    bench.finish()
    bench.add("d", numbers(10))
    bench.finish()
    assert all(bench.right(name) for name in "abcd")


def test_requests_that_cannot_run_are_refused() -> None:
    bench = Bench(blocks=5)
    with pytest.raises(PromptError, match="do not fit into 256"):
        bench.add("a", numbers(250), count=7)
    with pytest.raises(PromptError, match="outside 0 to 96"):
        bench.add("a", [97])
    assert not bench.engine.has_requests()
    bench.add("a", numbers(192), count=64)
    bench.finish()
    assert bench.right("a")
    with pytest.raises(ValueError, match="max_running is 0"):
        EngineLimits(max_running=0)


def test_stop_ids_end_an_answer() -> None:
    bench = Bench()
    prompt = numbers(20)
    expected = answer(prompt, 5)
    sampling = Sampling(max_tokens=9, stop_ids=frozenset(expected[3:4]))
    bench.engine.add_request(Request("a", prompt, sampling))
    bench.events["a"] = []
    bench.finish()
    assert bench.tokens("a") == expected[: expected.index(expected[3]) + 1]
    assert bench.events["a"][-1].finish_reason == "stop"


def test_other_weights_take_effect_at_once_and_forget_what_was_kept() -> None:
    bench = Bench(hook=True)
    assert bench.hook is not None
    bench.hook.at_once = True
    prompt = numbers(150)
    bench.add("before", prompt, count=2)
    bench.finish()
    assert bench.hook.offered == [("before", 0, 2)]
    bench.add("during", prompt, count=6)
    bench.add("waiting", numbers(70, seed=1), count=2)
    bench.step()
    bench.step()
    other = SumModel(offset=11)
    bench.engine.update_weights(other, weights_epoch=1)
    bench.check_blocks()
    assert bench.pool.used_blocks() == 0
    bench.finish()
    assert bench.right("before")
    tokens = [*prompt, *answer(prompt, 2)]
    for _ in range(4):
        tokens.append(next_token(tokens, offset=11))
    assert bench.tokens("during") == tokens[150:]
    bench.add("after", prompt, count=1)
    bench.finish()
    assert bench.tokens("after") == [next_token(prompt, offset=11)]
    assert {epoch for epoch, *_ in bench.hook.kept} == {0, 1}


def test_requests_may_be_added_and_aborted_from_other_threads() -> None:
    bench = Bench(blocks=60, max_waiting=300)
    prompts = {f"{i}": numbers(40 + i, seed=i) for i in range(40)}

    def add_all() -> None:
        for name, prompt in prompts.items():
            bench.add(name, prompt, count=3)
            if int(name) % 4 == 0:
                bench.engine.abort(name)

    adding = threading.Thread(target=add_all)
    adding.start()
    while adding.is_alive() or bench.engine.has_requests():
        if bench.engine.wait(0.05):
            bench.step()
    adding.join()
    for name in prompts:
        assert bench.right(name) or bench.events[name][-1].finish_reason == "abort"


def test_who_waits_is_admitted_when_another_has_ended() -> None:
    bench = Bench(max_running=1)
    bench.add("a", numbers(10), count=1)
    bench.add("b", numbers(10), count=2)
    bench.step()
    assert bench.ended == ["a"]
    assert bench.engine.wait(0.0)
    bench.add("c", numbers(10))
    bench.step()
    bench.engine.abort("b")
    assert [event.finish_reason for event in bench.step()] == ["abort", None]
    assert bench.engine.wait(0.0)
    bench.finish()
    assert bench.right("c")


def test_waiting_ends_when_a_request_comes() -> None:
    bench = Bench()
    assert not bench.engine.wait(0.0)
    bench.add("a", numbers(10), count=2)
    assert bench.engine.wait(0.0)
    bench.step()
    assert bench.engine.wait(0.0)  # there is more to compute
    bench.finish()
    assert not bench.engine.wait(0.0)
    bench.engine.wake()
    assert bench.engine.wait(0.0)
