"""One answer's tokens to text, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kvstored_client.engine.tokenizer import TextStream, Tokenizer
from kvstored_client.engine.types import FinishReason


class StopFinder:
    """Cuts a text before the first of `stops`, as its pieces come.

    First is the one that is complete first; of two that are complete at the same character, the
    longer. So the cut does not depend on where one piece ends and the next begins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Take a piece. Returns what is certain now: no part of it belongs to a stop string."""
        if self.found:
            return ""
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at) for at, stop in places if at >= 0]
        if ends:
            self.found = True
            certain, self._held = self._held[: min(ends)[1]], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain

    def finish(self) -> str:
        """No more text comes. Returns what was held back."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """Text of one answer, token by token. `finish_reason` is set when it ended: by a stop string,
    an end token, or its length. `tokens`: those sampled until then.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self._stream = TextStream(tokenizer)
        self._stops = StopFinder(stops)

    def push(self, token_id: int, reason: FinishReason | None) -> str:
        """Take one token; `reason` where the engine ended with it. Returns new text."""
        self.tokens += 1
        text = "" if reason == "stop" else self._stream.push(token_id)  # an end token has no text
        if reason is not None:
            text += self._stream.finish()
        text = self._stops.push(text)
        if self._stops.found:
            self.finish_reason = "stop"
        elif reason is not None:
            self.finish_reason = reason
            text += self._stops.finish()
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
