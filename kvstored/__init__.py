"""kvstored: the per-node KV-cache daemon. See docs/architecture.md."""

__version__ = "0.1.0"
