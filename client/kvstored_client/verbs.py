"""All verbs of one client together."""

from __future__ import annotations

from kvstored_client.admin_verbs import AdminVerbs
from kvstored_client.payload_verbs import PayloadVerbs
from kvstored_client.small_verbs import SmallVerbs


class Verbs(PayloadVerbs, SmallVerbs, AdminVerbs):
    """What both clients run, each with its own transport."""
