"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1 << (10 * power) for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}b": int(f"1{'000' * power}") for power, prefix in enumerate("kmgtp", start=1)},
}
"""Lower-case unit -> bytes: IEC units are powers of 1024, SI units powers of 1000."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes that a text such as "1GiB", "1.5 TiB", "500MB" or "4096" names.

    Raises ValueError for any other text, and for a fraction of a byte.
    """
    found = _SIZE.fullmatch(text)
    if not found or (unit := UNITS.get(found[2].lower())) is None:
        raise ValueError(f"not a size: {text!r}")
    whole, _, fraction = found[1].partition(".")
    scaled, rest = divmod(int(whole + fraction) * unit, int("1" + "0" * len(fraction)))
    if rest:
        raise ValueError(f"not a whole number of bytes: {text!r}")
    return scaled


def format_size(size_bytes: int) -> str:
    """The size in the largest fitting IEC unit, rounded to two decimals: "1.5 GiB"."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
