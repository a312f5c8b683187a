"""Reads a Hugging Face directory: config.json, safetensors in one file or many, and where its
tokenizer is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvstored_client.engine.config import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    TokenizerFiles,
    tensor_shapes,
)
from kvstored_client.engine.config_hf import model_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_directory(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> Checkpoint:
    """Load a Llama, Qwen2 or Qwen3. `dtype` None: what config.json says.

    Raises CheckpointError for everything else, and for files that are missing or damaged.
    """
    raw = _json(path / "config.json")
    config = model_config(raw, path.resolve().name)
    if dtype is None:
        named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        if named not in _DTYPES:
            raise CheckpointError(
                f"{path}: weights of dtype {named!r} are not run as they are; give a dtype, one of "
                f"{', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[named]
    tied = bool(raw.get("tie_word_embeddings", False))
    tensors = _tensors(path, config, tied, dtype, device)
    return Checkpoint(path, 0, config, _tokenizer(path, raw), tensors)


def weight_files(path: Path) -> list[Path]:
    """The directory's safetensors files, in the order of their names. Raises CheckpointError."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        pickled = next(path.glob("*.bin"), None)
        hint = f"; {pickled.name} is pickled, convert it" if pickled else ""
        raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX}{hint}")
    placed = _json(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{path / INDEX}: it has no weight_map")
    names = sorted({str(name) for name in placed.values()})
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(f"{path}: {INDEX} names {name!r}, which is not there")
    return [path / name for name in names]


def _tensors(
    path: Path,
    config: ModelConfig,
    tied: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    shapes = tensor_shapes(config)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    if name.endswith(".rotary_emb.inv_freq"):
                        continue  # of old checkpoints; it is computed
                    tensor = stored.get_tensor(name)
                    _check(file, name, tensor, shapes)
                    # Memory of torch's own: aligned as its kernels like it, no map of the file.
                    tensors[name] = tensor.to(device, dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: it cannot be read: {error}") from error
    if tied:
        tensors.pop("lm_head.weight", None)
        del shapes["lm_head.weight"]
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, {missing[0]} first")
    return tensors


def _check(
    file: Path, name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if name not in shapes:
        raise CheckpointError(
            f"{file}: tensor {name!r} has no place in the model config.json names"
        )
    if tuple(tensor.shape) != shapes[name]:
        raise CheckpointError(
            f"{file}: {name} is {list(tensor.shape)}, not {list(shapes[name])} as config.json says"
        )
    if tensor.dtype not in _DTYPES.values() and tensor.dtype != torch.float64:
        raise CheckpointError(f"{file}: {name} is {tensor.dtype}: quantised weights are not read")


def _tokenizer(path: Path, raw: Mapping[str, object]) -> TokenizerFiles:
    settings = _json(path / "tokenizer_config.json", optional=True)
    generation = _json(path / "generation_config.json", optional=True)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    special = {name: _content(settings.get(name)) for name in _TEMPLATE_TOKENS}
    return TokenizerFiles(
        tokenizer_json=path / "tokenizer.json",
        chat_template=_chat_template(path, settings),
        special_tokens={name: token for name, token in special.items() if token},
        eos_ids=tuple(i for i in ids if isinstance(i, int)),
    )


def _chat_template(path: Path, settings: Mapping[str, object]) -> str:
    """The default template; a file of its own goes before what tokenizer_config.json has."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: it cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # named ones
        named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _content(token: object) -> str:
    """A special token is written as text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _json(path: Path, *, optional: bool = False) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: it cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: it holds no JSON object")
    return value
