"""Fingerprint of weights: cheap enough for every start, and another one for other weights.

Of a file it is BLAKE2b-256 over its length, its header (names, shapes, types and places of all
tensors) and blocks of its data: all of them in a file of up to SAMPLED_BYTES, an even sample in a
larger one. Of a Hugging Face directory it is BLAKE2b-256 over config.json and, of each of its
safetensors files, the same. What was read is cached by the files' identity, length and time of
change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstored_client.engine.checkpoint_hf import weight_files

BLOCK_BYTES = 64 << 10
SAMPLED_BYTES = 256 << 20
"""Data read of a larger file. A change that no sampled block sees needs a new `weights_epoch`."""

_VERSION = 2
_CACHE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """A weights file, of which `budget_bytes` of data are read."""

    path: Path
    data_offset_bytes: int
    budget_bytes: int
    identity: str


def weights_fingerprint(path: Path, data_offset_bytes: int, cache_dir: Path | None = None) -> str:
    """Fingerprint of a weights file or of a Hugging Face directory, 64 hexadecimal digits.

    `data_offset_bytes` is the length of a file's header, where the first tensor's data begins;
    safetensors files of a directory say it themselves. `cache_dir` holds fingerprints.json; None:
    the user's cache directory. A cache that cannot be read or written is passed over. Raises
    OSError when the weights cannot be read, CheckpointError for a directory that holds none.
    """
    if not path.is_dir():
        return _cached(_part(path, data_offset_bytes, SAMPLED_BYTES), cache_dir)
    digest = hashlib.blake2b(digest_size=32, person=b"kvstored-weights")
    # All of it: another head count or epsilon with the same tensors is another model.
    digest.update(hashlib.blake2b((path / "config.json").read_bytes(), digest_size=32).digest())
    files = weight_files(path)
    total = sum(file.stat().st_size for file in files)
    for file in files:
        budget = max(1, SAMPLED_BYTES * file.stat().st_size // max(1, total))
        part = _part(file, safetensors_header_bytes(file), budget)
        digest.update(bytes.fromhex(_cached(part, cache_dir)))
    return digest.hexdigest()


def safetensors_header_bytes(file: Path) -> int:
    """Length of a safetensors file's header, its length field included."""
    with file.open("rb") as stored:
        return 8 + int.from_bytes(stored.read(8), "little")


def _part(path: Path, data_offset_bytes: int, budget_bytes: int) -> _Part:
    stat = path.stat()
    identity = (
        f"{_VERSION}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        f":{stat.st_ctime_ns}:{data_offset_bytes}:{budget_bytes}"
    )
    return _Part(path, data_offset_bytes, budget_bytes, identity)


def _cached(part: _Part, cache_dir: Path | None) -> str:
    size = part.path.stat().st_size
    cache_dir = cache_dir or _user_cache_dir()
    if cache_dir is None:
        return _compute(part, size)
    cache = cache_dir / "fingerprints.json"
    known = _read_cache(cache)
    if len(known.get(part.identity, "")) == 64:
        return known[part.identity]
    value = _compute(part, size)
    _write_cache(cache, {**known, part.identity: value})
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


def _compute(part: _Part, file_bytes: int) -> str:
    offset_bytes = part.data_offset_bytes
    digest = hashlib.blake2b(digest_size=32, person=b"kvstored-weights")
    digest.update(file_bytes.to_bytes(8, "little"))
    digest.update(offset_bytes.to_bytes(8, "little"))
    with part.path.open("rb") as file:
        digest.update(file.read(offset_bytes))
        for offset in sampled_offsets(offset_bytes, file_bytes, part.budget_bytes):
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
