"""Reads a Llama, Qwen2 or Qwen3 out of one GGUF file, under Hugging Face's names.

GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from kvstored_client.engine.config import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    TokenizerSpec,
    tensor_shapes,
)

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CUTS = ("smollm", "llama-bpe", "qwen2")
"""Ways of cutting a text before merging (tokenizer.ggml.pre) that tokenizer.py knows."""


def load_gguf(
    path: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Load a model, dequantised, with its tokenizer.

    Raises CheckpointError for another architecture, another tokenizer, scaled RoPE, or tensors
    that are missing or of another shape than the header says.
    """
    try:
        reader = _Reader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader takes bytes for what they are said to be
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
    config = _config(path, fields, embedding_rows=_embedding_rows(path, reader))
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {tensor.name} cannot be dequantised: {error}"
            ) from error
        # Memory of torch's own: aligned as its kernels like it, and not a view of the file.
        weight = torch.empty(values.shape, dtype=torch.float32)
        np.copyto(weight.numpy(), values)
        tensors[hugging_face_name(tensor.name)] = weight.to(device, dtype)
    _check(path, config, tensors)
    # Qwen's rows lie as Hugging Face has them.
    for layer in range(config.layers if fields["general.architecture"] == "llama" else 0):
        prefix = f"model.layers.{layer}.self_attn."
        for name, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            key = f"{prefix}{name}.weight"
            tensors[key] = unpermute(tensors[key], heads)
    return Checkpoint(path, reader.data_offset, config, _tokenizer_spec(path, fields), tensors)


class _Reader(gguf.GGUFReader):
    """A reader that does not read on behind the end of its file, where a damaged length has it find
    nothing for ever.
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, and says something of byte {end}")
        return super()._get(offset, dtype, count, override_order)


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
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hugging_face_name(name: str) -> str:
    """Name of a GGUF tensor in `transformers`. Raises CheckpointError for one it cannot place."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and rest in _LAYER:
        return f"model.layers.{block}.{_LAYER[rest]}"
    raise CheckpointError(f"tensor {name!r} has no place in a Llama, Qwen2 or Qwen3")


def _check(path: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = tensor_shapes(config)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes.get(name):
            raise CheckpointError(
                f"{path}: {name} is {list(tensor.shape)}; {shapes.get(name)} has a place in this "
                "architecture"
            )
    missing = sorted(shapes.keys() - tensors.keys() - {"lm_head.weight"})
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, {missing[0]} first")


def _embedding_rows(path: Path, reader: gguf.GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])
    raise CheckpointError(f"{path}: no token embeddings in this file")


def _config(path: Path, fields: Mapping[str, object], embedding_rows: int) -> ModelConfig:
    kind = _text(path, fields, "general.architecture")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {kind!r}; this engine runs {', '.join(_ARCHITECTURES)}"
        )
    scaled = [
        name
        for name in fields
        if name.startswith(f"{kind}.rope.scaling") and fields[name] not in ("none", 0.0)
    ]
    if scaled:
        raise CheckpointError(
            f"{path}: scaled RoPE ({scaled[0]}) is not read from GGUF; use the model's Hugging "
            "Face directory"
        )
    for unsupported in ("expert_count", "attention.sliding_window"):
        if fields.get(f"{kind}.{unsupported}"):
            raise CheckpointError(f"{path}: {kind}.{unsupported} is not supported")
    heads = _integer(path, fields, f"{kind}.attention.head_count")
    hidden = _integer(path, fields, f"{kind}.embedding_length")
    head_dim = fields.get(f"{kind}.attention.key_length", hidden // heads)
    if fields.get(f"{kind}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{path}: RoPE over part of a head is not supported")
    if fields.get(f"{kind}.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{path}: K and V of different width are not supported")
    return ModelConfig(
        name=path.stem.split(".")[0],
        vocab_size=embedding_rows,
        hidden_size=hidden,
        intermediate_size=_integer(path, fields, f"{kind}.feed_forward_length"),
        layers=_integer(path, fields, f"{kind}.block_count"),
        heads=heads,
        kv_heads=_integer(path, fields, f"{kind}.attention.head_count_kv"),
        head_dim=_integer(path, {"head_dim": head_dim}, "head_dim"),
        rope_theta=_real(path, fields, f"{kind}.rope.freq_base"),
        rms_epsilon=_real(path, fields, f"{kind}.attention.layer_norm_rms_epsilon"),
        context_tokens=_integer(path, fields, f"{kind}.context_length"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _tokenizer_spec(path: Path, fields: Mapping[str, object]) -> TokenizerSpec:
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind[0] != "gpt2" or kind[1] not in _CUTS:
        raise CheckpointError(
            f"{path}: tokenizer {kind} is not supported; 'gpt2' with {', '.join(_CUTS)} is"
        )
    types = _items(path, fields, "tokenizer.ggml.token_type")
    control = int(gguf.TokenType.CONTROL)
    return TokenizerSpec(
        tokens=[str(token) for token in _items(path, fields, "tokenizer.ggml.tokens")],
        merges=[str(merge) for merge in _items(path, fields, "tokenizer.ggml.merges")],
        special_ids=[i for i, kind_of_token in enumerate(types) if kind_of_token == control],
        eos_id=_integer(path, fields, "tokenizer.ggml.eos_token_id", least=0),
        chat_template=str(fields.get("tokenizer.chat_template", "")),
        pre=str(kind[1]),
    )


def _field(path: Path, fields: Mapping[str, object], name: str) -> object:
    if name not in fields:
        raise CheckpointError(f"{path}: the field {name} is missing")
    return fields[name]


def _text(path: Path, fields: Mapping[str, object], name: str) -> str:
    return str(_field(path, fields, name))


def _integer(path: Path, fields: Mapping[str, object], name: str, least: int = 1) -> int:
    value = _field(path, fields, name)
    if not isinstance(value, int) or value < least:
        raise CheckpointError(f"{path}: {name} is {value!r}, not an integer from {least} on")
    return value


def _real(path: Path, fields: Mapping[str, object], name: str) -> float:
    value = _field(path, fields, name)
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{path}: {name} is {value!r}, not a number above 0")
    # GGUF holds these as float32: the shortest decimal that rounds to the same float32 is what the
    # author wrote (1e-5 and not 9.99999974e-06).
    return float(f"{value:.7g}")


def _items(path: Path, fields: Mapping[str, object], name: str) -> list[object]:
    value = _field(path, fields, name)
    if not isinstance(value, list):
        raise CheckpointError(f"{path}: {name} is not a list")
    return value
