"""A served engine in this process, and the openai client on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import openai
import torch
from engine_support import NO_EOS, TINY, random_tensors
from tokenizers.processors import TemplateProcessing

from kvstored_client import KVClient
from kvstored_client.engine.checkpoint import Checkpoint, TokenizerSpec
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.model import Model
from kvstored_client.engine.server.serving import EngineServer, ServerSettings, listen
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import EngineLimits

T = TypeVar("T")

GIVE_UP_S = 60.0
NAME = "tiny"
LONG = 4000
"""More tokens than can be computed before a test that aborts them does so."""

LETTERS = "abcdefghijklmnop"
_PAIRS = list(itertools.islice(itertools.product(LETTERS, LETTERS), TINY.vocab_size - len(LETTERS)))
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}a"
SPEC = TokenizerSpec(
    tokens=[*LETTERS, *("".join(pair) for pair in _PAIRS)],
    merges=[" ".join(pair) for pair in _PAIRS],
    special_ids=[],
    eos_id=NO_EOS,
    chat_template=TEMPLATE,
)
"""Tokens are the letters a to p, and nearly all pairs of them."""


CONFIG = replace(TINY, context_tokens=8192)


def letter_tensors(seed: int = 8) -> dict[str, torch.Tensor]:
    """Random weights. With a head of its own the model doesn't say the same letters for ever."""
    head = torch.randn(
        CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed + 100)
    )
    return {**random_tensors(CONFIG, seed), "lm_head.weight": head / 4}


def letter_model(
    seed: int = 8, theta: float = CONFIG.rope_theta, dtype: torch.dtype = torch.float32
) -> Model:
    """A small random model of that vocabulary."""
    config = replace(CONFIG, rope_theta=theta)
    tensors = {name: tensor.to(dtype) for name, tensor in letter_tensors(seed).items()}
    return Model(Checkpoint(Path("tiny"), 0, config, SPEC, tensors))


def letter_engine(
    store: KVClient | None = None, weights: str = "", seed: int = 8, **limits: int | bool
) -> Engine:
    return make_engine(
        letter_model(seed),
        NO_EOS,
        store=store,
        weights=weights,
        limits=EngineLimits(**limits),
        blocks=100,
    )


@dataclass
class Served:
    """One engine, served on a thread. All waiting is for what the server says."""

    engine: Engine
    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer(SPEC))
    settings: ServerSettings = field(default_factory=lambda: ServerSettings(NAME))
    server: EngineServer = field(init=False)
    port: int = 0
    stopped_in_time: bool | None = None
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _ready: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(GIVE_UP_S)

    async def _run(self) -> None:
        with listen("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            self._loop = asyncio.get_running_loop()
            self.server = EngineServer(self.engine, self.tokenizer, self.settings)
            self.stopped_in_time = await self.server.run_on(listener, self._ready.set)

    def stop(self) -> None:
        self.server.ask_stop()
        self.join()

    def join(self) -> None:
        self._thread.join(GIVE_UP_S)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            yield client

    def on_engine(self, function: Callable[[], T]) -> T:
        """Run on the engine's thread, between two steps."""
        return self.server.runner.call(function).result(GIVE_UP_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the engine compute nothing meanwhile."""
        inside, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            inside.set()
            go_on.wait(GIVE_UP_S)

        result = self.server.runner.call(hold)
        assert inside.wait(GIVE_UP_S)
        try:
            yield
        finally:
            go_on.set()
            result.result(GIVE_UP_S)

    def wait_idle(self) -> None:
        """Wait until no request is in the server, and the engine has had a step since."""
        asyncio.run_coroutine_threadsafe(self.server.service.idle(), self._loop).result(GIVE_UP_S)
        for _ in range(2):  # the first may be run in the step that was under way
            self.on_engine(lambda: None)

    def fetch(self, path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=GIVE_UP_S) as answer:
            return str(answer.read().decode())

    def check_blocks(self) -> None:
        """Every block is free or used; after the last request only the tree uses any."""
        pool = self.engine.pool
        assert pool.free_blocks() + pool.used_blocks() == pool.blocks
        assert not self.engine.has_requests()
        assert pool.used_blocks() == len(self.engine.tree._order)


@contextlib.contextmanager
def serving(engine: Engine, **settings: object) -> Iterator[Served]:
    served = Served(engine, settings=ServerSettings(NAME, **settings))  # type: ignore[arg-type]
    served.start()
    try:
        yield served
    finally:
        served.stop()


def post(
    served: Served, path: str, raw: bytes | None, kind: str = "application/json"
) -> tuple[int, dict[str, Any], Any]:
    """Status, JSON and headers of one answer. `raw` None: a GET."""
    request = urllib.request.Request(served.url + path, raw, {"Content-Type": kind})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=GIVE_UP_S) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers


def save_letters(folder: Path) -> None:
    """The same model as a Hugging Face directory; a text begins with the token "p"."""
    from safetensors.torch import save_file

    save_file(letter_tensors(), folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
        "rope_theta": CONFIG.rope_theta,
        "rms_norm_eps": CONFIG.rms_epsilon,
        "max_position_embeddings": CONFIG.context_tokens,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    letters = Tokenizer(SPEC)._tokenizer
    letters.post_processor = TemplateProcessing("p $A", special_tokens=[("p", 15)])
    letters.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
