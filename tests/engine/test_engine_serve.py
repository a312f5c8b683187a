"""The server as the openai client sees it, on a small random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from engine_served import LETTERS, NAME, Served, letter_engine, post, serving

from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.sampler import Sampling

WORDS = "abcdefghijklmnopponmlkjihgfedcba"
LONG_WORDS = "".join(LETTERS[(i * i + 3 * i) % 16] + LETTERS[i % 7] for i in range(150))
GREEDY = {"model": NAME, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(letter_engine()) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made
    served.wait_idle()
    served.check_blocks()


def expected(served: Served, prompt: list[int], tokens: int) -> str:
    """What the engine answers where nothing is served."""
    done = letter_engine().generate(prompt, Sampling(max_tokens=tokens))
    return served.tokenizer.decode(done.token_ids)


def streamed(stream: Any) -> tuple[str, list[Any]]:
    chunks = list(stream)
    parts = [c.choices[0] for c in chunks if c.choices]
    text = [p.text if hasattr(p, "text") else p.delta.content or "" for p in parts]
    return "".join(text), chunks


def test_completions_are_the_engines_streamed_or_not(served: Served, client: openai.OpenAI) -> None:
    prompt = served.tokenizer.encode(WORDS)
    want = expected(served, prompt, 24)
    done = client.completions.create(prompt=WORDS, max_tokens=24, **GREEDY)
    assert done.object == "text_completion"
    assert done.choices[0].text == want
    assert done.choices[0].finish_reason == "length"
    usage = done.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
    assert usage.total_tokens == len(prompt) + 24
    by_ids = client.completions.create(prompt=prompt, max_tokens=24, **GREEDY)
    assert by_ids.choices[0].text == want
    text, chunks = streamed(
        client.completions.create(prompt=[WORDS], max_tokens=24, stream=True, **GREEDY)
    )
    assert text == want
    assert len(chunks) == 24
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 23 + ["length"]
    assert len({c.id for c in chunks}) == 1


def test_chats_are_the_engines_streamed_or_not(served: Served, client: openai.OpenAI) -> None:
    said: list[Any] = [
        {"role": "developer", "content": "abc"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "dd"}, {"type": "text", "text": "e"}],
        },
    ]
    prompt = served.tokenizer.encode("sabcudde" + "a")
    want = expected(served, prompt, 10)
    done = client.chat.completions.create(messages=said, max_completion_tokens=10, **GREEDY)
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == want
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(prompt)
    text, chunks = streamed(
        client.chat.completions.create(
            messages=said,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert text == want
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage == done.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_many_at_a_time_get_what_each_gets_alone(served: Served, client: openai.OpenAI) -> None:
    def ask(prompt: str) -> str:
        done = client.completions.create(prompt=prompt, max_tokens=12, **GREEDY)
        return done.choices[0].text

    prompts = [WORDS[i:] + LONG_WORDS[: i * 9] for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(ask, prompts))
    assert together == [expected(served, served.tokenizer.encode(p), 12) for p in prompts]
    assert len(set(together)) > 6


def test_usage_says_what_was_not_computed(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> tuple[int, int]:
        done: Any = client.completions.create(
            prompt=LONG_WORDS,
            max_tokens=2,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
            extra_body={"cache_salt": "usage"},
            **GREEDY,
        )
        usage = list(done)[-1].usage if stream else done.usage
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    tokens, cached = ask(stream=False)
    assert tokens > 2 * CHUNK_TOKENS
    assert cached == 0
    whole = (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert ask(stream=False) == ask(stream=True) == (tokens, whole)


def test_own_prefixes_are_kept_apart_by_salt(client: openai.OpenAI) -> None:
    def cached(**body: str) -> int:
        done = client.completions.create(
            prompt=LONG_WORDS[::-1], max_tokens=1, extra_body=body, **GREEDY
        )
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") >= CHUNK_TOKENS
    assert cached(cache_salt="two") == 0
    assert cached() == 0


def test_an_answer_ends_before_a_stop_string_that_tokens_share(
    served: Served, client: openai.OpenAI
) -> None:
    want = expected(served, served.tokenizer.encode(WORDS), 24)
    stop = want[5:10]
    assert len(served.tokenizer.encode(want)) < len(want) - 2  # tokens have several letters
    at = want.index(stop)
    for stops in (stop, ["zz", stop + "z", stop]):
        done = client.completions.create(prompt=WORDS, max_tokens=24, stop=stops, **GREEDY)
        assert done.choices[0].text == want[:at]
        assert done.choices[0].finish_reason == "stop"
        assert done.usage is not None
        assert done.usage.completion_tokens < 24
        text, chunks = streamed(
            client.completions.create(
                prompt=WORDS, max_tokens=24, stop=stops, stream=True, **GREEDY
            )
        )
        assert text == want[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"
    # What only looks like the beginning of one is given in the end.
    tail = client.completions.create(prompt=WORDS, max_tokens=24, stop=want[-1] + "z", **GREEDY)
    assert tail.choices[0].text == want


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        done = client.completions.create(
            model=NAME, prompt=WORDS, max_tokens=16, temperature=1.5, top_p=0.9, seed=seed
        )
        return done.choices[0].text

    assert ask(1) == ask(1) != ask(2)


BODY: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "change", "param", "says"),
    [
        ("completions", {"prompt": None}, "prompt", "one string"),
        ("completions", {"prompt": ["a", "b"]}, "prompt", "one string"),
        ("completions", {"prompt": [1, True]}, "prompt", "one string"),
        ("completions", {"prompt": ""}, "prompt", "empty"),
        ("completions", {"prompt": [256]}, "prompt", "outside 0 to 255"),
        ("completions", {"prompt": "\ud800"}, "prompt", "surrogate"),
        ("completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("completions", {"max_tokens": 1.5}, "max_tokens", "whole number"),
        ("completions", {"max_tokens": True}, "max_tokens", "whole number"),
        ("completions", {"max_tokens": 9000}, "prompt", "do not fit"),
        ("completions", {"temperature": 2.5}, "temperature", "from 0 to 2"),
        ("completions", {"temperature": float("nan")}, "temperature", "from 0 to 2"),
        ("completions", {"temperature": "hot"}, "temperature", "a number"),
        ("completions", {"temperature": 10**400}, "temperature", "from 0 to 2"),
        ("completions", {"top_p": 0}, "top_p", "above 0"),
        ("completions", {"top_k": -1}, "top_k", "positive"),
        ("completions", {"seed": 1 << 64}, "seed", "2**64"),
        ("completions", {"n": 2}, "n", "one answer"),
        ("completions", {"best_of": 2}, "best_of", "one answer"),
        ("completions", {"logprobs": 1}, "logprobs", "log probabilities"),
        ("completions", {"echo": True}, "echo", "prompt"),
        ("completions", {"frequency_penalty": 1}, "frequency_penalty", "distribution"),
        ("completions", {"stop": ""}, "stop", "empty string"),
        ("completions", {"stop": ["a"] * 17}, "stop", "at most 16"),
        ("completions", {"stop": [1]}, "stop", "a string"),
        ("completions", {"stream": "yes"}, "stream", "true or false"),
        ("completions", {"stream_options": {}}, "stream_options", "only with stream"),
        ("completions", {"cache_salt": "x" * 1025}, "cache_salt", "1024 bytes"),
        ("completions", {"cache_salt": 7}, "cache_salt", "a string"),
        ("completions", {"model": None}, "model", "/v1/models"),
        ("completions", {"wishes": 3}, "wishes", "does not know"),
        ("chat/completions", {"messages": []}, "messages", "at least one"),
        ("chat/completions", {"messages": ["a"]}, "messages[0]", "an object"),
        ("chat/completions", {"messages": [{"role": "x"}]}, "messages[0]", "has the role 'x'"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "not text",
        ),
        ("chat/completions", {"logprobs": True}, "logprobs", "log probabilities"),
        ("chat/completions", {"tools": [{}]}, "tools", "answers with text"),
        ("chat/completions", {"response_format": {"type": "json"}}, "response_format", "text"),
    ],
)
def test_a_mistake_is_said_with_its_field(
    served: Served, path: str, change: dict[str, Any], param: str | None, says: str
) -> None:
    body = {**(BODY if path == "completions" else CHAT), **change}
    status, answer, _ = post(served, f"/v1/{path}", json.dumps(body).encode())
    assert status == 400
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(prompt="a", max_tokens=9000, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="a")
    with pytest.raises(openai.BadRequestError) as label:
        client.completions.create(prompt="a", extra_headers={"X-Tenant": "a\tb"}, **GREEDY)
    assert label.value.param == "X-Tenant"


@pytest.mark.parametrize(
    ("raw", "kind", "status", "says"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"[" * 200_000, "application/json", 400, "not JSON"),
        (b"[1]", "application/json", 400, "a JSON object"),
        (b"\xff", "application/json", 400, "not JSON"),
        (b"{}", "text/plain", 415, "application/json"),
        (b'{"prompt": "' + b"a" * (17 << 20), "application/json", 413, "at most"),
    ],
)
def test_bodies_that_are_none(
    served: Served, raw: bytes, kind: str, status: int, says: str
) -> None:
    got, answer, _ = post(served, "/v1/completions", raw, kind)
    assert got == status
    assert says in answer["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = served.engine.limit_tokens * 2  # tokens are pairs of letters
    with pytest.raises(openai.BadRequestError, match="tokens and 16 more do not fit"):
        client.completions.create(prompt="a" * longest, **GREEDY)
    monkeypatch.setattr(served.tokenizer, "encode", None)
    for path, prompt in (
        ("completions", {"prompt": "a" * (longest + 1)}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * longest}]}),
    ):
        status, answer, _ = post(served, f"/v1/{path}", json.dumps({**GREEDY, **prompt}).encode())
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "characters do not fit" in answer["error"]["message"]


def test_models_health_and_metrics(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "kvstored"
    assert post(served, "/healthz", None)[1] == {"status": "ok", "model": NAME}
    before = metrics(served)
    client.completions.create(prompt=WORDS, max_tokens=3, **GREEDY)
    after = metrics(served)
    assert after["kvstored_engine_finished_total"] == before["kvstored_engine_finished_total"] + 1
    first = "kvstored_engine_ttft_seconds_count"
    assert after[first] == before[first] + 1
    free, used = after["kvstored_engine_blocks_free"], after["kvstored_engine_blocks_used"]
    assert free + used == served.engine.pool.blocks
    assert post(served, "/healthz", b"{}")[0] == 405


def metrics(served: Served) -> dict[str, float]:
    lines = [line for line in served.fetch("/metrics").splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
