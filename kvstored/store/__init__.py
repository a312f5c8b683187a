"""The tiered store: index, leases, placement, accounting. Imports tiers, never server."""
