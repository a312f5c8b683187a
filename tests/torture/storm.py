"""`make torture`: a real daemon killed under a storm, a hundred times; what it said must hold.

Several clients, by shared memory and by gRPC, put (durable and accepted; objects from 12 KB to 1.8
MB, of several parts, of families that change), reserve and commit or give up, get, delete, touch
and prefetch the same chunks, through a RAM tier that is much too small and volumes on which
something is evicted all the while. In the middle of it the daemon gets SIGKILL, as soon as a
promise has been heard or at a random time; or SIGTERM, or both. Some of its starts are killed as
well, and sometimes the volumes lose their index before the next. Then:

- it is ready each time; before the first request nothing is above its cap, and its figures are what
  the file system and its own accounts say;
- every object that there may be is read and compared: `storm_ledger` says what must be there, what
  may be, and what may not. Whose bytes they are is in the bytes;
- what was durable and is gone must have been deleted, or evicted by a decision that the daemon had
  written down (the logger `kvstored.decisions`, which `storm_serve` has written at once: the
  reasons that misses give do not outlive the process). Where all has room nothing may be evicted;
- after a clean stop what was accepted counts as durable;
- `kvctl fsck` finds no damage.

SIGKILL leaves the page cache alone: what a power loss would take is the affair of
tests/tiers/test_nvme_powerloss.py.

The same seed gives the same calls in each thread and the same plan of kills; when what happens is
up to the machine. The last line says how it went: `acks` are durable objects that were answered,
`survivors` durable objects that were found after a restart (each time), `evicted` those whose
eviction was written down, `corrupt` wrong bytes, `phantom` what may not be there, `lost` what must
be there and is not. The status is 1 if any of the last three is not 0, or any other rule was
broken; the data is left to be looked at then.
"""

from __future__ import annotations

import argparse
import logging
import sys

from storm_loops import SCENARIOS, Report, storms


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", default="", help="only those with this in their name")
    asked = parser.parse_args()
    logging.getLogger("kvstored_client").setLevel(logging.CRITICAL)
    chosen = [s for s in SCENARIOS if asked.scenario in s.name]
    total = Report()
    for number, scenario in enumerate(chosen):
        loops = asked.loops // len(chosen) + (number < asked.loops % len(chosen))
        print(f"{scenario.name}: {loops} loops, seed {asked.seed}", flush=True)
        with storms(scenario, asked.seed) as running:
            running.run(loops)
        total.add(running.report)
        if not total.good:
            break
    print(*total.wrong, sep="\n", end="\n" if total.wrong else "")
    print(total, flush=True)
    return 0 if total.good else 1


if __name__ == "__main__":
    sys.exit(main())
