"""A served engine on a real daemon, the command, and the bundled model behind it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_served import GIVE_UP_S, LETTERS, NAME, Served, letter_engine, save_letters, serving
from support_daemon import running_daemon
from test_engine_serve_life import cached, update

from kvstored_client import KVClient, Timeouts
from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.engine import make_engine
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.server.serving import ServerSettings
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import EngineLimits

WEIGHTS = "ab" * 32
PROMPT = "".join(LETTERS[(i * i + 5 * i) % 16] + LETTERS[i % 5] for i in range(150))


def test_the_store_is_used_and_salts_tenants_and_epochs_are_kept_apart() -> None:
    with running_daemon() as daemon, client_of(daemon.target) as store:
        with serving(letter_engine(store, WEIGHTS)) as served:
            cold = ask(served, "alpha")
            assert cached(cold) == 0
            assert cached(ask(served, "beta", cache_salt="mine")) == 0
        assert served.stopped_in_time  # what it stored is there
        assert charged(store) == {"alpha", "beta"}
        whole = (tokens(cold) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        assert whole > CHUNK_TOKENS
        with serving(letter_engine(store, WEIGHTS), load_weights=same) as served:
            warm = ask(served, "alpha")
            assert cached(warm) == whole
            assert warm.choices[0].text == cold.choices[0].text
            assert 'store_bytes_by_tier_total{tier="ram"}' in served.fetch("/metrics")
            assert cached(ask(served, "beta", cache_salt="mine")) == whole
            assert cached(ask(served, "beta", cache_salt="other")) == 0
            assert update(served, {"weights_epoch": 1})[0] == 200
            assert cached(ask(served, "alpha")) == 0
        with serving(letter_engine(store, WEIGHTS), load_weights=same) as served:
            assert update(served, {"weights_epoch": 1})[0] == 200
            assert cached(ask(served, "gamma")) == whole  # of the epoch that both have


def charged(store: KVClient) -> set[str]:
    return {usage.tenant for usage in store.usage().tenants if usage.charged_bytes}


def client_of(target: str) -> KVClient:
    return KVClient(target, timeouts=Timeouts(match_s=30, get_s=60, put_s=60))


def same(path: object) -> Model:
    model = letter_engine().model
    assert isinstance(model, Model)
    return model


def ask(served: Served, tenant: str, **extra: str) -> Any:
    with served.client() as client:
        done = client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=4,
            temperature=0,
            extra_headers={"X-Tenant": tenant},
            extra_body=extra,
        )
    if served.engine.hook is not None:
        assert served.engine.hook.drain(GIVE_UP_S)
    return done


def tokens(done: Any) -> int:
    return int(done.usage.prompt_tokens)


def test_the_bundled_model_chats_as_the_engine_does(model: Model, tokenizer: Tokenizer) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say: café."}]
    prompt = tokenizer.chat(messages)
    alone = make_engine(model, tokenizer.eos_ids, context_tokens=256)
    want = tokenizer.decode(alone.generate(prompt, Sampling(max_tokens=4)).token_ids)
    engine = make_engine(model, tokenizer.eos_ids, limits=EngineLimits(), blocks=8)
    served = Served(engine, tokenizer, ServerSettings("SmolLM2"))
    served.start()
    try:
        with served.client() as client:
            chat: dict[str, Any] = {"model": "SmolLM2", "messages": messages, "temperature": 0}
            done = client.chat.completions.create(max_tokens=4, **chat)
            assert done.choices[0].message.content == want
            assert done.usage is not None
            assert done.usage.prompt_tokens == len(prompt)
            stream = client.chat.completions.create(max_tokens=4, stream=True, **chat)
            assert "".join(c.choices[0].delta.content or "" for c in stream) == want
        served.wait_idle()
        served.check_blocks()
    finally:
        served.stop()


def test_the_command_serves_a_directory_and_stops_on_a_signal(tmp_path: Path) -> None:
    save_letters(tmp_path)
    command = [sys.executable, "-m", "kvstored_client.engine", "serve", "--port", "0"]
    options = ["--model", str(tmp_path), "--kv-mib", "8", "--target", f"unix://{tmp_path}/none"]
    with subprocess.Popen(
        [*command, *options, "--name", "letters"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    ) as child:
        try:
            assert child.stderr is not None
            assert child.stderr.readline().startswith("kvstored is away, going on without it until")
            ready = child.stderr.readline()
            where = re.fullmatch(r"serving letters on (http://127\.0\.0\.1:\d+)\n", ready)
            assert where is not None, ready
            http = openai.DefaultHttpxClient(trust_env=False)
            with openai.OpenAI(
                base_url=f"{where[1]}/v1", api_key="none", max_retries=0, http_client=http
            ) as client:
                done = client.completions.create(model="letters", prompt="abc", max_tokens=3)
                assert done.usage is not None
                assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 3)
            child.send_signal(signal.SIGTERM)
            assert child.wait(GIVE_UP_S) == 0
            assert child.stderr.read() == ""
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1 port 0"),
        (["--model", "/nonexistent.gguf"], "/nonexistent.gguf"),
        (["--target", "localhost"], "target 'localhost' is not understood"),
        (["--token-file", "/nonexistent"], "/nonexistent"),
        (["--port", "99999"], "port 99999"),
        (["--device", "abacus"], "device 'abacus' is none"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
    ],
)
def test_mistakes_of_the_command_are_said_in_one_line(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvstored_client.engine.__main__ import main

    store = [] if "--target" in options or "--token-file" in options else ["--no-store"]
    assert main(["serve", "--port", "0", *store, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem in error
    assert error.count("\n") == 1
