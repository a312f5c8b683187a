"""Validation of single fields: integers, byte strings, text and labels.

Text is taken as given: UTF-8, no Unicode normalisation, no case folding, NUL allowed where nothing
else is said (every field is length-prefixed, so it cannot run into the next).
"""

from __future__ import annotations

import re

from kvstored_client.identity.errors import FieldError, IdentityError, LabelError

MAX_FIELD_BYTES = 1024
"""Longest text or byte field of a family, and longest request salt."""

MAX_LABEL_BYTES = 64
"""Longest namespace, tenant, part or group name."""

DEFAULT_TENANT = "default"

_UINT64_STOP = 1 << 64
_UINT32_STOP = 1 << 32
# C0, DEL, C1 and the two Unicode line breaks: a label goes into logs and metrics as it is.
_BREAKS_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def uint(
    field: str,
    value: object,
    *,
    least: int = 0,
    stop: int = _UINT32_STOP,
    error: type[IdentityError] = FieldError,
) -> int:
    """`value` if it is an int (not a bool) with least <= value < stop; else raises `error`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(field, f"must be an int, not {type(value).__name__}")
    if not least <= value < stop:
        raise error(field, f"must be {least} to {stop - 1}, not {value}")
    return int(value)


def uint64(field: str, value: object, *, error: type[IdentityError] = FieldError) -> int:
    """`value` if it is an int of 0 to 2**64 - 1; else raises `error`."""
    return uint(field, value, stop=_UINT64_STOP, error=error)


def octets(
    field: str,
    value: object,
    *,
    least: int = 0,
    most: int = MAX_FIELD_BYTES,
    error: type[IdentityError] = FieldError,
    position: int | None = None,
) -> bytes:
    """`value` if it is bytes of `least` to `most` bytes; else raises `error`."""
    if not isinstance(value, bytes):
        raise error(field, f"must be bytes, not {type(value).__name__}", position)
    if not least <= len(value) <= most:
        raise error(field, f"must be {least} to {most} bytes long, not {len(value)}", position)
    return bytes(value)


def text(
    field: str,
    value: object,
    *,
    least: int = 0,
    most: int = MAX_FIELD_BYTES,
    error: type[IdentityError] = FieldError,
) -> str:
    """`value` if it is a str of `least` to `most` bytes of UTF-8; else raises `error`."""
    if not isinstance(value, str):
        raise error(field, f"must be a str, not {type(value).__name__}")
    try:
        length_bytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as exc:
        problem = f"character {exc.start} is a lone surrogate, which UTF-8 cannot carry"
        raise error(field, problem) from None
    if not least <= length_bytes <= most:
        raise error(field, f"must be {least} to {most} bytes of UTF-8 long, not {length_bytes}")
    return str(value)


def label(field: str, value: object, *, error: type[IdentityError] = LabelError) -> str:
    """`value` if it is a label: 1 to 64 bytes of UTF-8 without control characters.

    Raises `error` otherwise.
    """
    checked = text(field, value, least=1, most=MAX_LABEL_BYTES, error=error)
    found = _BREAKS_A_LINE.search(checked)
    if found is not None:
        problem = f"character {found.start()} is a control character (U+{ord(found.group()):04X})"
        raise error(field, problem)
    return checked


def validate_namespace(namespace: str) -> str:
    """`namespace` if it is a label (1 to 64 bytes of UTF-8, no control characters).

    Raises LabelError.
    """
    return label("namespace", namespace)


def validate_tenant(tenant: str) -> str:
    """`tenant` if it is a label as for `validate_namespace`; the empty string gives "default".

    Raises LabelError.
    """
    return DEFAULT_TENANT if tenant == "" else label("tenant", tenant)
