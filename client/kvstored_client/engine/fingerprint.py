"""Fingerprint of a weights file: cheap enough for every start, and another one for other weights.

It is BLAKE2b-256 over the file's length, its header (names, shapes, types and places of all
tensors) and blocks of its data: all of them in a file of up to SAMPLED_BYTES, an even sample in a
larger one. The result is cached by the file's identity, length and time of change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 64 << 10
SAMPLED_BYTES = 256 << 20
"""Data read of a larger file. A change that no sampled block sees needs a new `weights_epoch`."""

_VERSION = 1
_CACHE_ENTRIES = 64


def weights_fingerprint(path: Path, data_offset_bytes: int, cache_dir: Path | None = None) -> str:
    """Fingerprint of a weights file, 64 hexadecimal digits.

    `data_offset_bytes` is the length of the header, where the first tensor's data begins.
    `cache_dir` holds fingerprints.json; None: the user's cache directory. A cache that cannot be
    read or written is passed over. Raises OSError when the weights cannot be read.
    """
    stat = path.stat()
    identity = (
        f"{_VERSION}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        f":{stat.st_ctime_ns}:{data_offset_bytes}"
    )
    cache_dir = cache_dir or _user_cache_dir()
    if cache_dir is None:
        return _compute(path, data_offset_bytes, stat.st_size)
    cache = cache_dir / "fingerprints.json"
    known = _read_cache(cache)
    if len(known.get(identity, "")) == 64:
        return known[identity]
    value = _compute(path, data_offset_bytes, stat.st_size)
    _write_cache(cache, {**known, identity: value})
    return value


def sampled_offsets(data_offset_bytes: int, file_bytes: int, budget_bytes: int) -> Iterator[int]:
    """Offsets of the data blocks that count: every one while they fit into `budget_bytes`, else as
    many as fit, evenly spaced, the first and the last among them.
    """
    blocks = -(-(file_bytes - data_offset_bytes) // BLOCK_BYTES)
    wanted = min(blocks, max(2, budget_bytes // BLOCK_BYTES))
    for i in range(wanted):
        index = i if wanted == blocks else i * (blocks - 1) // (wanted - 1)
        yield data_offset_bytes + index * BLOCK_BYTES


def _compute(path: Path, data_offset_bytes: int, file_bytes: int) -> str:
    digest = hashlib.blake2b(digest_size=32, person=b"kvstored-weights")
    digest.update(file_bytes.to_bytes(8, "little"))
    digest.update(data_offset_bytes.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(data_offset_bytes))
        for offset in sampled_offsets(data_offset_bytes, file_bytes, SAMPLED_BYTES):
            digest.update(os.pread(file.fileno(), BLOCK_BYTES, offset))
    return digest.hexdigest()


def _user_cache_dir() -> Path | None:
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvstored"
    try:
        return Path.home() / ".cache" / "kvstored"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        stored = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {str(key): str(value) for key, value in stored.items()}


def _write_cache(cache: Path, entries: dict[str, str]) -> None:
    recent = dict(list(entries.items())[-_CACHE_ENTRIES:])
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another engine starting now reads the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            json.dump(recent, file)
        os.replace(file.name, cache)
