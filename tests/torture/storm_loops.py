"""Storms on one data directory, each ended by the daemon's death, and a look at what is left."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from local.torture_daemon import MIB
from storm_clients import Course, Worker
from storm_content import Chain, chains
from storm_daemon import StormDaemon
from storm_ledger import Ledger, Left, Object, Verdict
from storm_survey import NOBODYS, Survey

from kvstored_client import KVClient

WORKERS = 5
STEMS_CAPPED = 2
LONGEST_STORM_S = 1.2
ENDS = ("promise", "killed while stopping", "promise", "stop", "moment", "promise", "moment")
"""How the storms end, in turn: SIGKILL as soon as some promise has been heard; SIGKILL after a
random time; SIGTERM; SIGTERM, and SIGKILL before that has come to its end.
"""
DIES_STARTING_EVERY = 3
FSCK_EVERY = 4
LOSES_INDEX_EVERY = 4
"""Then the volumes' indexes are removed, or cut in half, and what holds are the slot headers."""

NEW_FAMILIES_EVERY = 3


@dataclass(frozen=True)
class Scenario:
    """`roomy`: all that is ever live fits, so that nothing may be evicted."""

    name: str
    volumes_mib: tuple[int, ...]
    stems: int
    capped_mib: int = 0
    roomy: bool = False


SCENARIOS = (
    Scenario("three volumes", (40, 48, 64), stems=10, capped_mib=16),
    Scenario("one volume", (96,), stems=8, capped_mib=20),
    Scenario("room for all", (384, 384), stems=4, roomy=True),
)


@dataclass
class Report:
    """What it came to. `wrong`: other rules that were broken, in words."""

    loops: int = 0
    acks: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        faults = (Verdict.CORRUPT, Verdict.PHANTOM, Verdict.LOST)
        return not self.wrong and not any(self.verdicts[v] for v in faults)

    def __str__(self) -> str:
        count = self.verdicts
        return (
            f"loops={self.loops} acks={self.acks} survivors={count[Verdict.SURVIVED]} "
            f"evicted={count[Verdict.EVICTED]} corrupt={count[Verdict.CORRUPT]} "
            f"phantom={count[Verdict.PHANTOM]} lost={count[Verdict.LOST]}"
        )

    def add(self, other: Report) -> None:
        self.loops += other.loops
        self.acks += other.acks
        self.verdicts += other.verdicts
        self.wrong += other.wrong


class Loops:
    """The loops of one scenario."""

    def __init__(
        self, scenario: Scenario, daemon: StormDaemon, seed: int, longest_s: float
    ) -> None:
        self._longest_s = longest_s
        self._scenario = scenario
        self._daemon = daemon
        self._seed = seed
        self._ledger = Ledger()
        self._generation = 0
        self._index_lost = False
        self.report = Report()
        targets = (daemon.target, daemon.target, daemon.remote_target)
        self._clients = [
            {name: KVClient(target, name) for name in daemon.namespaces} for target in targets
        ]

    def close(self) -> None:
        for clients in self._clients:
            for client in clients.values():
                client.close()

    def run(self, loops: int) -> None:
        """So many storms."""
        self._daemon.start()
        for loop in range(loops):
            random = Random(f"{self._seed} {self._scenario.name} {loop}")
            self._generation = loop // NEW_FAMILIES_EVERY
            if self._scenario.roomy:
                self._make_room()
            end = ENDS[loop % len(ENDS)]
            clean, course = self._storm(end, random)
            self._fall(loop, random)
            before = Counter(self.report.verdicts)
            self._look(clean)
            self.report.loops += 1
            self.report.acks += course.acks
            became = Counter(self.report.verdicts)
            became.subtract(before)
            words = ", ".join(f"{became[v]} {v.value}" for v in Verdict if became[v])
            index = " (index lost)" if loses_index(loop) else ""
            print(f"{loop}: {end}{index}: {course.calls} calls, {words}", flush=True)
            if not self.report.good:
                break

    # ---- the storm -------------------------------------------------------------------------------

    def _chains(self, generation: int) -> list[Chain]:
        if generation < 0:
            return []
        found = list(chains("default", generation, self._scenario.stems))
        if self._scenario.capped_mib:
            found += chains("capped", generation, STEMS_CAPPED)
        return found

    def _make_room(self) -> None:
        """Delete what is older than the storm's families and those before."""
        deleting = Course(lambda: None)
        for chain in self._chains(self._generation - 2):
            Worker.delete_all(chain, self._clients[0][chain.namespace], self._ledger, deleting)
        self.report.wrong += deleting.wrong

    def _storm(self, end: str, random: Random) -> tuple[bool, Course]:
        """Gives whether the daemon ended in peace, all it had accepted being durable."""
        daemon = self._daemon
        countdown = random.randint(1, 60) if end == "promise" else 0
        course = Course(daemon.strike, countdown)
        workers = [
            Worker(
                self._clients[n % len(self._clients)],
                self._chains(self._generation),
                self._chains(self._generation - 1),
                self._ledger,
                course,
                Random(random.random()),
            )
            for n in range(WORKERS)
        ]
        course.over.wait(self._longest_s * (3 if end == "promise" else random.random()))
        clean = False
        if end == "stop":
            daemon.begin_stop()
            clean = self._ended_well()
        elif end == "killed while stopping":
            daemon.begin_stop()
            course.over.wait(random.random() * 0.3)
        daemon.kill()
        course.over.set()
        for worker in workers:
            worker.join()
        self.report.wrong += course.wrong
        return clean, course

    def _ended_well(self) -> bool:
        """The daemon was told to stop."""
        if (status := self._daemon.ended()) != 0:
            self.report.wrong.append(f"exit status {status}: {self._daemon.said}")
        return "durable" not in self._daemon.said

    def _fall(self, loop: int, random: Random) -> None:
        """After its death: what is on the disk, and starts that are cut short."""
        if loop % FSCK_EVERY == FSCK_EVERY - 2:
            self.report.wrong += [f"fsck: {line}" for line in self._daemon.damage()]
        if loses_index(loop):
            self._daemon.lose_indexes(random)
            self._index_lost = True
        if loop % DIES_STARTING_EVERY == DIES_STARTING_EVERY - 1:
            self._daemon.die_starting(0.2 + random.random())

    # ---- the look --------------------------------------------------------------------------------

    def _look(self, clean: bool) -> None:
        """Start it, and compare what there is with what was said."""
        daemon, report = self._daemon, self.report
        daemon.start()
        report.wrong += daemon.cap_faults()
        counters = daemon.counters()
        objects, dropped = counters["objects"], counters["dropped at the start"]
        if dropped and not self._index_lost:
            report.wrong.append(f"{dropped} objects dropped at the start: {daemon.said}")
        self._index_lost = False
        left = daemon.left()
        survey = self._survey()
        report.wrong += survey.wrong
        if objects != len(survey.listed) or not survey.found.keys() <= survey.listed:
            report.wrong.append(
                f"{objects} objects after the start, {len(survey.listed)} listed, "
                f"{len(survey.found)} can be read"
            )
        report.wrong += _strange(left, roomy=self._scenario.roomy)
        for obj in self._ledger.objects() | survey.listed:
            verdict = self._judge(obj, survey, left.get(obj, []), clean)
            report.verdicts[verdict] += 1
            if verdict in (Verdict.CORRUPT, Verdict.PHANTOM, Verdict.LOST):
                story = self._ledger.tell(obj, survey.found.get(obj), left.get(obj, []))
                print(verdict.value, story, flush=True)
        self._ledger.settle(survey.found)
        counters = daemon.counters()
        if counters["rotten"] or counters["tasks that died"]:
            report.wrong.append(f"{counters}")
        daemon.left()  # what the look itself found rotten

    def _survey(self) -> Survey:
        survey = Survey()
        clients = self._clients[0]
        survey.list(clients.values())
        known = {key for key, _ in self._ledger.objects() | survey.listed}
        for generation in range(self._generation + 1):
            for chain in self._chains(generation):
                if not known.isdisjoint(chain.keys):
                    survey.look(clients[chain.namespace], chain)
        survey.list_again(clients.values())
        return survey

    def _judge(self, obj: Object, survey: Survey, left: list[Left], clean: bool) -> Verdict:
        found = survey.found.get(obj)
        if obj not in self._ledger.objects():
            return Verdict.PHANTOM
        if found == NOBODYS:
            return Verdict.CORRUPT
        evicted = any(note.for_room for note in left)
        if obj in survey.refused and not evicted and not self._ledger.removals.get(obj[0]):
            return Verdict.CORRUPT  # not what an interrupted delete leaves
        return self._ledger.judge(obj, found, left, clean=clean)


def _strange(left: dict[Object, list[Left]], *, roomy: bool) -> list[str]:
    """What may not have been written down at all."""
    expected = {"capacity", "unreachable", "deleted"}
    return [
        f"left: {key.hex()} {part}: {note}"
        for (key, part), notes in left.items()
        for note in notes
        if note.reason not in expected or (roomy and note.for_room)
    ]


def loses_index(loop: int) -> bool:
    return loop % LOSES_INDEX_EVERY == LOSES_INDEX_EVERY - 2


@contextlib.contextmanager
def storms(scenario: Scenario, seed: int, longest_s: float = LONGEST_STORM_S) -> Iterator[Loops]:
    """The loops of a scenario; nothing is left of them afterwards if they went well."""
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    daemon = StormDaemon(
        folder,
        ram_bytes=24 * MIB,
        volumes_mib=scenario.volumes_mib,
        capped_mib=scenario.capped_mib,
    )
    loops = Loops(scenario, daemon, seed, longest_s)
    try:
        yield loops
    finally:
        loops.close()
        daemon.kill()
        if loops.report.good:
            shutil.rmtree(folder)
        else:
            print(f"left to be looked at: {folder}", flush=True)
