"""Sessions that put, look, let go, stall, die and come back by chance, against a model.

Whatever a live client was granted and has not released stays what it was, where it was; nobody is
granted anything but bytes that somebody offered in full for that very object; and what nobody has
any more is given back.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from server import local_wire as w
from server.local_machine_book import ALL_PARTS, CHUNKS, ODD_BYTES, PARTS, PREFIXES, Book, Span
from server.local_machine_checks import Checks
from server.local_machine_client import LATE, NEVER, PROMPT, Client
from server.local_machine_peers import Peers
from server.local_machine_world import World, open_fds, shared_maps
from server.serving import TOKEN

from kvstored.server.local import staging
from kvstored.tiers.ram import retirement

TOKENS = {"default": "", "locked": TOKEN}
MOST_SESSIONS = 6

WHO = st.integers(0, MOST_SESSIONS - 1)
IDS = st.integers(1, 9)
CHANCE = st.booleans()
SPANS = st.builds(
    lambda prefix, start, count, parts: Span(prefix, start, min(count, CHUNKS - start), parts),
    st.integers(0, PREFIXES - 1),
    st.sampled_from((0, 0, 0, 2)),
    st.integers(1, CHUNKS),
    st.sampled_from(PARTS),
)
WHOLE = st.builds(lambda prefix: Span(prefix, 0, CHUNKS, ALL_PARTS), st.integers(0, PREFIXES - 1))
SOON_MS, LATER_MS = 30, 5000


class Machine(Checks, RuleBasedStateMachine):
    """Rules name sessions by number, modulo those there are: what a rule draws depends on nothing
    that the daemon does, so that a failure shrinks although threads take part in it.
    """

    peers: Peers
    kept_bytes = 1 << 20  # one area of each session

    @initialize(answers=st.sampled_from((PROMPT, LATE, NEVER)))
    def begin(self, answers: str) -> None:
        self.world = World(self.disk)
        self.book = Book()
        self.clients: list[Client] = []
        self.connect("default", PROMPT)
        self.connect("default", answers)
        self.connect("locked", PROMPT)
        for prefix in range(2 if self.disk else 1):  # over a disk some are below RAM
            for client in self.clients:
                self.world.do(self.put_whole(client, Span(prefix, 0, CHUNKS, ALL_PARTS)))
                self.world.do(self.world.quiet())

    def someone(self, who: int) -> Client | None:
        """A session that is served."""
        served = [client for client in self.clients if not client.quarantined]
        return served[who % len(served)] if served else None

    # ---- coming and going ------------------------------------------------------------------------

    @rule(
        namespace=st.sampled_from(("default", "default", "locked")),
        answers=st.sampled_from((PROMPT, LATE, NEVER)),
    )
    def connect(self, namespace: str, answers: str) -> None:
        if len(self.clients) >= MOST_SESSIONS:
            self.die(self.clients[0])
        connection, process = self.peers.connect(self.world.path)
        client = Client(self.world.path, connection, process, self.book, answers)
        self.clients.append(client)
        self.world.do(client.start(namespace, TOKENS[namespace]))

    @rule(who=WHO, how=st.sampled_from(("end", "die", "break", "read and break")))
    def go(self, who: int, how: str) -> None:
        if how in ("end", "die") and self.clients:
            client = self.clients[who % len(self.clients)]
            self.end(client) if how == "end" else self.die(client)
        elif (served := self.someone(who)) is not None:
            self.break_off(served, how != "break")

    def end(self, client: Client) -> None:
        """By the client, as it should be."""
        client.shut_down()
        self.forget(client)
        client.process.kill()

    def die(self, client: Client) -> None:
        """Its socket lives on: another process has it."""
        client.process.kill()
        self.forget(client)

    def forget(self, client: Client) -> None:
        self.clients.remove(client)
        client.lost_its_answers()
        self.world.do(self.world.until(lambda: self.world.session(client.number) is None))
        if client.events is not None:
            self.world.loop.remove_reader(client.events)
        client.close()

    def break_off(self, client: Client, first: bool) -> None:
        """The daemon ends a session that sends garbage; `first`: of which all was read."""

        async def broken() -> None:
            if first:
                await client.barrier()
            client.send_raw(b"\xff" * 64)
            await self.world.until(lambda: self.world.quarantined(client.number))
            with pytest.raises(w.Ended):
                await client.until(lambda: False)

        client.quarantined = True
        self.world.do(broken())
        client.lost_its_answers()

    # ---- puts ------------------------------------------------------------------------------------

    @rule(
        who=WHO,
        span=SPANS,
        odd=st.sampled_from(ODD_BYTES),
        how=st.sampled_from(("unread", "half", "cancelled")),
        wait=CHANCE,
    )
    def put(self, who: int, span: Span, odd: int, how: str, wait: bool) -> None:
        if (client := self.someone(who)) is None:
            return

        async def put() -> None:
            putting = await client.begin_put(span, odd, SOON_MS if wait else 0)
            if putting is None:
                return
            size = len(putting.payload)
            await client.write(putting, size if how == "unread" else size // 2)
            if how == "cancelled":
                client.send(w.CANCEL, putting.asked.request_id)
                await client.answered(putting.asked)

        self.world.do(put())

    async def put_whole(self, client: Client, span: Span, odd: int = ODD_BYTES[0]) -> None:
        putting = await client.begin_put(span, odd, 0)
        if putting is not None:
            await client.write(putting, len(putting.payload))
            await client.answered(putting.asked)

    @rule(whos=st.lists(WHO, min_size=1, max_size=3), span=WHOLE, odd=st.sampled_from(ODD_BYTES))
    def fill(self, whos: list[int], span: Span, odd: int) -> None:
        """Whole prefixes, of which not many have room at a time; whoever looked at them maps them
        still.
        """
        for who in whos:
            if client := self.someone(who):
                self.world.do(self.put_whole(client, span, odd))
                lease_id = client.free_id()
                self.world.do(client.answered(client.acquire_span(span, SOON_MS)))
                client.let_go(lease_id, quietly=True)

    @rule(who=WHO, span=SPANS, odd=st.sampled_from(ODD_BYTES), keep=CHANCE)
    def work(self, who: int, span: Span, odd: int, keep: bool) -> None:
        """What an engine does: take what is there, or bring it."""
        if (client := self.someone(who)) is None:
            return

        async def work() -> None:
            lease_id = client.free_id()
            await client.answered(client.acquire_span(span, SOON_MS))
            if lease_id not in client.leases:
                await self.put_whole(client, span, odd)
                await client.answered(client.acquire_span(span, SOON_MS))
            self.views_have_their_bytes()
            if not keep:
                client.let_go(lease_id, quietly=True)

        self.world.do(work())

    @rule(who=WHO, how=st.sampled_from(("on", "cancel", "answer")))
    def go_on(self, who: int, how: str) -> None:
        """With a put that stopped half-way."""
        client = self.someone(who)
        if client is None or (putting := client.putting) is None:
            return

        async def go_on() -> None:
            if how == "cancel" and not putting.asked.over:
                client.send(w.CANCEL, putting.asked.request_id)
            elif not putting.asked.over:
                await client.write(putting, len(putting.payload))
            if how != "on":
                await client.answered(putting.asked)

        self.world.do(go_on())

    @rule(
        who=WHO,
        span=SPANS,
        odd=st.sampled_from(ODD_BYTES),
        more=st.sampled_from(("nothing", "release", "commit", "commit")),
        step=st.integers(1, 3),
    )
    def reserve(self, who: int, span: Span, odd: int, more: str, step: int) -> None:
        if client := self.someone(who):
            self.world.do(client.reserve(span, odd, in_one_breath=more == "release"))
            if more == "commit":
                self.commit(who, 0, step)

    @rule(who=WHO, which=IDS, step=st.integers(1, 3))
    def commit(self, who: int, which: int, step: int) -> None:
        """What was reserved, or every n-th of it."""
        client = self.someone(who)
        if client is None or not client.reservations:
            return
        ids = [*client.reservations]
        lease_id = ids[which % len(ids)]
        chosen = [*client.reservations[lease_id].offers][::step] if step > 1 else []
        self.world.do(client.commit(lease_id, chosen))

    # ---- leases ----------------------------------------------------------------------------------

    @rule(
        who=WHO,
        spans=st.lists(st.one_of(WHOLE, SPANS), min_size=1, max_size=3),
        gated=CHANCE,
        then=st.lists(
            st.sampled_from(("read", "release", "cancel", "delete", "open the gate")), max_size=3
        ),
    )
    def acquire(self, who: int, spans: list[Span], gated: bool, then: list[str]) -> None:
        """`gated`: what comes from the disk comes later. `then`: with the answers under way."""
        if (client := self.someone(who)) is None:
            return
        if gated:
            self.world.gate.clear()
        ids = []
        for span in spans:
            ids.append(client.free_id())
            client.acquire_span(span, LATER_MS)
        for what in then:
            if what == "release":
                for lease_id in ids:
                    client.let_go(lease_id, quietly=True)
            elif what == "delete":
                self.delete_at(client, spans[0])
            else:
                self.meanwhile_at(client, what)

    @rule(
        who=WHO,
        which=st.lists(IDS, min_size=1, max_size=4),
        quietly=CHANCE,
        everything=CHANCE,
    )
    def release(self, who: int, which: list[int], quietly: bool, everything: bool) -> None:
        """Leases, holds, reservations, ids of nothing; before the answer or after, or twice."""
        if client := self.someone(who):
            if everything:
                which = [*client.leases, *client.holds, *client.reservations, *which]
            for lease_id in which:
                asked = client.let_go(lease_id, quietly)
                if asked is not None:
                    self.world.do(client.answered(asked))

    @rule(who=WHO, span=SPANS)
    def hold(self, who: int, span: Span) -> None:
        if client := self.someone(who):
            self.world.do(client.hold(span))

    @rule(who=WHO, span=SPANS)
    def delete(self, who: int, span: Span) -> None:
        """Its answer waits for readers of the disk."""
        if client := self.someone(who):
            self.delete_at(client, span)

    def delete_at(self, client: Client, span: Span) -> None:
        for other in self.clients:
            if other.namespace == client.namespace:
                for held in [*other.holds.values(), *other.leases.values()]:
                    held.gone |= span.with_what_is_below()
        asked = client.delete(span)
        if self.world.gate.is_set():
            self.world.do(client.answered(asked))

    # ---- meanwhile -------------------------------------------------------------------------------

    @rule(
        who=WHO,
        what=st.sampled_from(("read", "cancel", "unmap", "time", "open the gate", "shut the gate")),
    )
    def meanwhile(self, who: int, what: str) -> None:
        """Clients read what has come; give acquires up; unmap late. What is not unmapped is
        overdue. The disk answers or does not.
        """
        if what == "time":
            self.world.do(self.world.time_passes())
        elif what == "unmap":
            for late in self.clients:
                if late.answers == LATE and not late.quarantined:
                    late.read_events()
                    late.unmap()
        elif client := self.someone(who):
            self.meanwhile_at(client, what)

    def meanwhile_at(self, client: Client, what: str) -> None:
        if what == "open the gate":
            self.world.gate.set()
        elif what == "shut the gate":
            self.world.gate.clear()
        elif what == "read":
            self.world.do(client.barrier())
        elif what == "cancel":
            for asked in client.asked.values():
                if asked.kind == w.ACQUIRE:
                    client.send(w.CANCEL, asked.request_id)

    # ---- what holds at all times -----------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "clients"):
            self.check()

    # ---- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            while self.clients:
                (self.die if len(self.clients) % 2 else self.end)(self.clients[0])
            self.check()
            self.nothing_is_left()
        finally:
            for client in self.clients:
                client.process.kill()
                client.close()
            world.close()
        assert world.errors == []
        assert shared_maps() == 0
        assert open_fds() == world.fds


class DiskMachine(Machine):
    """The same over a disk: acquires wait for it, and answer late."""

    disk = True
    kept_bytes = 0


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    made = Peers()
    World(disk=False).close()  # what a process opens once and keeps is there from now on
    yield made
    made.close()


@pytest.mark.timeout(600)  # a failure takes its time to shrink
@pytest.mark.parametrize(
    ("machine", "examples", "steps"), [(Machine, 40, 80), (DiskMachine, 30, 60)]
)
def test_sessions_by_chance(
    machine: type[Machine],
    examples: int,
    steps: int,
    peers: Peers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retirement, "CLIENTS_S", 0.0)
    monkeypatch.setattr(retirement, "EXPECTED_S", 3600.0)
    monkeypatch.setattr(staging, "KEPT_BYTES", machine.kept_bytes)
    monkeypatch.setattr(staging, "_RETIRE_WAIT_S", 0.01)
    monkeypatch.setattr(machine, "peers", peers, raising=False)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(machine, settings=chosen)
