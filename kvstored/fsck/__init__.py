"""An independent reader of NVMe volumes, written from docs/nvme-format.md: `kvctl fsck --offline`.

It shares nothing with the tier but constants, so that a mistake in the one is not a mistake in the
other, and it never writes.
"""
