"""The same-node path: a session on the daemon's local socket, and what it lends of its memory.

Spoken as docs/protocol.md, "Local session", says. Imports neither grpc nor torch.
"""
