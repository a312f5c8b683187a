"""`kvctl tiers` and `kvctl purge`: where a daemon keeps things, and the bucket behind them."""

from __future__ import annotations

import argparse

from kvstored.kvctl import text
from kvstored.kvctl.access import Access
from kvstored.kvctl.outcome import DONE, Outcome
from kvstored.kvctl.selection import Mistake
from kvstored.kvctl.text import Json
from kvstored.server.status_page import plain
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import methods

Commands = argparse._SubParsersAction


def add(commands: Commands[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """The command lines."""
    words = "the tiers of a daemon, and what it owes to the bucket"
    commands.add_parser("tiers", help=words, description=words, parents=[common])
    words = (
        "drop everything of the namespace, or of one tenant, from this daemon and from the bucket, "
        "there also what other nodes stored"
    )
    purge = commands.add_parser("purge", help=words, description=words, parents=[common])
    purge.add_argument("--tenant", metavar="T", default="", help="this one's alone")
    purge.add_argument("--yes", action="store_true", help="it is meant")


def tiers(_args: argparse.Namespace, access: Access) -> Outcome:
    """Show the tiers and the bucket."""
    wire = access.operators_wire()
    try:
        status = wire.ask(methods.STATUS, admin.StatusRequest(), admin.StatusReply)
    finally:
        wire.close()
    rows = [plain(tier) for tier in status.tiers]
    bucket = plain(status.bucket) if status.HasField("bucket") else None
    answer: dict[str, Json] = {"tiers": [*rows], "bucket": bucket}
    return Outcome(DONE, answer, text.tiers(rows, bucket))


def purge(args: argparse.Namespace, access: Access) -> Outcome:
    """Drop everything of a namespace or tenant."""
    if not args.yes:
        whose = f"tenant {args.tenant} of " if args.tenant else ""
        raise Mistake(f"purge drops all of {whose}namespace {access.namespace}: add --yes")
    wire = access.operators_wire()
    try:
        request = admin.PurgeRequest(namespace=access.namespace, tenant=args.tenant)
        reply = wire.ask(methods.PURGE, request, admin.PurgeReply)
    finally:
        wire.close()
    words = f"{reply.chunks} chunks dropped here, {reply.bucket_objects} objects in the bucket"
    return Outcome(DONE, plain(reply), words)
