"""Byte-level BPE tokenizer and chat template, built from what a GGUF file says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jinja2.sandbox
import tokenizers

from kvstored_client.engine.checkpoint import TokenizerSpec

Message = Mapping[str, str]
"""One chat message: {"role": "system" | "user" | "assistant", "content": text}."""


class Tokenizer:
    """Text to token ids and back.

    The pre-tokeniser "smollm" cuts out digits one by one, then splits as GPT-2 does.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        vocab = {token: i for i, token in enumerate(spec.tokens)}
        merges = [_pair(merge) for merge in spec.merges]
        self._bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bpe.decoder = tokenizers.decoders.ByteLevel()
        special = [spec.tokens[i] for i in spec.special_ids]
        self._bpe.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
        )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        self._template = environment.from_string(spec.chat_template)
        self.eos_id = spec.eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens; bytes that the
        vocabulary lacks (of some control characters and of planes without characters) are lost.
        """
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are not whole UTF-8 characters become U+FFFD."""
        return str(self._bpe.decode(list(token_ids), skip_special_tokens=skip_special))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer begins."""
        text = self._template.render(messages=list(messages), add_generation_prompt=True)
        return self.encode(text)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
