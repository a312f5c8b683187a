"""The `kvctl` command: an operator's view of a daemon. See docs/kvctl.md."""

from kvstored.kvctl.command import main

__all__ = ["main"]
