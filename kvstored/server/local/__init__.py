"""Local sessions: the same verbs over shared memory. See docs/protocol.md, "Local session"."""
