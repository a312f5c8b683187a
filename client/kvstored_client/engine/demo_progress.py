"""Signs of life while a prompt is computed: in place on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 3.0
"""Between lines where the output is no terminal."""

_ERASE_LINE = "\r\x1b[K"
"""ECMA-48: to the first column, erase to the end of the line."""


class PrefillProgress:
    """Told of every step of one prompt's prefill; says how far it is.

    A prompt that is computed within `every_s` gets no line.
    """

    def __init__(
        self, out: TextIO, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._in_place = out.isatty()
        self._every_s = every_s
        self._clock = clock
        self._said = clock()

    def step(self, tokens: int, prompt_tokens: int) -> None:
        """`tokens` of `prompt_tokens` are in place."""
        text = f"    {tokens} of {prompt_tokens} prompt tokens in place ..."
        if self._in_place:
            self._out.write(_ERASE_LINE + text)
        elif tokens < prompt_tokens and self._clock() - self._said >= self._every_s:
            self._said = self._clock()
            self._out.write(text + "\n")
        self._out.flush()

    def end(self) -> None:
        """Make room for what comes next. Idempotent."""
        if self._in_place:
            self._out.write(_ERASE_LINE)
            self._out.flush()
