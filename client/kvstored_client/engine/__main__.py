"""`python -m kvstored_client.engine`: answers one prompt, with kvstored where there is one."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstored_client import KVClient
from kvstored_client.engine.checkpoint import bundled_smollm2, load_gguf
from kvstored_client.engine.engine import Completion, make_engine
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.model import LlamaModel
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.errors import ServiceError, UsageError

EXIT_MISTAKE = 2
PUT_WAIT_S = 30.0


def default_target(environ: Mapping[str, str]) -> str:
    """$KVSTORED_TARGET, else the socket where a daemon listens that was told nothing else (see
    docs/configuration.md).
    """
    if given := environ.get("KVSTORED_TARGET"):
        return given
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        folder = Path(runtime) / "kvstored"
    elif os.getuid() == 0:
        folder = Path("/run/kvstored")
    else:
        folder = Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"kvstored-{os.getuid()}"
    return f"unix://{folder}/kvstored.sock"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvstored_client.engine",
        description="Answer one prompt with the reference engine, using kvstored where there is "
        "one. The answer goes to stdout, what it took to stderr.",
    )
    parser.add_argument("--prompt", required=True, help="the user's message")
    parser.add_argument("--system", default="", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="complete the prompt, no chat template")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--target", metavar="TARGET", help="unix:///path or dns:///host:port")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--token", help="default: $KVSTORED_TOKEN")
    parser.add_argument("--no-store", action="store_true", help="do not use kvstored")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of room")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake of the caller."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (UsageError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_MISTAKE


def _run(arguments: argparse.Namespace) -> int:
    sampling = Sampling(arguments.max_tokens, arguments.temperature, arguments.seed)
    target = arguments.target or default_target(os.environ)
    token = arguments.token or os.environ.get("KVSTORED_TOKEN")
    with contextlib.ExitStack() as stack:
        store = None
        if not arguments.no_store:
            store = _reachable(stack.enter_context(KVClient(target, arguments.namespace, token)))
        checkpoint = load_gguf(arguments.model or bundled_smollm2())
        tokenizer = Tokenizer(checkpoint.tokenizer)
        engine = make_engine(
            LlamaModel(checkpoint),
            tokenizer.eos_id,
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
        sys.stderr.write(_summary(completion) + "\n")
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


def _summary(completion: Completion) -> str:
    tiers = ", ".join(f"{b / 1e6:.1f} MB from {t}" for t, b in completion.bytes_by_tier.items())
    return (
        f"{completion.prompt_tokens} prompt tokens, {completion.cached_tokens} of them not computed"
        f"{f' ({tiers})' if tiers else ''}; first token after {completion.ttft_ms:.0f} ms"
    )


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
