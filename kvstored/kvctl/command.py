"""The `kvctl` command: dispatch, printing, and the commands that name no chunks."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvstored.kvctl import arguments as command_line
from kvstored.kvctl import chunks, fsck, text, tiers, volumes
from kvstored.kvctl.access import Access
from kvstored.kvctl.outcome import BROKEN_PIPE, DONE, FAILED, WRONG_USAGE, Outcome, failure
from kvstored.kvctl.selection import Mistake, hex_bytes
from kvstored.kvctl.text import Json
from kvstored_client import KVStoredClientError
from kvstored_client.errors import ConnectError, UsageError

if TYPE_CHECKING:
    from kvstored.bench.report import Case


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvctl; the exit status."""
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit it is too late to be quiet
    except BrokenPipeError:  # whoever read has gone, as in `kvctl list | head`
        _forget_output()
        return BROKEN_PIPE


def _main(argv: Sequence[str] | None) -> int:
    args = command_line.parser().parse_args(argv)
    try:
        outcome = (
            fsck.run(args)  # needs no daemon, so no token either
            if args.command == "fsck"
            else _carry_out(args, Access.of(args, os.environ))
        )
    except (Mistake, UsageError) as error:
        outcome = failure(WRONG_USAGE, str(error))
    except KVStoredClientError as error:
        outcome = failure(FAILED, str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        outcome = failure(FAILED, str(error))
    except KeyboardInterrupt:
        return 130
    out = sys.stderr if outcome.aside else sys.stdout
    if args.json:
        out.write(json.dumps(outcome.answer) + "\n")
    elif "error" not in outcome.answer:
        out.write(outcome.people + "\n")
    if "error" in outcome.answer:
        sys.stderr.write(f"kvctl: {outcome.people}\n")
    return outcome.status


def _forget_output() -> None:
    """Let what is still buffered go nowhere: the interpreter writes it out as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _carry_out(args: argparse.Namespace, access: Access) -> Outcome:
    try:
        return COMMANDS[args.command](args, access)
    except ConnectError as error:
        message = (
            f"no daemon answers at {access.target}: start it with `kvstored serve`, or name it "
            "with --target"
        )
        return failure(FAILED, message, str(error))


def _status(_args: argparse.Namespace, access: Access) -> Outcome:
    with access.client(access.operators_target) as client:
        answer = asdict(client.status(timeout_s=access.timeout_s))
    return Outcome(DONE, answer, text.status(answer))


def _usage(_args: argparse.Namespace, access: Access) -> Outcome:
    with access.client() as client:
        answer = asdict(client.usage(timeout_s=access.timeout_s))
    return Outcome(DONE, answer, text.usage(answer))


def _list(args: argparse.Namespace, access: Access) -> Outcome:
    if args.limit < 1:
        raise Mistake(f"--limit {args.limit}: at least 1")
    family = hex_bytes("--fingerprint", args.fingerprint, 32) if args.fingerprint else b""
    with access.client() as client:
        found = list(
            itertools.islice(
                client.list(family, min(args.limit + 1, 10_000), timeout_s=access.timeout_s),
                args.limit + 1,
            )
        )
    entries: list[Json] = [
        {
            **asdict(entry),
            "key": entry.key.hex(),
            "family": entry.family.hex(),
            "parts": list(entry.parts),
        }
        for entry in found[: args.limit]
    ]
    answer: dict[str, Json] = {"entries": entries, "complete": len(found) <= args.limit}
    return Outcome(DONE, answer, text.listing(answer))


def _bench(args: argparse.Namespace, access: Access) -> Outcome:
    from kvstored.bench import report  # for this command alone
    from kvstored.bench.processes import BenchError

    if args.rounds < report.MIN_ROUNDS:
        raise Mistake(f"--rounds {args.rounds}: at least {report.MIN_ROUNDS}")
    try:
        cases = BENCHES[args.bench](args, access)
    except BenchError as error:
        return failure(FAILED, str(error))
    people = report.table
    if args.bench == "engine":
        from kvstored.bench.engine_report import table as people
    return Outcome(DONE, report.report(args.bench, cases), people(cases))


def _bench_remote(args: argparse.Namespace, access: Access) -> list[Case]:
    from kvstored.bench import remote

    settings = remote.Settings(
        target=access.target if access.explicit else None,
        namespace=access.namespace,
        token=access.token,
        tcp=args.transport == "tcp",
        object_bytes=_object_sizes(args),
        prefix_chunks=args.chunks,
        rounds=args.rounds,
    )
    return remote.run(settings, _say)


def _bench_local(args: argparse.Namespace, access: Access) -> list[Case]:
    from kvstored.bench import local

    settings = local.Settings(
        target=access.target if access.explicit else None,
        namespace=access.namespace,
        token=access.token,
        object_bytes=_object_sizes(args),
        prefix_chunks=args.chunks,
        rounds=args.rounds,
    )
    return local.run(settings, _say)


def _bench_disk(args: argparse.Namespace, _access: Access) -> list[Case]:
    from kvstored.bench import disk

    if args.target:
        raise Mistake("bench disk makes volumes and removes them: it starts its own daemon")
    settings = disk.Settings(
        object_bytes=_object_sizes(args),
        prefix_chunks=args.chunks,
        rounds=args.rounds,
        directories=tuple(args.directory or ()),
    )
    return disk.run(settings, _say)


def _bench_lookup(args: argparse.Namespace, _access: Access) -> list[Case]:
    from kvstored.bench import lookup

    if args.target:
        raise Mistake("bench lookup looks into its daemon's process: it starts its own")
    if not 1 <= args.keys <= args.indexed_objects:
        raise Mistake(f"--keys {args.keys}: 1 to --indexed-objects")
    if args.samples < 1 or args.chunks < 1 or args.busy_s < 0:
        raise Mistake("--samples and --chunks are at least 1, --busy-s at least 0")
    settings = lookup.Settings(
        indexed_objects=args.indexed_objects,
        keys=args.keys,
        rounds=args.rounds,
        samples=args.samples,
        busy_s=args.busy_s,
        busy_chunks=args.chunks,
    )
    return lookup.run(settings, _say)


def _bench_restart(args: argparse.Namespace, _access: Access) -> list[Case]:
    from kvstored.bench import restart

    if args.target:
        raise Mistake("bench restart starts its own daemon, again and again")
    settings = restart.Settings(
        objects=args.indexed_objects, rounds=args.rounds, directory=args.directory
    )
    return restart.run(settings, _say)


def _bench_object(args: argparse.Namespace, _access: Access) -> list[Case]:
    from kvstored.bench import bucket

    if args.target:
        raise Mistake("bench object starts its own daemon, and its own bucket")
    default = bucket.QUICK
    if not args.quick:
        default = bucket.Settings(_object_sizes(args), args.chunks, args.rounds)
    delays_ms = _numbers("--delays-ms", args.delays_ms)
    if min(delays_ms) < 0:
        raise Mistake(f"--delays-ms {args.delays_ms}: at least 0")
    settings = replace(default, delays_ms=delays_ms, directory=args.directory)
    return bucket.run(settings, _say)


def _bench_engine(args: argparse.Namespace, _access: Access) -> list[Case]:
    from kvstored.bench import engine, picture

    if args.target:
        raise Mistake("bench engine starts its own daemons")
    if args.png is not None:
        picture.check(args.png)  # before a quarter of an hour of measuring
    default = engine.QUICK if args.quick else engine.Settings()
    settings = replace(default, model=args.model, rounds=args.rounds)
    if args.workloads:
        settings = replace(settings, workloads=tuple(args.workloads.split(",")))
    if args.concurrency:
        settings = replace(settings, concurrencies=_numbers("--concurrency", args.concurrency))
    cases = engine.run(settings, _say)
    if args.png is not None:
        picture.draw(cases, args.png)
        _say(f"picture: {args.png}")
    return cases


def _numbers(option: str, words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise Mistake(f"{option} {words}: write whole numbers") from error


def _object_sizes(args: argparse.Namespace) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) << 20 for word in args.object_mib.split(","))
    except ValueError as error:
        raise Mistake(f"--object-mib {args.object_mib}: write whole numbers") from error
    if not all(1 << 20 <= size <= 256 << 20 for size in sizes) or args.chunks < 1:
        raise Mistake("--object-mib is 1 to 256, --chunks at least 1")
    return sizes


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


BENCHES: dict[str, Callable[[argparse.Namespace, Access], list[Case]]] = {
    "remote": _bench_remote,
    "local": _bench_local,
    "disk": _bench_disk,
    "lookup": _bench_lookup,
    "restart": _bench_restart,
    "object": _bench_object,
    "engine": _bench_engine,
}

COMMANDS: dict[str, Callable[[argparse.Namespace, Access], Outcome]] = {
    "status": _status,
    "usage": _usage,
    "tiers": tiers.tiers,
    "purge": tiers.purge,
    "volumes": volumes.volumes,
    "scrub": volumes.scrub,
    "list": _list,
    "match": chunks.match,
    "get": chunks.get,
    "put": chunks.put,
    "delete": chunks.delete,
    "bench": _bench,
}
