"""The `kvstored` command: `serve` and `check-config`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvstored import __version__, config
from kvstored.errors import ConfigError, KvstoredError
from kvstored.stopping import block_signals, leave

EXIT_MISTAKE = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstored",
        description="Per-node KV-cache store for LLM inference.",
        epilog="Settings: docs/configuration.md. Exit status: 0 fine, 1 a bug, 2 a mistake.",
    )
    parser.add_argument("--version", action="version", version=f"kvstored {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("serve", "run the daemon until SIGTERM or SIGINT"),
        (
            "check-config",
            "print the effective settings, secrets masked, or what is wrong with them",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML file (default: $KVSTORED_CONFIG)"
        )
        command.add_argument(
            "--insecure",
            action="store_true",
            help="serve namespaces without tokens over TCP too",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status; `serve`, once it has begun, ends the process."""
    arguments = _parser().parse_args(argv)
    try:
        loaded = config.load(arguments.config, os.environ, insecure=arguments.insecure)
        if arguments.command == "check-config":
            return _check(loaded)
        # Before the import: numpy's BLAS starts threads, and one that does not block the stop
        # signals would take them, and die of them, in the stop watch's place.
        block_signals()
        # The daemon's libraries take half a second to import: not for a check, not for a mistake.
        from kvstored.daemon import serve

        serve(loaded)
    except ConfigError as error:
        return _mistake(error.problems, "the configuration cannot be used")
    except KvstoredError as error:
        return _mistake([str(error)], "cannot start")


def _check(loaded: config.Loaded) -> int:
    for warning in loaded.warnings:
        sys.stderr.write(f"kvstored: warning: {warning}\n")
    source = loaded.file or "no file: defaults and environment"
    sys.stdout.write(f"# {source}\n{config.render(loaded.effective)}")
    return 0


def _mistake(problems: Sequence[str], summary: str) -> int:
    lines = "".join(f"  {problem}\n" for problem in problems)
    sys.stderr.write(f"kvstored: {summary}:\n{lines}")
    return EXIT_MISTAKE


def run() -> NoReturn:
    """Entry point of the process."""
    # Threads of a daemon that could not start are not worth waiting for.
    leave(main(), None)
