"""Stop strings, whatever the pieces are in which a text comes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored_client.engine.config import TokenizerSpec
from kvstored_client.engine.server.text import AnswerText, StopFinder
from kvstored_client.engine.tokenizer import Tokenizer


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The same by looking at every beginning of the text."""
    for length in range(len(text) + 1):
        ended = [stop for stop in stops if text[:length].endswith(stop)]
        if ended:
            return text[: length - max(map(len, ended))], True
    return text, False


@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 14), max_size=8),
)
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], borders: list[int]
) -> None:
    finder = StopFinder(stops)
    places = sorted({0, *(min(at, len(text)) for at in borders), len(text)})
    given_so_far = ""
    for start, stop in itertools.pairwise(places):
        given_so_far += finder.push(text[start:stop])
        assert cut(text, stops)[0].startswith(given_so_far)
    if not finder.found:
        given_so_far += finder.finish()
    assert (given_so_far, finder.found) == cut(text, stops)


def test_text_is_given_as_soon_as_no_stop_can_begin_in_it() -> None:
    finder = StopFinder(["\n\nUser:", "END"])
    assert finder.push("An answer.\n") == "An answer."
    assert finder.push("\n") == ""
    assert finder.push("Use it") == "\n\nUse it"
    assert finder.push(" E") == " "
    assert finder.push("N") == ""
    assert finder.push("D and more") == ""
    assert finder.found


@pytest.mark.parametrize(
    ("last", "text", "reason"), [("stop", "é", "stop"), ("length", "é\ufffd", "length")]
)
def test_characters_come_whole_and_end_tokens_have_no_text(
    last: str, text: str, reason: str
) -> None:
    spec = TokenizerSpec(["Ã", "©", "x"], [], [], -1, "")  # how byte-level BPE writes C3, A9, x
    answer = AnswerText(Tokenizer(spec), [])
    pieces = [answer.push(0, None), answer.push(1, None), answer.push(0, last)]  # type: ignore[arg-type]
    assert pieces == ["", "é", text[1:]]
    assert (answer.finish_reason, answer.tokens) == (reason, 3)
