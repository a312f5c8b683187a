"""The command line of kvctl. Parsing only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from kvstored import __version__
from kvstored.kvctl import fsck, tiers, volumes

_CHUNKS = "chunks are named by --family and --token-ids, or by --fingerprint and --keys"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kvctl",
        description="Look at and into a kvstored daemon.",
        epilog="Exit status: 0 done, 1 missed or failed, 2 wrong usage. More: docs/kvctl.md.",
    )
    top.add_argument("--version", action="version", version=f"kvctl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _common()
    for name, text in (
        ("status", "one picture of the daemon, for its own user and root"),
        ("usage", "what the namespace and its tenants hold"),
    ):
        commands.add_parser(name, help=text, description=text, parents=[common])
    tiers.add(commands, common)
    volumes.add(commands, common)
    _list(commands, common)
    _match(commands, common)
    _get(commands, common)
    _put(commands, common)
    _delete(commands, common)
    _bench(commands, common)
    fsck.add(commands)
    return top


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("daemon")
    group.add_argument(
        "--target",
        metavar="T",
        help="unix:///path or dns:///host:port ($KVCTL_TARGET or $KVSTORED_TARGET; default: this "
        "user's daemon, else the system's)",
    )
    group.add_argument("--namespace", metavar="N", help='($KVCTL_NAMESPACE; default: "default")')
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="file that holds the token, - for standard input ($KVCTL_TOKEN_FILE; or the token "
        "itself in $KVCTL_TOKEN)",
    )
    group.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds (30)")
    common.add_argument("--json", action="store_true", help="print one JSON object")
    return common


def _chunks(*, keys: bool) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("chunks")
    group.add_argument("--family", type=Path, metavar="FILE", help="JSON: model, weights, parts, …")
    group.add_argument("--token-ids", metavar="FILE", help="whole numbers; - for standard input")
    group.add_argument("--request-salt", default="", metavar="HEX", help="of the prefix (none)")
    group.add_argument("--start", type=int, default=0, metavar="N", help="first chunk (0)")
    if keys:
        group.add_argument("--stop", type=int, metavar="N", help="chunk to stop before (the end)")
        group.add_argument("--fingerprint", metavar="HEX", help="family, as `list` shows it")
        group.add_argument("--keys", metavar="HEX,…", help="chunk keys, as `list` shows them")
        group.add_argument("--parts", metavar="A,B", help="part names (all)")
    return parent


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _list(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "the namespace's chunks"
    command = commands.add_parser("list", help=text, description=text, parents=[common])
    command.add_argument("--fingerprint", metavar="HEX", help="of this family alone")
    command.add_argument("--limit", type=int, default=1000, metavar="N", help="at most (1000)")


def _match(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "which chunks are held, and why the others are not"
    command = commands.add_parser(
        "match", help=text, description=f"{text}; {_CHUNKS}", parents=[common, _chunks(keys=True)]
    )
    command.add_argument("--each", action="store_true", help="each chunk on its own")


def _get(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "read and verify chunks"
    command = commands.add_parser(
        "get", help=text, description=f"{text}; {_CHUNKS}", parents=[common, _chunks(keys=True)]
    )
    command.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="write this part's objects to FILE, back to back (repeatable)",
    )


def _put(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "store chunks from files"
    command = commands.add_parser(
        "put", help=text, description=text, parents=[common, _chunks(keys=False)]
    )
    command.add_argument(
        "--part",
        action="append",
        required=True,
        metavar="NAME=FILE",
        help="objects of this part, back to back; one object per FILE where its size varies",
    )
    command.add_argument("--durable", action="store_true", help="wait for a persistent tier")
    command.add_argument("--ttl", type=float, default=0.0, metavar="S", help="seconds to live")


def _delete(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "drop chunks from every tier"
    command = commands.add_parser(
        "delete", help=text, description=f"{text}; {_CHUNKS}", parents=[common, _chunks(keys=True)]
    )
    command.add_argument(
        "--corrupt", action="store_true", help="their bytes are wrong: they may be written again"
    )


def _bench(commands: Commands, common: argparse.ArgumentParser) -> None:
    text = "measure; docs/benchmarks.md says what"
    bench = commands.add_parser("bench", help=text, description=text)
    benches = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    prefixes = _bench_prefixes()
    text = "get and put over gRPC against a bare stream; starts a daemon unless --target is given"
    remote = benches.add_parser("remote", help=text, description=text, parents=[common, prefixes])
    remote.add_argument("--transport", choices=("unix", "tcp"), default="unix", help="(unix)")
    text = (
        "get, put and acquire through shared memory against bare copies; starts a daemon unless "
        "--target is given"
    )
    benches.add_parser("local", help=text, description=text, parents=[common, prefixes])
    text = (
        "durable put and cold get against bare O_DIRECT; starts a daemon of its own, with volumes "
        "that it removes"
    )
    disk = benches.add_parser(
        "disk", help=text, description=text, parents=[common, _bench_prefixes("1,4,16", 11)]
    )
    disk.add_argument(
        "--directory",
        type=Path,
        action="append",
        metavar="DIR",
        help="on the device to be measured (where temporary files are); repeatable, one volume in "
        "each",
    )
    text = "match among many objects against a bare look-up; starts a daemon of its own"
    lookup = benches.add_parser("lookup", help=text, description=text, parents=[common])
    for name, default, words in (
        ("--indexed-objects", 1_000_000, "objects that the daemon holds"),
        ("--keys", 512, "of one match"),
        ("--rounds", 11, "at least 5"),
        ("--samples", 2000, "matches per round"),
        ("--chunks", 64, "of 1 MiB, of the prefix that each busy session reads"),
    ):
        lookup.add_argument(
            name, type=int, default=default, metavar="N", help=f"{words} ({default})"
        )
    lookup.add_argument(
        "--busy-s",
        type=float,
        default=62.0,
        metavar="S",
        help="least time under load before the loop's lag is read, whose window is 60 s (62)",
    )
    text = "start with many objects on NVMe, until it serves; daemon and volume are its own"
    restart = benches.add_parser("restart", help=text, description=text, parents=[common])
    restart.add_argument(
        "--indexed-objects",
        type=int,
        default=1_000_000,
        metavar="N",
        help="objects on the volume (1000000)",
    )
    restart.add_argument("--rounds", type=int, default=5, metavar="N", help="at least 5 (5)")
    restart.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where the volume is made (where temporary files are)",
    )
    _bench_object(benches, common)
    _bench_engine(benches, common)


def _bench_object(benches: Commands, common: argparse.ArgumentParser) -> None:
    text = (
        "put into and cold get from a bucket against bare obstore; starts a daemon and a SeaweedFS "
        "of its own, whose data it removes"
    )
    bucket = benches.add_parser(
        "object", help=text, description=text, parents=[common, _bench_prefixes("1,4,16", 11)]
    )
    bucket.add_argument(
        "--delays-ms", default="0,30", metavar="N,N", help="added to each request, in turn (0,30)"
    )
    bucket.add_argument(
        "--directory", type=Path, metavar="DIR", help="for the server (where temporary files are)"
    )
    bucket.add_argument(
        "--quick", action="store_true", help="8 objects of 1 MiB, 5 rounds: whether it runs"
    )


def _bench_engine(benches: Commands, common: argparse.ArgumentParser) -> None:
    text = "the reference engine with and without kvstored; starts daemons of its own"
    engine = benches.add_parser("engine", help=text, description=text, parents=[common])
    engine.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file, or Hugging Face directory (SmolLM2-135M-Instruct)",
    )
    engine.add_argument(
        "--workloads",
        metavar="A,B",
        help="of chat, documents, rag, template, unique (all)",
    )
    engine.add_argument(
        "--concurrency", metavar="N,N", help="sessions at a time (1,8,16; with --quick 1,2)"
    )
    engine.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="sessions in a cell at least (5)"
    )
    engine.add_argument("--png", type=Path, metavar="FILE", help="draw a picture (matplotlib)")
    engine.add_argument(
        "--quick", action="store_true", help="a tiny random model and short prompts: for tests"
    )


def _bench_prefixes(sizes: str = "1,4", rounds: int = 21) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("benchmark")
    group.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"at least 5 ({rounds})"
    )
    group.add_argument(
        "--chunks", "--prefix-chunks", type=int, default=64, metavar="N", help="of the prefix (64)"
    )
    group.add_argument(
        "--object-mib", default=sizes, metavar="N,N", help=f"sizes of objects in MiB ({sizes})"
    )
    return parent
