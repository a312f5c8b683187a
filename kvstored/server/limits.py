"""Bounds on what one call may ask. They are told to clients by Hello."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstored_client.proto import kvstore_pb2 as pb

KEY_BYTES = 32
PIECE_BYTES = 1 << 20
"""Unit of verification (design, section 3); the tiers use the same."""


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """Bounds on local sessions; see docs/configuration.md, `[local]`.

    Fractions are of the namespace's RAM cap: how much of it leases, holds and reservations may keep
    in place, of one session and of all sessions of the namespace; and of the tier's cap, for all
    namespaces together, so that something can always be evicted.
    """

    max_sessions: int = 256
    max_requests: int = 64  # under way, of one session
    max_leases: int = 4096  # ids in use, of one session
    ring_bytes: int = 4 << 20
    max_staging_bytes: int = 256 << 20  # areas of one session
    max_total_staging_bytes: int = 1 << 30  # rings and areas of all sessions
    max_leased_fraction_session: float = 0.5
    max_leased_fraction_namespace: float = 0.75
    max_leased_fraction_tier: float = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds per call, per message and per daemon. The defaults suit one node's engines."""

    max_keys_per_call: int = 16_384  # a prompt of 1,000,000 tokens is 15,625 chunks of 64
    max_objects_per_call: int = 65_536
    max_parts_per_family: int = 256
    max_families_per_hello: int = 64
    max_family_spec_bytes: int = 64 << 10
    min_object_bytes: int = 4 << 10
    max_object_bytes: int = 256 << 20
    max_put_bytes: int = 1 << 30
    max_frame_bytes: int = 2 << 20
    max_label_bytes: int = 64  # request id, tenant, part name
    max_hint_bytes: int = 256  # session id
    max_cursor_bytes: int = 1024
    max_list_entries: int = 10_000
    default_list_entries: int = 1_000
    max_ttl_ms: int = 10 * 365 * 86_400_000
    max_call_s: float = 120.0
    stall_timeout_s: float = 10.0  # that a payload stream's peer may send or take nothing
    max_running_calls: int = 256
    max_running_streams: int = 64
    retry_after_ms: int = 50
    local: LocalLimits = field(default_factory=LocalLimits)

    def to_proto(self) -> pb.Limits:
        """What Hello tells clients."""
        return pb.Limits(
            max_keys_per_call=self.max_keys_per_call,
            max_parts_per_family=self.max_parts_per_family,
            min_object_bytes=self.min_object_bytes,
            max_object_bytes=self.max_object_bytes,
            max_put_bytes=self.max_put_bytes,
            max_frame_bytes=self.max_frame_bytes,
            max_families_per_hello=self.max_families_per_hello,
            max_objects_per_call=self.max_objects_per_call,
        )
