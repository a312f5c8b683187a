"""`python -m kvstored_client.engine serve`: the options, and what is made of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvstored_client import KVClient, default_target
from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.checkpoint import DTYPES, bundled_smollm2, load
from kvstored_client.engine.credentials import read_token
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.family import family_of
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.model import Model
from kvstored_client.engine.server.serving import EngineServer, ServerSettings, listen
from kvstored_client.engine.server.weights import LoadModel
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import EngineLimits
from kvstored_client.errors import ServiceError, UsageError

EXIT_MISTAKE = 2
_MIB = 1 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvstored_client.engine serve",
        description="Serve a model over HTTP as OpenAI does (/v1/completions, "
        "/v1/chat/completions, /v1/models), using kvstored where there is one.",
        allow_abbrev=False,
    )
    option = parser.add_argument
    option(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file, or Hugging Face directory (default: SmolLM2-135M-Instruct)",
    )
    option("--name", help="the model's name in requests (default: the checkpoint's)")
    option("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's own")
    option("--device", default="cpu", help="cpu or cuda (default: cpu)")
    option("--host", default="127.0.0.1", help="default: 127.0.0.1; there is no authentication")
    option("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    option("--target", metavar="TARGET", help="the daemon, as without `serve`")
    option("--namespace", default="default")
    option("--token-file", metavar="FILE", help="as without `serve`")
    option("--no-store", action="store_true", help="do not use kvstored")
    option(
        "--shadow-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="part of the hits to compute again and compare (default: 0)",
    )
    option("--kv-mib", type=int, default=1024, metavar="N", help="memory for KV blocks, in MiB")
    option("--max-running", type=int, default=16, metavar="N", help="requests computed at a time")
    option("--max-waiting", type=int, default=256, metavar="N", help="requests queued beside them")
    option("--prefill-tokens", type=int, default=128, metavar="N", help="prompt tokens of a step")
    option("--grace-s", type=seconds, default=30.0, metavar="S", help="for requests when it stops")
    option(
        "--allow-weight-updates",
        action="store_true",
        help="allow POST /v1/update_weights, which reads any path that this process may read",
    )
    return parser


def seconds(text: str) -> float:
    """An option's value, 0 or more. Raises ValueError for another."""
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise ValueError
    return value


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0, or 2 for a mistake of the
    caller.
    """
    arguments = _parser().parse_args(argv)
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen(arguments.host, arguments.port))
            store = None
            if not arguments.no_store:
                store = stack.enter_context(_client(arguments))
            engine, tokenizer, settings = _made(arguments, store)
            where = f"http://{_host_port(listener.getsockname())}"
            return asyncio.run(_serve(engine, tokenizer, settings, listener, where))
    except (UsageError, ValueError, OSError, MemoryError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_MISTAKE


async def _serve(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    listener: socket.socket,
    where: str,
) -> int:
    server = EngineServer(engine, tokenizer, settings)
    ready = f"serving {settings.model_name} on {where}\n"
    if not await server.run_on(listener, lambda: _say(ready)):
        _say("kvstored did not take all new chunks in time\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _client(arguments: argparse.Namespace) -> KVClient:
    """A client, even where no daemon answers yet: it connects by itself when one does."""
    token = read_token(arguments.token_file, os.environ)
    client = KVClient(arguments.target or default_target(), arguments.namespace, token)
    try:
        client.check()
    except ServiceError as error:
        _say(f"kvstored is away, going on without it until it answers: {error}\n")
    return client


def _made(
    arguments: argparse.Namespace, store: KVClient | None
) -> tuple[Engine, Tokenizer, ServerSettings]:
    path = arguments.model or bundled_smollm2()
    checkpoint = load(path, dtype=arguments.dtype, device=arguments.device)
    model, tokenizer = Model(checkpoint), Tokenizer(checkpoint.tokenizer)
    weights = weights_fingerprint(checkpoint.path, checkpoint.header_bytes)
    block_bytes = family_of(checkpoint.config, weights, dtype=model.dtype).parts[0].nbytes
    blocks = arguments.kv_mib * _MIB // block_bytes
    if blocks < 1:
        raise ValueError(
            f"--kv-mib {arguments.kv_mib} holds no block; a block of {CHUNK_TOKENS} tokens has "
            f"{block_bytes} bytes"
        )
    engine = make_engine(
        model,
        tokenizer.eos_ids,
        store=store,
        weights=weights,
        limits=EngineLimits(arguments.max_running, arguments.max_waiting, arguments.prefill_tokens),
        blocks=blocks,
        shadow_fraction=arguments.shadow_fraction,
    )
    loads = _loader(arguments, path, model) if arguments.allow_weight_updates else None
    settings = ServerSettings(
        arguments.name or checkpoint.config.name, loads, grace_s=arguments.grace_s
    )
    return engine, tokenizer, settings


def _loader(arguments: argparse.Namespace, path: Path, present: Model) -> LoadModel:
    def load_other(other: Path | None) -> Model:
        # Of the present dtype, whatever the checkpoint's own is: the KV blocks are of it.
        dtype = str(present.dtype).removeprefix("torch.")
        checkpoint = load(other or path, dtype=dtype, device=present.device)
        # Under the name that the family has: it is the same model, in other weights.
        config = replace(checkpoint.config, name=present.config.name)
        return Model(replace(checkpoint, config=config))

    return load_other


def _host_port(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
