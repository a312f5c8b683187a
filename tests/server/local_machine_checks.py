"""What holds of the machine at all times: what its clients may see, and the daemon's books."""

from __future__ import annotations

from server.local_machine_book import padded
from server.local_machine_client import Client
from server.local_machine_world import CAP_BYTES, CAPS, RING_BYTES, World


class Checks:
    """Over a world and its sessions."""

    world: World
    clients: list[Client]
    disk = False

    def check(self) -> None:
        """Everything, once what was sent has been taken in."""
        world = self.world
        for client in self.clients:
            world.do(world.until(lambda client=client: not client.unread_bytes))
        world.do(world.settle())
        self.views_have_their_bytes()
        self.leases_protect()
        self.books_agree()
        self.memory_is_counted()
        self.holds_protect()
        assert world.errors == []

    def views_have_their_bytes(self) -> None:
        for client in self.clients:
            for lease in client.leases.values():
                if lease.released:
                    continue
                for row in lease.rows:
                    mapped = client.segments[row.segment_id]
                    assert mapped[row.offset : row.offset + len(row.data)] == row.data

    def leases_protect(self) -> None:
        """To evict what is leased frees nothing. Without a disk it may go with what is above."""
        for client in self.clients if self.disk else []:
            for lease in client.leases.values():
                for row in lease.rows:
                    gone = lease.released or row.key in lease.gone
                    assert gone or self.world.in_ram(client.namespace, row.key)

    def books_agree(self) -> None:
        """What the daemon says is leased, and what clients know to be."""
        namespaces: dict[str, int] = dict.fromkeys(CAPS, 0)
        for client in self.clients:
            session = self.world.session(client.number)
            assert session is not None
            assert session.leases is not None
            held = sum(h.each_bytes * len(h.keys) for h in session.leases._holds.values())
            known = sum(
                padded(len(row.data))
                for lease in client.leases.values()
                if not lease.released
                for row in lease.rows
            )
            known += held + sum(r.charged_bytes for r in client.reservations.values())
            if client.asked or client.surprised:
                assert session.leased_bytes >= known
            else:
                assert session.leased_bytes == known
            assert session.leased_bytes <= CAPS[client.namespace] // 2
            namespaces[client.namespace] += session.leased_bytes
        figures = self.world.server.figures()
        assert figures.leased_bytes == sum(namespaces.values())
        assert figures.leased_bytes <= CAP_BYTES * 9 // 10
        for namespace, cap_bytes in CAPS.items():
            assert namespaces[namespace] <= cap_bytes * 3 // 4
        self.places_are_leased()

    def places_are_leased(self) -> None:
        rows = {
            (row.segment_id, row.offset): padded(len(row.data))
            for client in self.clients
            for lease in client.leases.values()
            if not lease.released
            for row in lease.rows
        }
        leased_bytes = self.world.ram.leased_bytes
        assert leased_bytes >= sum(rows.values())
        if not self.disk and not any(c.asked or c.surprised for c in self.clients):
            assert leased_bytes == sum(rows.values())

    def memory_is_counted(self) -> None:
        """All that anybody maps, until it is unmapped."""
        counted = self.world.counted()
        usage = self.world.ram.usage()
        assert usage.footprint_bytes == sum(counted.values()) <= CAP_BYTES
        for client in self.clients:
            assert client.segments.keys() <= counted.keys()
            for segment_id in client.segments:
                record = self.world.ram._slabs.segments[segment_id]
                assert record.namespace == client.namespace
                assert len(client.segments[segment_id]) == record.size_bytes
        staging_bytes = sum(
            sum(map(len, client.areas.values())) + (RING_BYTES if client.ring else 0)
            for client in self.clients
        )
        told = self.world.server.figures().staging_bytes
        assert told >= staging_bytes
        if not any(client.asked or client.surprised for client in self.clients):
            assert told == staging_bytes

    def holds_protect(self) -> None:
        """A key that is held is in some tier, unless somebody deleted it."""
        counts = {namespace: self.world.holds(namespace) for namespace in CAPS}
        for client in self.clients:
            session = self.world.session(client.number)
            assert session is not None
            assert session.leases is not None
            holds = session.leases._holds
            assert holds.keys() <= client.holds.keys()
            for hold_id, held in client.holds.items():
                kept = holds[hold_id].keys if hold_id in holds else set()
                assert held.keys - held.used <= kept <= held.keys
                counts[client.namespace].subtract(kept)
                for key in kept - held.gone:
                    assert self.world.held(client.namespace, key)
        if not any(client.asked for client in self.clients):
            assert not any(count for held in counts.values() for count in held.values())

    def nothing_is_left(self) -> None:
        world = self.world
        world.do(world.quiet())
        figures = world.server.figures()
        assert (figures.sessions, figures.quarantined_sessions) == (0, 0)
        assert figures.leased_bytes == world.ram.leased_bytes == 0
        assert figures.staging_bytes == 0
        assert not any(world.holds(namespace) for namespace in CAPS)
        assert not world.server._sessions
        assert not world.server._retiring
        assert not world.ram._retirement._leaving
        assert world.counted().keys() == world.ram._growth.memory.keys()
        assert world.dispatcher.open_payload_calls == 0
        world.do(world.delete_everything())
