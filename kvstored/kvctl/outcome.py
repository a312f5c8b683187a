"""What a command comes to."""

from __future__ import annotations

from dataclasses import dataclass

from kvstored.kvctl.text import Json

DONE, FAILED, WRONG_USAGE = 0, 1, 2
BROKEN_PIPE = 128 + 13  # what a shell says of a program that SIGPIPE ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to: exit status, the JSON object, and the same for people. `aside`: both
    belong on stderr, as stdout has got payload.
    """

    status: int
    answer: dict[str, Json]
    people: str
    aside: bool = False


def failure(status: int, message: str, detail: str = "") -> Outcome:
    """A command that could not be carried out. `detail` is what a library says of it."""
    answer: dict[str, Json] = {"error": message}
    if detail:
        answer["detail"] = detail
    return Outcome(status, answer, f"{message}\n  {detail}" if detail else message)
