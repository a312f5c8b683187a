"""What ends requests early: a full queue, clients that go, a server that stops, other weights."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import openai
import pytest
import torch
from engine_served import GIVE_UP_S, LONG, NAME, Served, letter_engine, letter_model, post, serving

from kvstored_client.engine.server.errors import Stopping

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "prompt": "abcdefgh"}


def test_a_full_queue_is_429_and_the_others_are_answered() -> None:
    with serving(letter_engine(max_running=1, max_waiting=1)) as served, served.client() as client:
        with served.held():
            chat = client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": "abc"}],
                max_tokens=4,
                stream=True,
            )
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**GREEDY)
        assert full.value.response.headers["retry-after"] == "1"
        assert full.value.code == "queue_full"
        assert len([chunk for chunk in chat if chunk.choices[0].delta.content]) == 4
        served.wait_idle()
        served.check_blocks()
        assert served.engine.stats.refused == 1


def test_more_requests_than_there_are_places_are_refused_before_they_are_read() -> None:
    with serving(letter_engine(max_running=1)) as served, served.client() as client:
        served.server.service._most = 1
        with served.held():
            stream = client.completions.create(max_tokens=2, stream=True, **GREEDY)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**GREEDY)
        assert len(list(stream)) == 2
        assert served.engine.stats.requests == served.server.service.stats.refused == 1
        assert client.completions.create(**GREEDY).choices[0].text


def test_a_body_that_does_not_come_gives_its_place_back() -> None:
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
    with serving(letter_engine(), body_wait_s=0.05) as served:
        with socket.create_connection(("127.0.0.1", served.port), GIVE_UP_S) as slow:
            slow.sendall(begun + b'content-length: 100\r\n\r\n{"model')
            answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"only 7 bytes of the body came in 0.05 s" in answer
        served.wait_idle()


def test_a_client_that_goes_in_mid_stream_frees_its_blocks() -> None:
    with serving(letter_engine()) as served, served.client() as client:
        stream = client.completions.create(max_tokens=LONG, stream=True, **GREEDY)
        for _ in range(3):
            next(stream)
        assert served.engine.pool.used_blocks() > 0
        stream.close()
        served.wait_idle()
        served.check_blocks()
        stats = served.engine.stats
        assert (stats.aborted, stats.finished) == (1, 0)
        assert stats.decode_tokens < LONG - 1
        assert served.server.service.stats.dropped == 1
        assert client.completions.create(max_tokens=2, **GREEDY).choices[0].text


def test_a_client_that_goes_before_its_answer_frees_its_blocks() -> None:
    with serving(letter_engine()) as served:
        computing = threading.Event()
        served.engine.on_progress = lambda *_: computing.set()
        body = json.dumps({**GREEDY, "max_tokens": LONG}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert computing.wait(GIVE_UP_S)
        served.wait_idle()
        served.check_blocks()
        assert served.engine.stats.aborted == 1


def test_a_client_that_goes_while_it_is_queued_leaves_the_queue() -> None:
    with serving(letter_engine(max_running=1)) as served, served.client() as client:
        with served.held():
            streams = [
                client.completions.create(max_tokens=3, stream=True, **GREEDY) for _ in range(2)
            ]
            streams[1].close()
        assert len(list(streams[0])) == 3
        served.wait_idle()
        served.check_blocks()


def test_a_stop_string_frees_its_blocks() -> None:
    with serving(letter_engine()) as served, served.client() as client:
        want = client.completions.create(max_tokens=8, **GREEDY).choices[0].text
        done = client.completions.create(max_tokens=LONG, stop=want[-3:], **GREEDY)
        assert done.choices[0].finish_reason == "stop"
        served.wait_idle()
        served.check_blocks()
        assert served.engine.stats.decode_tokens < LONG - 1


def test_a_stop_lets_answers_end_and_takes_no_more() -> None:
    with serving(letter_engine()) as served, served.client() as client:
        with served.held():
            stream = client.completions.create(max_tokens=4, stream=True, **GREEDY)
            served.server.ask_stop()
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**GREEDY)
            assert refused.value.status_code == 503
            assert refused.value.code == "stopping"
            health = post(served, "/healthz", None)
            assert health[0] == 503
        assert [c.choices[0].finish_reason for c in stream] == [None] * 3 + ["length"]
        served.join()
        assert served.stopped_in_time
        pool = served.engine.pool
        assert pool.free_blocks() == pool.blocks


def test_after_its_grace_a_stop_ends_answers_with_an_error() -> None:
    with serving(letter_engine(), grace_s=0.0) as served, served.client() as client:
        with served.held():
            stream = client.completions.create(max_tokens=LONG, stream=True, **GREEDY)
            served.server.ask_stop()
            with pytest.raises(openai.APIError, match="the server stops"):
                list(stream)
        served.join()
        assert served.stopped_in_time
        assert served.engine.pool.used_blocks() == 0


def test_a_second_stop_has_no_grace() -> None:
    with serving(letter_engine()) as served, served.client() as client:
        stream = client.completions.create(max_tokens=LONG, stream=True, **GREEDY)
        next(stream)
        served.server.ask_stop()
        served.server.ask_stop()
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        served.join()
        assert served.engine.pool.used_blocks() == 0


def test_a_step_that_fails_costs_its_requests_only() -> None:
    engine = letter_engine()
    with serving(engine) as served, served.client() as client:
        want = client.completions.create(max_tokens=3, **GREEDY).choices[0].text
        model = engine.model
        engine.model = Broken(model)
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**GREEDY)
        assert failed.value.code == "engine_failed"
        served.check_blocks()
        engine.model = model
        assert client.completions.create(max_tokens=3, **GREEDY).choices[0].text == want
        assert served.server.runner.failures == 1


def test_an_engine_that_has_failed_for_good_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = letter_engine()
    with serving(engine) as served, served.client() as client:
        engine.model = Broken(engine.model)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "end", Broken.end)  # as a bug in the engine would
            for _ in range(2):
                with pytest.raises(openai.InternalServerError) as failed:
                    client.completions.create(**GREEDY)
                assert failed.value.code == "engine_failed"
                served.server.runner._thread.join(GIVE_UP_S)
        assert post(served, "/healthz", None)[0] == 500
        with pytest.raises(Stopping):
            served.server.runner.call(lambda: None)


class Broken:
    """A model that fails."""

    def __init__(self, model: Any) -> None:
        self.config = model.config

    def forward(self, segments: object) -> Any:
        raise RuntimeError("the accelerator is out of memory")

    @staticmethod
    def end(request_id: str) -> None:
        raise RuntimeError(f"{request_id} cannot be ended")


def test_other_weights_have_another_epoch_and_no_prefix_of_the_old() -> None:
    prompt = "abcdefgh" * 20
    body = {**GREEDY, "prompt": prompt, "max_tokens": 6}
    seen: list[object] = []

    def load(path: object) -> Any:
        seen.append(path)
        return letter_model(seed=9)

    with serving(letter_engine(seed=9)) as other, other.client() as client:
        want = client.completions.create(**body).choices[0].text
        assert update(other, {})[0] == 403
    with serving(letter_engine(), load_weights=load) as served, served.client() as client:
        assert client.completions.create(**body).choices[0].text != want
        assert cached(client.completions.create(**body)) > 0
        status, answer = update(served, {"weights_epoch": 3, "path": "/there"})
        assert (status, answer) == (200, {"model": NAME, "weights_epoch": 3})
        assert str(seen[0]) == "/there"
        renewed = client.completions.create(**body)
        assert cached(renewed) == 0
        assert renewed.choices[0].text == want
        assert update(served, {"weights_epoch": 3})[1]["error"]["param"] == "weights_epoch"
        assert update(served, {})[1]["weights_epoch"] > 3
        assert update(served, {"what": 1})[0] == 400
        served.check_blocks()


@pytest.mark.parametrize(
    ("other", "says"), [({"theta": 5.0}, "same config"), ({"dtype": torch.bfloat16}, "bfloat16")]
)
def test_weights_of_other_shapes_are_refused(other: dict[str, Any], says: str) -> None:
    def load(path: object) -> Any:
        return letter_model(**other)

    with serving(letter_engine(), load_weights=load) as served, served.client() as client:
        status, answer = update(served, {})
        assert status == 400
        assert says in answer["error"]["message"]
        assert client.completions.create(**GREEDY).choices[0].text


def update(served: Served, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
    status, answer, _ = post(served, "/v1/update_weights", json.dumps(body).encode())
    return status, answer


def cached(done: Any) -> int:
    return int(done.usage.prompt_tokens_details.cached_tokens)
