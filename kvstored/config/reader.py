"""Typed reading of one section: every fault is noted, reading goes on, nothing is raised.

A value that cannot be used is noted as a problem and replaced by the default, so that one run finds
every fault. Each value read is also noted as `Effective`, for `kvstored check-config`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstored.config.secret import MASK
from kvstored.config.sizes import format_size, parse_size
from kvstored.config.sources import Table

T = TypeVar("T")

MAX_BYTES = 1 << 60
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting as it will be used. `shown` is TOML, secrets masked; `note` says it in words."""

    table: str
    key: str
    shown: str
    source: str
    note: str = ""


@dataclass(slots=True)
class Report:
    """What validation found: problems refuse the start, warnings are logged."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    effective: list[Effective] = field(default_factory=list)

    def add(self, more: Report) -> None:
        """Take over what another report holds."""
        self.problems += more.problems
        self.warnings += more.warnings
        self.effective += more.effective


class Section:
    """One table of the configuration. `path` is its name in messages, like "ram"."""

    def __init__(self, path: str, table: Table, report: Report, header: str = "") -> None:
        self._path = path
        self._table = table
        self._report = report
        self._header = header or f"[{path}]"
        self._asked: list[str] = []

    def given(self, key: str) -> bool:
        """Somebody gave this key a value."""
        return key in self._table

    def automatic(self, key: str) -> bool:
        """Nobody gave this key a value, or somebody said "auto"."""
        return not self.given(key) or self._table[key].value == AUTO

    def complain(self, key: str, what: str) -> None:
        """Note that a key's value cannot be used; `what` says why and what would be right."""
        given = self._table.get(key)
        value = f" = {_shown(given.value)} ({given.source})" if given else ""
        self._report.problems.append(f"{self._path}.{key}{value}: {what}")

    def complain_secret(self, key: str, what: str) -> None:
        """As `complain`, for a key whose value must not be shown. `key` may end in an index,
        "tokens[1]".
        """
        given = self._table.get(key.partition("[")[0])
        self._report.problems.append(
            f"{self._path}.{key}{f' ({given.source})' if given else ''}: {what}"
        )

    def size(self, key: str, default: int, *, least: int, most: int = MAX_BYTES) -> int:
        """Bytes, from a whole number or a text with a unit."""

        def parse(value: object) -> int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if isinstance(value, str):
                return parse_size(value)
            raise ValueError

        size = self._parse(
            key, default, parse, 'write bytes as a whole number or with a unit, such as "1GiB"'
        )
        if not least <= size <= most:
            self.complain(key, f"must be from {format_size(least)} to {format_size(most)}")
            size = default
        return self._note(key, size, str(size), format_size(size))

    def size_or_auto(self, key: str, default: int, *, least: int, most: int = MAX_BYTES) -> int:
        """As `size`; "auto" means the default too."""
        if self.given(key) and self.automatic(key):
            return self._note(key, default, json.dumps(AUTO), format_size(default))
        return self.size(key, default, least=least, most=most)

    def auto(self, key: str, size: int, why_not: str) -> int:
        """A size that follows from others: nothing but "auto" may be given, for the reason said."""
        if not self.automatic(key):
            self.complain(key, why_not)
        return self._note(key, size, json.dumps(AUTO), format_size(size))

    def integer(self, key: str, default: int, *, least: int, most: int) -> int:
        """A whole number."""
        wanted = f"write a whole number from {least} to {most}"
        number = self._parse(key, default, lambda v: _number(v, int, self._text(key)), wanted)
        if not least <= number <= most:
            self.complain(key, wanted)
            number = default
        return self._note(key, number, str(number))

    def seconds(self, key: str, default: float, *, least: float, most: float) -> float:
        """A duration in seconds, whole or not."""
        wanted = f"write seconds from {least:g} to {most:g}"
        number = self._parse(key, default, lambda v: _number(v, float, self._text(key)), wanted)
        if not least <= number <= most:
            self.complain(key, wanted)
            number = default
        return self._note(key, number, f"{number:g}")

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""

        def parse(value: object) -> bool:
            if self._text(key) and isinstance(value, str):
                return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            if isinstance(value, bool):
                return value
            raise ValueError

        flag = self._parse(key, default, parse, "write true or false")
        return self._note(key, flag, "true" if flag else "false")

    def choice(self, key: str, default: str, options: Sequence[str]) -> str:
        """One of a few words."""
        wanted = "write one of " + ", ".join(options)
        word = self._parse(key, default, _string, wanted)
        if word not in options:
            self.complain(key, wanted + suggestion(word, options))
            word = default
        return self._note(key, word, json.dumps(word))

    def text(self, key: str, default: str, parse: Callable[[str], T], wanted: str) -> T:
        """A text that `parse` turns into something; its ValueError's message is the complaint."""
        text = self._parse(key, default, _string, wanted)
        try:
            value = parse(text)
        except ValueError as error:
            self.complain(key, str(error) or wanted)
            text, value = default, parse(default)
        return self._note(key, value, json.dumps(text))

    def texts(self, key: str) -> list[str]:
        """A list of texts, shown as it is; empty by default."""
        found = self._texts(key)
        return self._note(key, found, json.dumps(found))

    def secret_texts(self, key: str) -> list[str]:
        """A list of texts that are never shown; empty by default."""
        found = self._texts(key, secret=True)
        return self._note(key, found, json.dumps([MASK] * len(found)))

    def secret_text(self, key: str) -> str | None:
        """A text that is never shown; None where it is not given."""
        value = self._table[key].value if self.given(key) else None
        if value is not None and not (isinstance(value, str) and value):
            self.complain_secret(key, "write a text in quotes")
            value = None
        self._note(key, None, json.dumps(MASK) if value else '""')
        return value if isinstance(value, str) else None

    def finish(self, *more: str) -> None:
        """Note every key that nobody asked for, with the known one that is most like it. `more`:
        other known keys, which stand in tables of their own.
        """
        self._asked += more
        for key in self._table.keys() - set(self._asked):
            known = ", ".join(self._asked)
            what = suggestion(key, self._asked, "unknown key") + f"; {self._header} has {known}"
            # A secret under a misspelt key is still a secret.
            (self.complain_secret if secretive(key) else self.complain)(key, what)

    def _texts(self, key: str, *, secret: bool = False) -> list[str]:
        if not self.given(key):
            return []
        value = self._table[key].value
        if self._text(key) and isinstance(value, str):
            return [item.strip() for item in value.split(",") if item.strip()]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        complain = self.complain_secret if secret else self.complain
        complain(key, 'write a list of texts, such as ["a", "b"]')
        return []

    def _parse(self, key: str, default: T, parse: Callable[[object], T], wanted: str) -> T:
        if not self.given(key):
            return default
        try:
            return parse(self._table[key].value)
        except (ValueError, KeyError):
            self.complain(key, wanted)
            return default

    def _text(self, key: str) -> bool:
        return self.given(key) and self._table[key].text

    def _note(self, key: str, value: T, shown: str, note: str = "") -> T:
        self._asked.append(key)
        source = self._table[key].source if self.given(key) else "default"
        self._report.effective.append(Effective(self._header, key, shown, source, note))
        return value


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`prefix`, followed by the known word that is most like `word`, if one is."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    separator = ", " if prefix else "; "
    return f"{prefix}{separator}did you mean {near[0]}?" if near else prefix


def secretive(key: str) -> bool:
    """A key whose value may be a secret, to judge by its name."""
    return any(word in key.lower() for word in ("token", "secret", "password"))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _number(value: object, kind: Callable[[str], T], text: bool) -> T:
    if text and isinstance(value, str):
        return kind(value)
    fitting = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, fitting):
        raise ValueError
    return kind(str(value))


def _shown(value: object) -> str:
    """A value as it would stand in TOML, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
