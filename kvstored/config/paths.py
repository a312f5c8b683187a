"""Absolute paths as people write them."""

from __future__ import annotations

from pathlib import Path


def absolute(text: str) -> Path:
    """The path, `~` being the home directory. Raises ValueError for one that is not absolute, and,
    with a message, for one that no system could open.
    """
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL character: take it out")
    path = Path(text).expanduser()
    if not text or not path.is_absolute():
        raise ValueError
    return path


def absolute_or_none(text: str) -> Path | None:
    """The same; None for an empty text."""
    return absolute(text) if text else None
