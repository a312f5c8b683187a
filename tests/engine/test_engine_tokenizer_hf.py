"""tokenizer.json and chat templates against transformers; text as tokens come."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tokenizers
from engine_hf import change_json, save_random
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvstored_client.engine.checkpoint import Checkpoint, TokenizerFiles, load
from kvstored_client.engine.config import CheckpointError, TokenizerSpec
from kvstored_client.engine.tokenizer import ChatError, TextStream, Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that transformers imports
    from transformers import PreTrainedTokenizerFast

TEXT = ["It was the best of times, it was the worst of times, naïve café 日本語 1884"] * 3
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
<|s|>You are {{ {"calm": "né"} | tojson }}<|e|>
    {%- endif %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
<|s|>{{ message.role }}
{{ message.content | trim }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
<|s|>assistant
{% endif %}"""
CHAT = [
    {"role": "user", "content": " Hi, 日本 \n"},
    {"role": "assistant", "content": "skip"},
    {"role": "user", "content": "It was the best <|e|> of"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-level tokenizer trained here, which begins texts with <|b|>."""
    path = tmp_path_factory.mktemp("model")
    save_random(path, "llama")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|b|>", "<|s|>", "<|e|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(TEXT, trainer)
    bpe.post_processor = processors.TemplateProcessing("<|b|> $A", special_tokens=[("<|b|>", 0)])
    bpe.save(str(path / "tokenizer.json"))
    change_json(
        path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|b|>",
        eos_token={"content": "<|e|>", "__type": "AddedToken"},
        chat_template=TEMPLATE,
    )
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer(load(folder).tokenizer)


def test_texts_and_chats_encode_as_transformers_do(folder: Path, ours: Tokenizer) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in (*TEXT, "", "<|s|>user", "  \n\x00ß👩‍🚀"):
        assert ours.encode(text, with_special=True) == theirs.encode(text)
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == plain
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
    for chat in (CHAT, CHAT[:1], [{"role": "system", "content": "x"}]):
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.chat_text(chat) == rendered
        assert ours.chat(chat) == theirs.encode(rendered, add_special_tokens=False)
    assert ours.chat(CHAT)[0] == 0
    assert ours.eos_ids == (2,)


def test_what_a_file_says_of_batches_does_not_cut_a_prompt(folder: Path, tmp_path: Path) -> None:
    batches = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches.enable_truncation(4)
    batches.enable_padding(length=64)
    batches.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(TokenizerFiles(folder / "tokenizer.json", "", {}, ()))
    cut = Tokenizer(TokenizerFiles(tmp_path / "tokenizer.json", "", {}, ()))
    text = "one two three four five six seven"
    assert len(ours.encode(text)) > 4
    assert cut.encode(text) == ours.encode(text)


def test_messages_a_template_refuses_are_the_callers_mistake(ours: Tokenizer) -> None:
    for messages, message in [
        ([{"role": "robot", "content": "x"}], "no role robot"),
        ([{"role": 5, "content": "x"}], "refuses the messages"),
        ([{"content": "x"}], "refuses the messages"),
    ]:
        with pytest.raises(ChatError, match=message):
            ours.chat(messages)


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ 'x' * 10 ** 20 }}", "{{ '%d' % 'a' }}"])
def test_a_template_that_fails_refuses_the_messages(folder: Path, template: str) -> None:
    tokenizer = Tokenizer(TokenizerFiles(folder / "tokenizer.json", template, {}, ()))
    with pytest.raises(ChatError, match="refuses the messages"):
        tokenizer.chat([])


def test_templates_cannot_reach_beyond_the_messages(folder: Path) -> None:
    """They come with weights from anywhere."""
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer(TokenizerFiles(folder / "tokenizer.json", escape, {}, ()))
    with pytest.raises(ChatError, match="unsafe"):
        tokenizer.chat([])
    assert tokenizer.eos_id == -1


def test_what_is_damaged_or_absent_is_named(folder: Path, tmp_path: Path) -> None:
    files = TokenizerFiles(folder / "tokenizer.json", "", {}, (2,))
    with pytest.raises(ChatError, match="no chat template; use completions"):
        Tokenizer(files).chat([])
    for damaged in ("{% if %}", "{{" + "(" * 5000 + ")" * 5000 + "}}"):
        with pytest.raises(CheckpointError, match="the chat template cannot be read"):
            Tokenizer(TokenizerFiles(folder / "tokenizer.json", damaged, {}, ()))
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        Tokenizer(TokenizerFiles(tmp_path / "tokenizer.json", "", {}, ()))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(i) for i in ids), stream.finish()]


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 299), max_size=30))
def test_a_stream_gives_the_text_of_all_tokens(ours: Tokenizer, ids: list[int]) -> None:
    """Any tokens: bytes in any order, halves of characters, special ones."""
    ids = [i for i in ids if i < 270]
    assert "".join(streamed(ours, ids)) == ours.decode(ids)


def test_characters_come_whole_and_at_once(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    text = "Zürich, 日本語 👩‍🚀 and so on."
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""
    assert sum(piece != "" for piece in pieces) > 8


def test_a_stream_keeps_the_spaces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Its decoder drops the space before the first word, and only there."""
    vocab = {"<unk>": 0, "▁one": 1, "▁two": 2, "three": 3, "<0xC3>": 4, "<0xBC>": 5}
    unigram = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    unigram.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    unigram.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(TokenizerFiles(tmp_path / "tokenizer.json", "", {}, ()))
    assert streamed(tokenizer, [1, 2, 3, 4, 5, 2]) == ["one", " two", "three", "", "ü", " two", ""]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'m", " in", " ", "1", "2", "3", "4", "5", "!\n\n"]),
        ("qwen2", ["I", "'m", " in", " ", "1", "2", "3", "4", "5", "!\n\n"]),
        ("llama-bpe", ["I", "'m", " in", " ", "123", "45", "!\n\n"]),
    ],
)
def test_gguf_names_how_a_text_is_cut(pre: str, pieces: list[str]) -> None:
    """Tokens of two characters and more would join across a cut if it were not one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "I'm in 12345!\n\n"
    spec = TokenizerSpec(alphabet, [], [], 0, "", pre)
    cut = Tokenizer(spec)._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    got = [text[a:b] for _, (a, b) in cut]
    if pre == "smollm":
        assert got == [*pieces[:-1], "!", "\n\n"]
    else:
        assert got == pieces
