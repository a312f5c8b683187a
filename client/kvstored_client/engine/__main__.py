"""`python -m kvstored_client.engine`: answers one prompt, with kvstored where there is one; with
`serve` before all options, many of them, over HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstored_client import KVClient, default_target
from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.checkpoint import DTYPES, bundled_smollm2, load
from kvstored_client.engine.credentials import read_token
from kvstored_client.engine.engine import Completion, make_engine
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.errors import ServiceError, UsageError
from kvstored_client.failures import FailureKind

EXIT_MISTAKE = 2
PUT_WAIT_S = 30.0
_AWAY = frozenset(kind.value for kind in FailureKind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvstored_client.engine",
        description="Answer one prompt with the reference engine, using kvstored where there is "
        "one. The answer goes to stdout, what it took to stderr. For a server: `serve --help`.",
        allow_abbrev=False,  # --token would be taken for --token-file
    )
    parser.add_argument("--prompt", required=True, help="the user's message")
    parser.add_argument("--system", default="", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="complete the prompt, no chat template")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file, or Hugging Face directory (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's own")
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="unix:///path or dns:///host:port (default: $KVSTORED_TARGET, else this user's "
        "daemon, else the system's)",
    )
    parser.add_argument("--namespace", default="default")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file that holds the namespace's token, - for standard input (default: the token "
        "itself in $KVSTORED_TOKEN)",
    )
    parser.add_argument("--no-store", action="store_true", help="do not use kvstored")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of room")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake of the caller."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["serve"]:
        from kvstored_client.engine.server.cli import main as serve

        return serve(words[1:])
    arguments = _parser().parse_args(words)
    try:
        return _run(arguments)
    except (UsageError, ValueError, OSError, MemoryError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_MISTAKE


def _run(arguments: argparse.Namespace) -> int:
    sampling = Sampling(
        arguments.max_tokens,
        arguments.temperature,
        arguments.seed,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
    )
    target = arguments.target or default_target()
    with contextlib.ExitStack() as stack:
        store = None
        if not arguments.no_store:
            token = read_token(arguments.token_file, os.environ)
            store = _reachable(stack.enter_context(KVClient(target, arguments.namespace, token)))
        checkpoint = load(arguments.model or bundled_smollm2(), dtype=arguments.dtype)
        tokenizer = Tokenizer(checkpoint.tokenizer)
        engine = make_engine(
            Model(checkpoint),
            tokenizer.eos_ids,
            store=store,
            weights=weights_fingerprint(checkpoint.path, checkpoint.header_bytes),
            context_tokens=arguments.context,
        )
        completion = engine.generate(_prompt(arguments, tokenizer), sampling)
        text = tokenizer.decode(completion.token_ids)
        if arguments.json:
            sys.stdout.write(json.dumps(_report(checkpoint.config.name, completion, text)) + "\n")
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()
        asked = None if arguments.no_store else target
        sys.stderr.write(_summary(completion, asked, answered=store is not None) + "\n")
        if not engine.close(PUT_WAIT_S):
            sys.stderr.write("kvstored did not take all new chunks in time\n")
    return 0


def _prompt(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    if arguments.raw:
        return tokenizer.encode(arguments.prompt)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return tokenizer.chat([*system, {"role": "user", "content": arguments.prompt}])


def _reachable(client: KVClient) -> KVClient | None:
    """The client, if a daemon answers; else say so, and go on without."""
    try:
        client.check()
    except ServiceError as error:
        sys.stderr.write(f"kvstored is away, going on without it: {error}\n")
        return None
    return client


def _summary(completion: Completion, target: str | None, *, answered: bool) -> str:
    """What became of the prompt, in one line. `target`: the store asked, None for none;
    `answered`: it did when the command began.
    """
    tiers = ", ".join(f"{b / 1e6:.1f} MB from {t}" for t, b in completion.bytes_by_tier.items())
    computed = completion.prompt_tokens - completion.cached_tokens
    return (
        f"{completion.prompt_tokens} prompt tokens: {completion.cached_tokens} from the store"
        f"{f' ({tiers})' if tiers else ''}, {computed} computed; "
        f"{_store_state(completion, target, answered)}; "
        f"first token after {completion.ttft_ms:.0f} ms"
    )


def _store_state(completion: Completion, target: str | None, answered: bool) -> str:
    if target is None:
        return "no store asked"
    if not answered:
        return f"store {target} away"
    reason = completion.miss_reason
    if reason in _AWAY:
        return f"store {target} away ({reason})"
    if completion.prompt_tokens < CHUNK_TOKENS:
        return f"store {target} answered (it keeps whole chunks of {CHUNK_TOKENS} tokens)"
    return f"store {target} answered{f' ({reason})' if reason else ''}"


def _report(model: str, completion: Completion, text: str) -> dict[str, object]:
    return {
        "model": model,
        "text": text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "bytes_by_tier": dict(completion.bytes_by_tier),
        "miss_reason": completion.miss_reason,
        "ttft_ms": round(completion.ttft_ms, 3),
        "load_ms": round(completion.load_ms, 3),
        "total_ms": round(completion.total_ms, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
