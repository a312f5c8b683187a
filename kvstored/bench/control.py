"""An idle uvloop with the daemon's own probe: what a loop's lag is compared with.

Prints "ready", then, for every line of its standard input, p99 of its lateness in us over the
probe's window; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from kvstored.looplag import LoopLagProbe


async def _measure() -> None:
    loop = asyncio.get_running_loop()
    probe = LoopLagProbe()
    running = loop.create_task(probe.run())
    _print("ready")
    while await loop.run_in_executor(None, sys.stdin.readline):
        _print(f"{probe.lag().p99_s * 1e6:.1f}")
    running.cancel()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_measure())
