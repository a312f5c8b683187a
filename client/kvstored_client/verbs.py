"""All verbs of one client together."""

from __future__ import annotations

from kvstored_client.admin_verbs import AdminVerbs
from kvstored_client.local_verbs import LocalVerbs
from kvstored_client.small_verbs import SmallVerbs


class Verbs(LocalVerbs, SmallVerbs, AdminVerbs):
    """What both clients run, each with its own transport."""
