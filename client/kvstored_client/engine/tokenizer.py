"""Text to token ids and back, chat templates, and text as tokens come.

From a Hugging Face directory the tokenizer is what tokenizer.json says. GGUF holds only vocabulary
and merges of a byte-level BPE, and the name of the way in which a text is cut before merging.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.sandbox
import tokenizers

from kvstored_client.engine.config import CheckpointError, TokenizerFiles, TokenizerSpec

Message = Mapping[str, object]
"""One chat message: {"role": "system" | "user" | "assistant", "content": text}."""

_REPLACEMENT = "\ufffd"

_CUTS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class ChatError(ValueError):
    """Messages that the model's chat template does not take, or a model without one."""


class Tokenizer:
    """A tokenizer and its chat template. A token of `eos_ids` ends an answer."""

    def __init__(self, source: TokenizerSpec | TokenizerFiles) -> None:
        """Raises CheckpointError for a tokenizer.json or merges that are absent or damaged, or a
        template that is none.
        """
        if isinstance(source, TokenizerFiles):
            self._tokenizer = _from_file(source)
            self._special: Mapping[str, str] = source.special_tokens
            named = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
            self.eos_ids = source.eos_ids or (() if named is None else (named,))
        else:
            self._tokenizer = _from_gguf(source)
            self._special = {}
            self.eos_ids = (source.eos_id,)
        # What the file says of batches: a prompt that is cut short would be another prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.longest_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        """No token of a text stands for more characters, but for one that means unknown."""
        self._template = _compiled(source.chat_template) if source.chat_template else None

    @property
    def eos_id(self) -> int:
        """The first of `eos_ids`, -1 where there is none."""
        return self.eos_ids[0] if self.eos_ids else -1

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self._template is not None

    def encode(self, text: str, *, with_special: bool = False) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens; bytes that the
        vocabulary lacks (of some control characters and of planes without characters) are lost.

        `with_special`: with the tokens that this model has before every text, as Llama 3 does.
        Templates write them themselves.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=with_special).ids)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are not whole UTF-8 characters become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next answer begins.

        Raises ChatError for messages that the template does not take.
        """
        return self.encode(self.chat_text(messages))

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, as `chat` encodes it. Raises ChatError."""
        if self._template is None:
            raise ChatError("this model has no chat template; use completions")
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is a program, and may fail as any other
            raise ChatError(f"the model's chat template refuses the messages: {error}") from error


class TextStream:
    """Text of one answer as its tokens come.

    What it gave, joined, is the text of all tokens: a character is given when its last byte came.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens whose text was given, kept because how a token reads may depend on the one before
        # it; and those after them.
        self._before: list[int] = []
        self._pending: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """Take one token. Returns the text that is certain now, and was not before."""
        self._pending.append(token_id)
        text = self._text()
        whole = text.rstrip(_REPLACEMENT)  # may be bytes of a character that is not whole yet
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        if whole and len(whole) == len(text):
            self._before, self._pending, self._given = self._pending, [], 0
        return new

    def finish(self) -> str:
        """No more tokens come. Returns what was held back."""
        return self._text()[self._given :]

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode([*self._before, *self._pending])[len(before) :]


def _from_file(source: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(source.tokenizer_json))
    except Exception as error:  # `tokenizers` raises Exception itself, for an absent file too
        raise CheckpointError(f"{source.tokenizer_json} cannot be read: {error}") from error


def _from_gguf(spec: TokenizerSpec) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(spec.tokens)}
    merges = [_pair(merge) for merge in spec.merges]
    # Llama 3 takes a piece that is a token as it is, whatever the merges would make of it.
    whole = spec.pre == "llama-bpe"
    try:
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)
    except Exception as error:  # `tokenizers` raises Exception itself
        raise CheckpointError(f"the tokenizer's merges cannot be used: {error}") from error
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = _cut(spec.pre)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    if spec.pre == "qwen2":
        bpe.normalizer = tokenizers.normalizers.NFC()
    special = [spec.tokens[i] for i in spec.special_ids]
    bpe.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return bpe


def _cut(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Digits one by one, then as GPT-2 does for "smollm"; by a pattern for the others."""
    parts = tokenizers.pre_tokenizers
    if pre == "smollm":
        return parts.Sequence(
            [
                parts.Digits(individual_digits=True),
                parts.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    pattern = tokenizers.Regex(_CUTS[pre])
    return parts.Sequence(
        [
            parts.Split(pattern, "isolated"),
            parts.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _compiled(template: str) -> jinja2.Template:
    """As `transformers` renders templates: in a sandbox, for they come with the weights."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise CheckpointError(f"the chat template cannot be read: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
