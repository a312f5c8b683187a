"""RAM tier: sealed memfd segments cut into slabs."""
