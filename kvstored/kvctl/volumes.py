"""`kvctl volumes` and `kvctl scrub`: the volumes of a daemon's NVMe tier."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstored.config.sizes import parse_size
from kvstored.kvctl import text
from kvstored.kvctl.access import Access
from kvstored.kvctl.outcome import DONE, FAILED, Outcome
from kvstored.kvctl.selection import Mistake
from kvstored.kvctl.text import Json
from kvstored.kvctl.wire import Wire
from kvstored.server.status_page import plain
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import methods

Commands = argparse._SubParsersAction
T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
SAY_EVERY_S = 5.0


def add(commands: Commands[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """The command lines."""
    words = "the volumes of the NVMe tier; drain one"
    volumes = commands.add_parser("volumes", help=words, description=words, parents=[common])
    volumes.add_argument(
        "action", nargs="?", choices=("drain",), help="move what NAME holds elsewhere (list them)"
    )
    volumes.add_argument("name", nargs="?", metavar="NAME", help="the volume to drain")
    words = "read and verify all that volumes hold, and drop what is rotten"
    scrub = commands.add_parser(
        "scrub",
        help=words,
        description=words,
        parents=[common],
        epilog="Exit status: 0 all was read and nothing was rotten, 1 not so, 2 wrong usage.",
    )
    scrub.add_argument("names", nargs="*", metavar="NAME", help="volumes (all)")
    scrub.add_argument(
        "--rate",
        metavar="SIZE",
        help="bytes per second of each volume, such as 64MiB (as fast as it goes)",
    )
    for command in (volumes, scrub):
        command.add_argument("--no-wait", action="store_true", help="only begin")


def volumes(args: argparse.Namespace, access: Access) -> Outcome:
    """List volumes, or drain one."""
    if args.action == "drain" and not args.name:
        raise Mistake("volumes drain: name the volume")
    if args.no_wait and not args.action:
        raise Mistake("--no-wait: there is nothing to wait for")
    wire = access.operators_wire()
    try:
        return _drain(wire, args.name, wait=not args.no_wait) if args.action else _list(wire)
    finally:
        wire.close()


def scrub(args: argparse.Namespace, access: Access) -> Outcome:
    """Scrub volumes."""
    rate = _rate(args.rate)
    wire = access.operators_wire()
    try:
        known = [volume.name for volume in _ask_list(wire).volumes]
        # Before anything begins: half of it would be neither done nor refused.
        for name in args.names:
            if name not in known:
                raise Mistake(f"there is no volume {name}: {', '.join(known) or 'there is none'}")
        begun = [
            _ask_scrub(wire, admin.ScrubRequest(volume=name, rate_bytes_per_s=rate))
            for name in dict.fromkeys(args.names or [""])
        ]
        if args.no_wait:
            return _scrubbed(begun, waited=False)
        runs = [reply.run for reply in begun]
        return _scrubbed(
            _until(
                lambda: [_ask_scrub(wire, admin.ScrubRequest(run=run)) for run in runs],
                lambda replies: all(reply.done for reply in replies),
                _scrub_progress,
            ),
            waited=True,
        )
    finally:
        wire.close()


def _rate(words: str | None) -> int:
    if words is None:
        return 0
    try:
        rate = parse_size(words)
    except ValueError as error:
        raise Mistake(f"--rate {words}: write a size, such as 64MiB") from error
    if not 0 < rate < 1 << 60:
        raise Mistake(f"--rate {words}: at least one byte; leave it away for no bound")
    return rate


# ---- requests ------------------------------------------------------------------------------------


def _ask_list(wire: Wire) -> admin.ListVolumesReply:
    wire.renew()
    return wire.ask(methods.LIST_VOLUMES, admin.ListVolumesRequest(), admin.ListVolumesReply)


def _ask_scrub(wire: Wire, request: admin.ScrubRequest) -> admin.ScrubReply:
    wire.renew()
    return wire.ask(methods.SCRUB, request, admin.ScrubReply)


def _until(look: Callable[[], T], done: Callable[[T], bool], say: Callable[[T], str]) -> T:
    """Look until it is done, with a line on stderr now and then when something has moved."""
    pause_s, said, quiet_until = FIRST_PAUSE_S, "", time.monotonic()
    while True:
        seen = look()
        line = say(seen)
        if line != said and (time.monotonic() >= quiet_until or done(seen)):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
            said, quiet_until = line, time.monotonic() + SAY_EVERY_S
        if done(seen):
            return seen
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


# ---- list and drain ------------------------------------------------------------------------------


def _list(wire: Wire) -> Outcome:
    reply = _ask_list(wire)
    rows = [plain(volume) for volume in reply.volumes]
    answer: dict[str, Json] = {
        "volumes": [*rows],
        "write_amplification": reply.write_amplification or None,
    }
    return Outcome(DONE, answer, text.volumes(rows, reply.write_amplification))


def _drain(wire: Wire, name: str, *, wait: bool) -> Outcome:
    wire.renew()
    wire.ask(methods.DRAIN_VOLUME, admin.DrainVolumeRequest(name=name), admin.DrainVolumeReply)
    if wait:
        found = _until(
            lambda: _volume(wire, name), lambda v: v.state != "draining", _drain_progress
        )
    else:
        found = _volume(wire, name)
    answer: dict[str, Json] = {"volume": plain(found)}
    drained = found.state == "drained" or (not wait and found.state == "draining")
    return Outcome(DONE if drained else FAILED, answer, _drain_progress(found))


def _volume(wire: Wire, name: str) -> admin.VolumeStatus:
    for volume in _ask_list(wire).volumes:
        if volume.name == name:
            return volume
    raise Mistake(f"there is no volume {name} any more: the daemon was started anew without it")


def _drain_progress(volume: admin.VolumeStatus) -> str:
    detail = f": {volume.detail}" if volume.detail else ""
    left = f", {volume.objects} objects are left" if volume.objects else ""
    return f"{volume.name} is {volume.state}{detail}{left}"


# ---- scrub ---------------------------------------------------------------------------------------


def _parts(replies: Sequence[admin.ScrubReply]) -> list[admin.ScrubProgress]:
    return [part for reply in replies for part in reply.volumes]


def _scrub_progress(replies: Sequence[admin.ScrubReply]) -> str:
    return "; ".join(
        f"{part.volume} {part.state}, {part.scrubbed_objects} of {part.objects} objects, "
        f"{text.size(part.scrubbed_bytes)}"
        for part in _parts(replies)
    )


def _scrubbed(replies: Sequence[admin.ScrubReply], *, waited: bool) -> Outcome:
    parts = _parts(replies)
    fine = ("done",) if waited else ("done", "running")
    good = all(
        part.state in fine and not (part.dropped_objects or part.unreadable_objects)
        for part in parts
    )
    rows = [plain(part) for part in parts]
    return Outcome(DONE if good else FAILED, {"volumes": [*rows]}, text.scrubs(rows))
