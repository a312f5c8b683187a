"""Hypothesis without its clock: machines that run these tests are busy with others."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
