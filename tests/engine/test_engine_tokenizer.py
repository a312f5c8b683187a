"""The tokenizer against known encodings and against BPE done by hand."""

from __future__ import annotations

import itertools

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored_client.engine.checkpoint import Checkpoint
from kvstored_client.engine.tokenizer import Tokenizer

# GPT-2's pattern, and its table of printable stand-ins for the 256 bytes.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
STAND_IN = {byte: chr(byte) for byte in PRINTABLE}
STAND_IN |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}

SAMPLES = [
    "Hello, world!",
    "In 1884 the price rose 12.5% to 1,234,567 francs.",
    "  two  spaces\n\n\tand a tab \n",
    "don't we'll I'm they've CAN'T",
    "naïve café, Straße, 日本語, Ελληνικά, 👩‍🚀",
    "def f(x):\n    return x**2  # comment\n",
    "",
]


def encode_by_hand(checkpoint: Checkpoint, text: str) -> list[int]:
    ids = {token: i for i, token in enumerate(checkpoint.tokenizer.tokens)}
    ranks = {merge: i for i, merge in enumerate(checkpoint.tokenizer.merges)}
    out = []
    pieces = [p for span in regex.split(r"(\p{N})", text) for p in regex.findall(GPT2, span)]
    for piece in pieces:
        symbols = [STAND_IN[byte] for byte in piece.encode()]
        while len(symbols) > 1:
            pairs = [f"{a} {b}" for a, b in itertools.pairwise(symbols)]
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            i = pairs.index(best)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        out += [ids[symbol] for symbol in symbols]
    return out


@pytest.mark.parametrize("text", SAMPLES)
def test_encodes_as_bpe_by_hand(checkpoint: Checkpoint, tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == encode_by_hand(checkpoint, text)


# The vocabulary lacks bytes that no assigned character has, and some control characters.
WRITABLE = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF) | st.sampled_from(
    "\n\t"
)


@settings(max_examples=60, deadline=None)
@given(text=st.text(WRITABLE, max_size=60))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_known_encodings(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert tokenizer.encode("2024") == [34, 32, 34, 36]
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]


def test_chat_template_opens_the_assistants_turn(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_a_later_turn_extends_the_earlier_one(tokenizer: Tokenizer) -> None:
    turn = [{"role": "user", "content": "Hi"}]
    first = tokenizer.chat(turn)
    later = [*turn, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "So?"}]
    assert tokenizer.chat(later)[: len(first)] == first
