"""RAM tier: sealed memfd segments cut into slabs."""

from kvstored.tiers.ram.places import Location, Locations
from kvstored.tiers.ram.table import PlaceError
from kvstored.tiers.ram.tier import RamTier

__all__ = ["Location", "Locations", "PlaceError", "RamTier"]
