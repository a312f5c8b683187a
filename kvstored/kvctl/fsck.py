"""`kvctl fsck`: check a volume that no daemon uses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvstored.errors import DataDirectoryError
from kvstored.kvctl import text
from kvstored.kvctl.outcome import DONE, FAILED, WRONG_USAGE, Outcome, failure
from kvstored.kvctl.text import Json

if TYPE_CHECKING:
    from kvstored.fsck.findings import Report

Commands = argparse._SubParsersAction
_LINES = 200


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """The command line."""
    words = "check an NVMe volume, byte for byte, without a daemon; never writes"
    command = commands.add_parser(
        "fsck",
        help=words,
        description=words,
        epilog="Exit status: 0 no damage, 1 damage, 2 it could not be checked. Findings: "
        "docs/nvme-format.md.",
    )
    command.add_argument(
        "--offline",
        type=Path,
        required=True,
        metavar="DIR",
        help="the volume's directory, the one with the file `superblock`",
    )
    command.add_argument(
        "--ignore-lock",
        action="store_true",
        help="also while a daemon uses it: what it has under way is then found as well",
    )
    command.add_argument(
        "--threads", type=int, default=4, metavar="N", help="regions read at a time (4)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> Outcome:
    """Check the volume; progress goes to stderr."""
    from kvstored.fsck.check import Options, check_volume  # for this command alone

    if not 1 <= args.threads <= 64:
        return failure(WRONG_USAGE, f"--threads {args.threads}: 1 to 64")
    try:
        report = check_volume(args.offline, Options(args.ignore_lock, args.threads), _say)
    except DataDirectoryError as error:
        return failure(WRONG_USAGE, str(error))
    status = DONE if report.clean else FAILED
    return Outcome(status, _answer(report), _people(report))


def _answer(report: Report) -> dict[str, Json]:
    return {
        "directory": report.directory,
        "volume": report.volume,
        "mode": report.mode,
        "locked": report.locked,
        "clean": report.clean,
        "figures": {name: report.figures[name] for name in _FIGURES},
        "counts": dict(sorted(report.counts.items())),
        "findings": [dict(finding.answer()) for finding in report.findings],
    }


_FIGURES = (
    "regions",
    "regions_used",
    "slots_checked",
    "records",
    "objects_good",
    "bytes_good",
    "bytes_read",
)


def _people(report: Report) -> str:
    figures = report.figures
    lines = [
        f"{report.directory}: {'no damage' if report.clean else 'DAMAGE'}",
        f"{figures['objects_good']} objects good, {text.size(figures['bytes_good'])}; "
        f"{figures['records']} records, {figures['regions_used']} of {figures['regions']} regions "
        f"in use, {figures['slots_checked']} slots",
    ]
    if report.locked:
        lines.append("a daemon has it locked: work under way may be among the findings")
    if report.findings:
        rows = (
            (f.kind, f.where, f.key.hex()[:16] if f.key else "", f.detail)
            for f in report.findings[:_LINES]
        )
        lines += ["", text.table(("finding", "where", "key", "what"), rows)]
    if len(report.findings) > _LINES:
        lines.append(f"… and more, listed with --json: {sum(report.counts.values())} in all")
    return "\n".join(lines)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
