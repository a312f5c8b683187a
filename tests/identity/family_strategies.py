"""Hypothesis strategies for families, prompts and extras."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvstored_client.identity import Extra, GroupRule, KVFamily

SALT = bytes(range(32))

words = st.text(st.characters(codec="utf-8"), max_size=12)
names = words.filter(bool)
blobs = st.binary(max_size=12)
labels = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=4)
rules = st.one_of(
    st.builds(GroupRule.all, words),
    st.builds(GroupRule.trailing, st.integers(1, 2**32 - 1), words),
    st.builds(GroupRule.last, words),
)
token_ids = st.integers(0, 2**32 - 1)
prompts = st.lists(token_ids, min_size=1, max_size=40)


# Every field that enters the fingerprint.
FIELD_STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "model": names,
    "weights": blobs.filter(bool),
    "kv_dtype": names,
    "chunk_tokens": st.integers(1, 8),
    "weights_epoch": st.integers(0, 2**64 - 1),
    "lora": words,
    "quantisation": words,
    "quantisation_scales": blobs,
    "groups": st.dictionaries(labels, rules, min_size=1, max_size=3),
    "position_encoding": words,
    "draft_model": words,
    "memory_order": words,
    "engine_format": words,
}

fields = st.fixed_dictionaries(FIELD_STRATEGIES)
families = fields.map(lambda drawn: KVFamily(**drawn))


@st.composite
def extras(draw: st.DrawFn, stop: int = 50) -> list[Extra]:
    """Up to four extras that begin before `stop`."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, stop - 1))
        length = draw(st.integers(1, 20))
        found.append(Extra(start, start + length, draw(st.binary(min_size=1, max_size=64))))
    return found


def split_keys(keys: bytes) -> list[bytes]:
    """Packed keys as a list."""
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]
