"""Reads a JSON object field by field, so that what is wrong is said with the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvstored_client.engine.server.errors import BadRequest

_SHOWN = 60


class Fields:
    """A request's body. Every method raises BadRequest, naming the field.

    A field that is absent and one that is null are the same. `close` refuses fields that nobody
    asked for: to pass over what a client wants would be to answer something else.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._seen: set[str] = set()

    @classmethod
    def parse(cls, raw: bytes) -> Fields:
        """From JSON. Raises BadRequest for what is no JSON object."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {str(error)[:200]!r}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return cls(body)

    def get(self, name: str) -> Any:
        """The field as it is, None where absent."""
        self._seen.add(name)
        return self._body.get(name)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} must be a whole number, not {shown(value)}", name)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadRequest(f"{name} must be a number, not {shown(value)}", name)
        if not least <= value <= most:
            raise BadRequest(f"{name} must be from {least:g} to {most:g}, not {shown(value)}", name)
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; absent is false."""
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, not {shown(value)}", name)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.get(name)
        return default if value is None else checked_text(value, name)

    def refuse(self, name: str, neutral: Iterable[Any], why: str) -> None:
        """A field of which only values that change nothing are taken."""
        value = self.get(name)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise BadRequest(f"{name} {shown(value)} is not supported: {why}", name)

    def close(self, ignored: Iterable[str] = ()) -> None:
        """Refuse the fields that were not read, but for those `ignored`."""
        unknown = sorted(set(self._body) - self._seen - set(ignored))
        if unknown:
            raise BadRequest(f"this server does not know the field {shown(unknown[0])}", unknown[0])


def checked_text(value: object, name: str) -> str:
    """`value`, if it is a string of Unicode characters. Raises BadRequest."""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string, not {shown(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise BadRequest(f"{name} has a surrogate without its other half", name) from error
    return value


def shown(value: object) -> str:
    """A value as an error may quote it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
